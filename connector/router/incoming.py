"""Reads requests' bodies within their limits, of clients that may send anything or nothing.

A body is counted before it is parsed: 16 MiB of empty lists are 6 million objects, which the loop
would make in one go.
"""

from __future__ import annotations

import asyncio
import json

from aiohttp import web

from connector.limits import (
    ROUTER_BODY_BYTES_MAX,
    ROUTER_BODY_TIMEOUT_S,
    ROUTER_IN_FLIGHT_MAX,
    ROUTER_LISTS_MAX,
    ROUTER_VALUES_MAX,
)
from kvstore.spi import open_files_share


def most_in_flight() -> int:
    """Return how many requests there may be at a time: each takes two file descriptors."""
    return min(ROUTER_IN_FLIGHT_MAX, 3 * open_files_share(ROUTER_IN_FLIGHT_MAX, 8))


class BodyRefusedError(Exception):
    """Raised for a body that is refused or not read to its end."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Incoming:
    """Reads bodies, and knows which have not come yet."""

    def __init__(self) -> None:
        self._coming: dict[asyncio.Transport, None] = {}
        """Connections whose requests' bodies have not arrived, in the order in which they began."""

    async def body(self, request: web.Request, timeout_s: float) -> dict[str, object]:
        """Return the JSON object that is the request's body. Raises `BodyRefusedError`."""
        return _json_object(await self.octets(request, timeout_s))

    async def octets(self, request: web.Request, timeout_s: float) -> bytes:
        """Return the request's body as it came. Raises `BodyRefusedError`.

        Of all in flight at most half may be waiting for their bodies: for one more the oldest is
        hung up on, so that slow ones do not keep others out.
        """
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise BodyRefusedError(415, "the body is packed (Content-Encoding): send it as it is")
        transport = request.transport
        if transport is not None:
            if len(self._coming) >= max(most_in_flight() // 2, 1):
                oldest = next(iter(self._coming))
                del self._coming[oldest]
                oldest.abort()
            self._coming[transport] = None
        try:
            async with asyncio.timeout(min(timeout_s, ROUTER_BODY_TIMEOUT_S)):
                raw: bytes = await request.read()
        except web.HTTPRequestEntityTooLarge as e:
            why = f"the body has more than {ROUTER_BODY_BYTES_MAX} bytes"
            raise BodyRefusedError(413, why) from e
        except TimeoutError as e:
            raise BodyRefusedError(408, "the body has not come in time") from e
        except web.RequestPayloadError as e:  # it is not cut as its head says
            raise BodyRefusedError(400, "the body cannot be read") from e
        finally:
            if transport is not None:
                self._coming.pop(transport, None)
        return raw

    async def hang_up(self, app: web.Application) -> None:
        """End the requests whose bodies have not come: a router that ends waits for none."""
        for transport in list(self._coming):
            transport.abort()


def _json_object(raw: bytes) -> dict[str, object]:
    try:
        encoding = json.detect_encoding(raw)
        if encoding not in ("utf-8", "utf-8-sig"):
            # Counted as UTF-8, too: in others a byte like a comma is part of many characters.
            raw = raw.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
        too_much = _too_much(raw)
        body = None if too_much else json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise BodyRefusedError(400, "the body is not JSON") from e
    if too_much is not None:
        raise BodyRefusedError(413, too_much)
    if not isinstance(body, dict):
        raise BodyRefusedError(400, "the body is not a JSON object")
    return body


def _too_much(raw: bytes) -> str | None:
    """Return what a body has too much of, None for one that may be parsed."""
    if len(raw) <= min(ROUTER_LISTS_MAX, ROUTER_VALUES_MAX):
        return None  # each takes a byte
    too_much = _counted(raw)
    if too_much is None:
        return None
    # Only now, for it takes longer: what looks like lists and values may be in texts.
    plain = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') > 2 * ROUTER_VALUES_MAX:
        return f"more than {ROUTER_VALUES_MAX} texts"
    return _counted(b"".join(plain.split(b'"')[::2]))


def _counted(raw: bytes) -> str | None:
    if raw.count(b"[") + raw.count(b"{") > ROUTER_LISTS_MAX:
        return f"more than {ROUTER_LISTS_MAX} lists and objects"
    if raw.count(b",") > ROUTER_VALUES_MAX:
        return f"more than {ROUTER_VALUES_MAX} values"
    return None
