"""Calls to engines: JSON questions, and answers passed on as they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from examples.router.routing import Engine

CONNECT_TIMEOUT_S = 2.0
IDLE_TIMEOUT_S = 120.0
"""How long an engine may say nothing in the middle of an answer; a long prompt takes a while."""
ANSWER_BYTES_MAX = 64 << 20
"""One answer that is not streamed."""
SERVER_ERROR = 500


class EngineFailedError(Exception):
    """An engine did not do its part: ask another one."""


class Upstream:
    """One HTTP client for all engines. Connections are kept."""

    def __init__(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)  # the server bounds requests in flight
        self._session = aiohttp.ClientSession(connector=connector)

    async def close(self) -> None:
        await self._session.close()

    async def healthy(self, engine: Engine, timeout_s: float) -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._session.get(f"{engine.url}/health", timeout=timeout) as answer:
                return bool(answer.status < SERVER_ERROR)
        except (aiohttp.ClientError, TimeoutError):
            return False

    @asynccontextmanager
    async def send(
        self,
        engine: Engine,
        path: str,
        body: Mapping[str, Any] | None,
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The engine's answer, once its head is there. A POST, without a body a GET.

        Raises `EngineFailedError` when it cannot be reached, breaks off, is late or says that
        the fault is its own.
        """
        engine.in_flight += 1
        try:
            async with self._session.request(
                "GET" if body is None else "POST",
                engine.url + path,
                json=body,
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(
                    total=timeout_s, sock_connect=CONNECT_TIMEOUT_S, sock_read=IDLE_TIMEOUT_S
                ),
            ) as answer:
                if answer.status >= SERVER_ERROR:
                    raise EngineFailedError(f"{engine.url} answered {answer.status}")
                yield answer
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as e:
            raise EngineFailedError(f"{engine.url}: {type(e).__name__} {e}".rstrip()) from e
        finally:
            engine.in_flight -= 1

    async def ask(
        self,
        engine: Engine,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        timeout_s: float,
    ) -> dict[str, Any] | None:
        """A JSON object; None when the engine refuses the question (4xx). Raises like `send`."""
        async with self.send(engine, path, body, headers, timeout_s) as answer:
            raw = await whole(answer)
            if not answer.ok:
                return None
        try:
            # Off the loop: the answer to a long prompt may be long.
            found = await asyncio.to_thread(json.loads, raw)
        except ValueError as e:
            raise EngineFailedError(f"{engine.url}{path} answered no JSON") from e
        if not isinstance(found, dict):
            raise EngineFailedError(f"{engine.url}{path} answered no JSON object")
        return found


async def whole(answer: aiohttp.ClientResponse) -> bytes:
    """All of an answer. Raises `EngineFailedError` beyond `ANSWER_BYTES_MAX`."""
    parts: list[bytes] = []
    size = 0
    async for part in answer.content.iter_any():
        size += len(part)
        if size > ANSWER_BYTES_MAX:
            raise EngineFailedError(f"{answer.url}: more than {ANSWER_BYTES_MAX} bytes")
        parts.append(part)
    return b"".join(parts)
