"""Defines `AsyncClient`: the calls of `Client` for asyncio, on a few threads of its own."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Self, TypeVar, overload

from kvstore.client import arguments
from kvstore.client.base import ResetResult
from kvstore.client.client import A, Client, K, Names, Pairs, Several
from kvstore.client.explanation import Explanation
from kvstore.client.health import Health
from kvstore.client.pinned import NotPinned, Pinned, TokenMatch
from kvstore.client.values.put_pipeline import unless
from kvstore.errors import PeerError, UsageError
from kvstore.limits import RESET_TIMEOUT_S
from kvstore.system.threads import DaemonThreads
from kvstore.types import Array, PutResult, Retained, Tokens, Value, ValueLike

if TYPE_CHECKING:
    from typing_extensions import Buffer

THREADS = 4
R = TypeVar("R")
P = ParamSpec("P")


def _settings_of(
    client: Callable[Concatenate[Client, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[AsyncClient, P], None]]:
    """Give a constructor the signature of the client's, for readers and for type checkers."""

    def signed(init: Callable[..., None]) -> Callable[..., None]:
        init.__signature__ = inspect.signature(client)  # type: ignore[attr-defined]
        return init

    return signed


class AsyncClient(arguments.Uncopied):
    """`Client` for asyncio: every call is a coroutine with the meaning and errors of its
    namesake, and the event loop waits for nothing; use it in an `async with`.

    A call that is cancelled ends when nobody uses the caller's memory any more: one that
    reads into `out` or saves a value, after the deadline of a request at the latest. A
    put that is cancelled before its value is complete in the store stores nothing.

    A call is a `PeerError` where the host gives not even the first thread; a first call once the
    interpreter ends runs in the caller's.
    """

    @_settings_of(Client.__init__)
    def __init__(self, *args: object, **kwargs: object) -> None:
        """Takes what `Client` takes, and contacts nobody: the first call, or the `async with`,
        opens it. Raises `UsageError` for a setting that is none."""
        given = inspect.signature(AsyncClient).bind(*args, **kwargs)
        given.apply_defaults()
        arguments.client_settings(**given.arguments)
        self._open: Callable[[], Client] = lambda: Client(*given.args, **given.kwargs)
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._closed = False
        self._threads = DaemonThreads(THREADS, "kvstore-async")

    def _opened(self) -> Client:
        """Open the client; called in a thread: it may start a Redis and look up names."""
        with self._lock:
            if self._client is None:
                if self._closed:
                    raise UsageError("client", "(closed)", "make a new one: it was closed")
                self._client = self._open()
            return self._client

    def _start(self, call: Callable[[Client], R]) -> Future[R]:
        if self._closed:
            raise UsageError("client", "(closed)", "make a new one: it was closed")
        return self._threads.submit(lambda: call(self._opened()))

    async def _run(self, call: Callable[[Client], R]) -> R:
        """A call that uses no memory of the caller's that he might change: it may be left."""
        return await asyncio.wrap_future(self._start(call))

    async def _use(self, call: Callable[[Client], R]) -> R:
        """A call that uses the caller's memory: when it is cancelled, what it has not saved yet is
        given up, and its end is waited for."""
        stopped = threading.Event()
        future = self._start(lambda client: unless(stopped.is_set, lambda: call(client)))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            stopped.set()
            await _ended(future)
            raise

    async def put(self, key: str | bytes, value: ValueLike, *, replace: bool = False) -> PutResult:
        """Save one value; see `Client.put`."""
        return await self._use(lambda c: c.put(key, value, replace=replace))

    @overload
    async def put_many(
        self, items: Mapping[K, ValueLike], *, replace: bool = False
    ) -> list[PutResult]: ...
    @overload
    async def put_many(self, items: Pairs, *, replace: bool = False) -> list[PutResult]: ...
    async def put_many(
        self, items: Mapping[K, ValueLike] | Pairs, *, replace: bool = False
    ) -> list[PutResult]:
        """Save several values, results in order; see `Client.put_many`."""
        return await self._use(lambda c: c.put_many(items, replace=replace))

    async def put_blocks(self, tokens: Tokens, blocks: Several) -> list[PutResult]:
        """Save the KV blocks at the head of `tokens`; see `Client.put_blocks`."""
        return await self._use(lambda c: c.put_blocks(tokens, blocks))

    @overload
    async def get(self, key: str | bytes, *, out: None = None) -> bytes | Array | None: ...
    @overload
    async def get(self, key: str | bytes, *, out: A) -> A | None: ...
    @overload
    async def get(self, key: str | bytes, *, out: Buffer) -> memoryview | None: ...
    async def get(self, key: str | bytes, *, out: Value = None) -> Value:
        """Return the value as it was put, None on a miss; see `Client.get`."""
        return await self._use(lambda c: c.get(key, out=out))

    @overload
    async def get_many(self, keys: Names, *, out: None = None) -> list[bytes | Array | None]: ...
    @overload
    async def get_many(self, keys: Names, *, out: Sequence[A]) -> list[A | None]: ...
    @overload
    async def get_many(self, keys: Names, *, out: Sequence[Buffer]) -> list[memoryview | None]: ...
    @overload
    async def get_many(self, keys: Names, *, out: Several) -> list[memoryview | Array | None]: ...
    async def get_many(self, keys: Names, *, out: Value = None) -> list[Value]:
        """`get` for each of `keys`; see `Client.get_many`."""
        return await self._use(lambda c: c.get_many(keys, out=out))

    async def get_blocks(self, tokens: Tokens, out: Several) -> int:
        """Read the KV blocks at the head of `tokens` into `out`, in order; how many leading
        blocks are there. See `Client.get_blocks`."""
        return await self._use(lambda c: c.get_blocks(tokens, out))

    async def exists(self, key: str | bytes) -> bool:
        """Return whether a get would have hit a moment ago."""
        return await self._run(lambda c: c.exists(key))

    async def match_prefix(self, tokens: Tokens) -> TokenMatch:
        """Return the longest leading run of full blocks of `tokens` in the store."""
        return await self._run(lambda c: c.match_prefix(tokens))

    async def pin(self, key: str | bytes) -> Pinned | NotPinned:
        """Return a zero-copy view of a value that cannot be evicted while it is open; what it
        returns for a miss is false.

        Use it in a plain `with`, which ends without waiting for the node. A pin that
        comes after the call was cancelled is closed at once.
        """
        future = self._start(lambda c: c.pin(key))
        try:
            pinned = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_let_go)
            raise
        return pinned.closed_later() if pinned else pinned

    async def retain(self, key: str | bytes, for_s: int, tenant: str = "") -> Retained:
        """Keep a value from being evicted for `for_s` seconds; see `Client.retain`."""
        return await self._run(lambda c: c.retain(key, for_s, tenant))

    async def retain_blocks(self, tokens: Tokens, for_s: int, tenant: str = "") -> list[Retained]:
        """Keep the blocks of `tokens` from being evicted; see `Client.retain_blocks`."""
        return await self._run(lambda c: c.retain_blocks(tokens, for_s, tenant))

    async def delete(self, key: str | bytes) -> bool:
        """Drop a value; False when it was not there. See `Client.delete`."""
        return await self._run(lambda c: c.delete(key))

    async def delete_many(self, keys: Names) -> list[bool]:
        """Drop each of `keys`; which of them were there. See `Client.delete_many`."""
        return await self._run(lambda c: c.delete_many(keys))

    async def clear(self, timeout_s: float = RESET_TIMEOUT_S) -> ResetResult:
        """Drop all of this client's namespace, on every node of every host; see `Client.clear`."""
        return await self._run(lambda c: c.clear(timeout_s))

    async def explain(self, tokens: Tokens) -> Explanation:
        """Return how much of `tokens` could be read now, and why not the next block."""
        return await self._run(lambda c: c.explain(tokens))

    async def explain_key(self, key: str | bytes) -> Explanation:
        """Return whether a get of `key` would hit now, and why not."""
        return await self._run(lambda c: c.explain_key(key))

    async def ping(self) -> None:
        """Return when Redis answers; see `Client.ping`."""
        await self._run(lambda c: c.ping())

    async def health(self) -> Health:
        """Return what works now, and what does not; see `Client.health`."""
        return await self._run(lambda c: c.health())

    async def stats(self) -> dict[str, dict[str, int | float]]:
        """Counters of this client and of this host's nodes; see `Client.stats`."""
        return await self._run(lambda c: c.stats())

    async def close(self) -> None:
        """Give everything back. Safe to call twice; every other call is a `UsageError` then."""
        if self._closed:
            return
        self._closed = True
        try:
            future = self._threads.submit(self._close)
        except PeerError:
            self._close()
        else:
            await asyncio.wrap_future(future)
        finally:
            self._threads.close()

    def _close(self) -> None:
        with self._lock:
            client = self._client
        if client is not None:
            client.close()

    def __repr__(self) -> str:
        return f"Async{self._client!r}" if self._client is not None else "AsyncClient(not open)"

    async def __aenter__(self) -> Self:
        await self._run(lambda c: c)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


async def _ended(future: Future[R]) -> None:
    """Return when the thread is done with `future`, however often this is cancelled."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def wake(_: Future[R]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(ended.set)

    future.add_done_callback(wake)
    while not ended.is_set():
        with suppress(asyncio.CancelledError):
            await ended.wait()


def _let_go(future: Future[Pinned | NotPinned]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()
