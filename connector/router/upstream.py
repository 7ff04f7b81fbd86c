"""Calls engines: asks for JSON, and passes answers on as they come."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import aiohttp

from connector.limits import (
    ROUTER_ANSWER_BYTES_MAX,
    ROUTER_HEADERS_BYTES_MAX,
    ROUTER_IN_FLIGHT_MAX,
)
from connector.router.clients import NO_DESCRIPTORS, say_no_descriptors
from connector.router.incoming import most_in_flight
from connector.router.routing import Engine
from kvstore.spi import DaemonThreads

CONNECT_TIMEOUT_S = 2.0
SILENT_S = 20.0
"""Time of silence after which an engine's probes decide. A long prompt, a queue or an answer that
is not streamed may take minutes; an engine that hangs takes forever."""
KEEPALIVE_S = 4.0
"""Less than vLLM's 5 s, because a request is lost on a connection that its engine closes at that
moment."""
CLIENT_ERROR, SERVER_ERROR = 400, 500
PARSERS = 4
"""Threads that parse long answers."""
T = TypeVar("T")


class EngineFailedError(Exception):
    """Raised when an engine did not do its part; another one may be asked."""


class NoAnswerError(EngineFailedError):
    """Raised when an engine cannot be reached, broke off or hangs. It is the one failure that
    concerns the engine and not only the request."""


class NoDescriptorsError(EngineFailedError):
    """Raised when this process has no file descriptor left. That is no engine's fault."""


class TooLateError(EngineFailedError):
    """Raised when the time for an answer is over. That is not the engine's fault."""


class Answer:
    """Holds an engine's answer, whose head has arrived."""

    def __init__(self, engine: Engine, response: aiohttp.ClientResponse, deadline: float) -> None:
        self._engine = engine
        self._response = response
        self._deadline = deadline
        self.status = response.status
        self.headers = response.headers

    async def part(self) -> bytes:
        """Return the bytes that came since the last call; empty at the end. Raises as
        `Upstream.send`."""
        return await _patiently(self._engine, self._deadline, self._response.content.readany)

    async def whole(self) -> bytes:
        """Return the whole body. Raises like `part`, and `EngineFailedError` when it is too
        long."""
        parts: list[bytes] = []
        size = 0
        while part := await self.part():
            size += len(part)
            if size > ROUTER_ANSWER_BYTES_MAX:
                at_most = f"at most {ROUTER_ANSWER_BYTES_MAX} bytes (router_answer_bytes_max)"
                raise EngineFailedError(f"{self._engine.url}: its answer is too long: {at_most}")
            parts.append(part)
        return b"".join(parts)


async def _patiently(engine: Engine, deadline: float, wait: Callable[[], Awaitable[T]]) -> T:
    """Return what `wait` returns; it is called again when it takes long and the engine is well.

    Raises `NoAnswerError`, and `TooLateError` at `deadline`.
    """
    while True:
        limit = asyncio.timeout(min(SILENT_S, deadline - time.monotonic()))
        try:
            async with limit:
                return await wait()
        except TimeoutError:
            if not limit.expired():
                raise
        if time.monotonic() >= deadline:
            raise TooLateError(f"{engine.url} has not answered in time")
        if engine.hangs:
            raise NoAnswerError(
                f"{engine.url} sent nothing for {SILENT_S} s and fails its health probes"
            )


class Upstream:
    """Calls all engines by one HTTP client. Connections are kept."""

    def __init__(self) -> None:
        # The server bounds requests in flight. Where descriptors do, none is kept idle.
        if most_in_flight() < ROUTER_IN_FLIGHT_MAX:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
        else:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,  # an answer is passed on as it came
            max_line_size=ROUTER_HEADERS_BYTES_MAX,
            max_field_size=ROUTER_HEADERS_BYTES_MAX,
        )
        self._threads = DaemonThreads(PARSERS, "router-json")

    async def close(self) -> None:
        self._threads.close()
        await self._session.close()

    async def healthy(self, engine: Engine, timeout_s: float) -> bool | None:
        """Return whether it answers its probe; None when this process cannot ask."""
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._session.get(f"{engine.url}/health", timeout=timeout) as answer:
                return bool(answer.status < SERVER_ERROR)
        except (aiohttp.ClientError, TimeoutError) as e:
            return None if isinstance(_failure(engine, e), NoDescriptorsError) else False

    @asynccontextmanager
    async def send(
        self,
        engine: Engine,
        path: str,
        body: Mapping[str, object] | None,
        headers: Mapping[str, str],
        deadline: float,
    ) -> AsyncIterator[Answer]:
        """Send a request and give the engine's answer, once its head is there, whatever its status.
        It is a POST, without a body a GET. Raises `NoAnswerError` when the engine cannot be
        reached, breaks off or hangs, `EngineFailedError` when its answer cannot be read, and
        `TooLateError` at `deadline` (of `time.monotonic`)."""
        engine.in_flight += 1
        request = self._session.request(
            "GET" if body is None else "POST",
            engine.url + path,
            json=body,
            headers=headers,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        )
        head = asyncio.ensure_future(request)
        try:
            async with await _patiently(engine, deadline, lambda: asyncio.shield(head)) as response:
                yield Answer(engine, response, deadline)
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as e:
            raise _failure(engine, e) from e
        finally:
            head.cancel()
            engine.in_flight -= 1

    async def ask(
        self,
        engine: Engine,
        path: str,
        body: Mapping[str, object],
        headers: Mapping[str, str],
        deadline: float,
    ) -> dict[str, object] | None:
        """Return a JSON object; None when the engine refuses the question (4xx). Raises like
        `send`, and `EngineFailedError` when it says that the fault is its own."""
        async with self.send(engine, path, body, headers, deadline) as answer:
            raw = await answer.whole()
            if answer.status >= SERVER_ERROR:
                engine.failures += 1
                raise EngineFailedError(f"{engine.url} answered {answer.status}")
            if answer.status >= CLIENT_ERROR:
                return None
        try:
            # Off the loop: the answer to a long prompt may be long.
            async with asyncio.timeout(deadline - time.monotonic()):
                found = await asyncio.wrap_future(self._threads.submit(lambda: json.loads(raw)))
        except TimeoutError as e:
            raise TooLateError(f"{engine.url}: no thread has read its answer in time") from e
        except (ValueError, RecursionError) as e:
            raise EngineFailedError(f"{engine.url}{path} answered no JSON") from e
        if not isinstance(found, dict):
            raise EngineFailedError(f"{engine.url}{path} answered no JSON object")
        return found


def _failure(engine: Engine, error: BaseException) -> EngineFailedError:
    """Return what an error of aiohttp's says of the engine."""
    text = f"{engine.url}: {type(error).__name__} {error}".rstrip()
    if getattr(error, "errno", None) in NO_DESCRIPTORS:
        say_no_descriptors(error)
        return NoDescriptorsError(text)
    if isinstance(error, aiohttp.ClientResponseError):  # an answer, though not of HTTP
        return EngineFailedError(text)
    return NoAnswerError(text)
