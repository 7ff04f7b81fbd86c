"""`AsyncClient`: the same calls for asyncio, on a few threads of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, Self, TypeVar

from kvstore.client.client import Client, Items
from kvstore.client.explanation import Explanation, Missing
from kvstore.client.health import Health
from kvstore.client.pinned import Match, Pinned
from kvstore.client.reset_result import ResetResult
from kvstore.limits import RESET_TIMEOUT_S
from kvstore.types import PutResult

THREADS = 4
P = ParamSpec("P")
R = TypeVar("R")


class AsyncClient:
    """Takes what `Client` takes; every call is a coroutine with the meaning of its namesake."""

    def __init__(self, url: str | None = None, **settings: Any) -> None:
        self._client = Client(url, **settings)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvstore-async")

    async def _run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: call(*args, **kwargs))

    async def put(self, key: str | bytes, value: Any) -> PutResult:
        return await self._run(self._client.put, key, value)

    async def put_many(self, items: Items) -> list[PutResult]:
        return await self._run(self._client.put_many, items)

    async def put_blocks(self, tokens: Sequence[int], blocks: Sequence[Any]) -> list[PutResult]:
        return await self._run(self._client.put_blocks, tokens, blocks)

    async def get(self, key: str | bytes, out: Any = None) -> Any:
        return await self._run(self._client.get, key, out)

    async def get_many(
        self, keys: Sequence[str | bytes], out: Sequence[Any] | None = None
    ) -> list[Any]:
        return await self._run(self._client.get_many, keys, out)

    async def get_blocks(self, tokens: Sequence[int], out: Sequence[Any]) -> int:
        return await self._run(self._client.get_blocks, tokens, out)

    async def clear(self, timeout_s: float = RESET_TIMEOUT_S) -> ResetResult:
        return await self._run(self._client.clear, timeout_s)

    async def exists(self, key: str | bytes) -> bool:
        return await self._run(self._client.exists, key)

    async def match_prefix(self, tokens: Sequence[int]) -> Match:
        return await self._run(self._client.match_prefix, tokens)

    async def pin(self, key: str | bytes) -> Pinned | None:
        """The pin itself is closed without waiting: use it in a plain `with`. One that comes
        after the call was cancelled is closed at once."""
        future = self._threads.submit(self._client.pin, key)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_let_go)
            raise

    async def delete(self, key: str | bytes) -> bool:
        return await self._run(self._client.delete, key)

    async def explain(self, tokens: Sequence[int]) -> Explanation:
        return await self._run(self._client.explain, tokens)

    async def explain_key(self, key: str | bytes) -> Missing | None:
        return await self._run(self._client.explain_key, key)

    async def ping(self) -> None:
        await self._run(self._client.ping)

    async def health(self) -> Health:
        return await self._run(self._client.health)

    async def stats(self) -> dict[str, dict[str, int | float]]:
        return await self._run(self._client.stats)

    async def close(self) -> None:
        await self._run(self._client.close)
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _let_go(future: Future[Pinned | None]) -> None:
    if not future.cancelled() and future.exception() is None:
        pinned = future.result()
        if pinned is not None:
            pinned.close()
