"""Sends the router's own answers, and all answers to clients that may not read them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from connector.router.incoming import BodyRefusedError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
COME_BACK_S = 1
BRIEF_S = 10.0
"""The shortest time that a client gets for an answer: the whole time for one about the router
itself."""


class ClientGoneError(Exception):
    """Raised when the client hung up, or did not read in time: no engine is to blame."""


@asynccontextmanager
async def to_client(request: web.Request, timeout_s: float) -> AsyncIterator[None]:
    """Raises `ClientGoneError`, so that the client's broken connection is not the engine's; also
    when the client has not read enough in time."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as e:
        if request.transport is not None:
            request.transport.abort()
        raise ClientGoneError from e
    except ConnectionError as e:
        raise ClientGoneError from e


async def sent(request: web.Request, handler: Handler, timeout_s: float) -> web.StreamResponse:
    """Return the answer to a request, or why there is none, when its client has it."""
    deadline = time.monotonic() + timeout_s
    try:
        out = await handler(request)
    except BodyRefusedError as e:
        out = error(e.status, str(e))
    except ClientGoneError:
        return web.Response(status=499)  # to nobody
    with suppress(ClientGoneError):
        async with to_client(request, max(deadline - time.monotonic(), BRIEF_S)):
            await out.prepare(request)
            await out.write_eof()
    return out


def come_back(message: str) -> web.Response:
    return error(503, message, {"Retry-After": str(COME_BACK_S)})


def error(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return an error as OpenAI's API says it."""
    body = {"error": {"message": message, "type": "router_error", "code": status}}
    return web.Response(
        status=status, text=json.dumps(body), content_type="application/json", headers=headers
    )
