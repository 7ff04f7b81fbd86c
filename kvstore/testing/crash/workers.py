"""Runs the processes that are killed, each in a child of its own that never returns.

Every byte that is read is compared with a function of the key and the length, so a wrong
one shows wherever it came from. Writers also do what programs do to a client: they fork while
they write, are interrupted by a signal handler that raises, and cancel calls of an `AsyncClient`
whose memory they use for something else at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Coroutine, MutableSequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from kvstore import AsyncClient, Client, Limits, Namespace
from kvstore.cli import main as kvstore
from kvstore.client.base import Reservation
from kvstore.errors import PeerError, UsageError
from kvstore.spi import BlockSession
from kvstore.system.on_failure import on_failure
from kvstore.types import Value

WRONG_BYTES = 3
"""Exit code of a worker that read what nobody saved."""
CHILD_HUNG = 4
"""Exit code of a worker whose forked child did not end by itself."""
KEYS = 48
PUT_MANY_MAX = 6
HOLD_S_MAX = 0.05
FORK_CHANCE = 0.4
CHILD_MAX_S = 10
INTERRUPTED_AFTER_S_MAX = 0.005
CANCELLED_AFTER_S_MAX = 0.003
LIMITS = Limits(redis_timeout_s=0.2, publish_timeout_s=0.5, request_timeout_s=1.0)
_PR_SET_PDEATHSIG = 1

STEPS, HITS, MISSES, STORED, FORKS, INTERRUPTED, CANCELLED, SLOWEST_MS, FIELDS = range(9)
"""Places in a worker's counters, which outlive it."""
Counters = MutableSequence[int]


class InterruptedHereError(BaseException):
    """Is what the signal handler raises: as KeyboardInterrupt, nothing takes it for a failure."""


class WorkerPlace(NamedTuple):
    """Says where a worker's files are."""

    url: str
    run_dir: Path
    key_prefix: str
    rest_s: float = 0.0
    """What it rests between two steps, on average."""


def sizes(name: str) -> tuple[int, ...]:
    """Return the sizes that the block of this name may have: of several size classes over all
    names."""
    base = 600 + 13_000 * (int(name[1:]) % 24)
    return base, base + 1, base + 40_000


def content(name: str, size_bytes: int) -> bytes:
    unit = blake2b(f"{name} {size_bytes}".encode(), digest_size=32).digest()
    return (unit * (size_bytes // 32 + 1))[:size_bytes]


def node(place: WorkerPlace, options: tuple[str, ...]) -> None:
    _begin()
    arguments = ["node", "--url", place.url, "--run-dir", str(place.run_dir)]
    sys.exit(kvstore([*arguments, "--key-prefix", place.key_prefix, *options]))


def writer(place: WorkerPlace, seed: int, counters: Counters) -> None:
    _Worker(place, seed, counters, "writer").run()


def reader(place: WorkerPlace, seed: int, counters: Counters) -> None:
    _Worker(place, seed, counters, "reader").run()


def _begin() -> None:
    """Die with the parent, whatever kills it, and say nothing but tracebacks."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    logging.disable()


class _Worker:
    def __init__(self, place: WorkerPlace, seed: int, counters: Counters, kind: str) -> None:
        self._rng = random.Random(seed)
        self._counters = counters
        self._rest_s = place.rest_s
        options: Any = {"run_dir": place.run_dir, "key_prefix": place.key_prefix, "limits": LIMITS}
        _begin()
        self._open: Callable[[], Client] = lambda: Client(place.url, **options)
        self._client = self._open()
        self._session = BlockSession(place.url, **options)
        self._async = AsyncClient(place.url, **options)
        self._loop = asyncio.new_event_loop()
        self._armed = False
        signal.signal(signal.SIGALRM, self._interrupt)
        saves = ((self._put, 5), (self._put_many, 4), (self._by_hand, 5), (self._delete, 2))
        reads = ((self._get, 8), (self._get_many, 6), (self._pin, 4))
        rude = ((self._interrupted, 8), (self._cancelled, 8), (self._forked, 0.2))
        self._plain = (*reads, *saves) if kind == "writer" else reads
        does = (*self._plain, *rude) if kind == "writer" else reads
        self._does, self._weights = zip(*does, strict=True)

    def run(self) -> None:
        while True:
            (does,) = self._rng.choices(self._does, self._weights)
            started = time.monotonic()
            try:
                does()
            except PeerError:
                time.sleep(0.002)
            took_ms = int((time.monotonic() - started) * 1e3)
            self._counters[SLOWEST_MS] = max(self._counters[SLOWEST_MS], took_ms)
            self._counters[STEPS] += 1
            if self._rest_s:
                time.sleep(self._rng.expovariate(1 / self._rest_s))

    def _names(self, most: int) -> list[str]:
        names = range(KEYS)
        return [f"k{i}" for i in self._rng.sample(names, self._rng.randint(1, most))]

    def _value(self, name: str) -> bytes:
        return content(name, self._rng.choice(sizes(name)))

    def _pause(self) -> None:
        time.sleep(self._rng.uniform(0, HOLD_S_MAX))

    def _check(self, name: str, got: Value) -> None:
        self._counters[MISSES if got is None else HITS] += 1
        if got is not None and (len(got) not in sizes(name) or got != content(name, len(got))):
            os._exit(WRONG_BYTES)

    def _get(self) -> None:
        (name,) = self._names(1)
        self._check(name, self._client.get(name))

    def _get_many(self) -> None:
        names = self._names(PUT_MANY_MAX)
        for name, got in zip(names, self._client.get_many(names), strict=True):
            self._check(name, got)

    def _pin(self) -> None:
        """Check that what is pinned keeps its bytes, whoever dies meanwhile."""
        (name,) = self._names(1)
        try:
            pinned = self._client.pin(name)
        except UsageError:  # it is on another host
            return
        if pinned:
            with pinned:
                self._check(name, pinned.buffer)
                self._pause()
                self._check(name, pinned.buffer)

    def _put(self) -> None:
        (name,) = self._names(1)
        self._counters[STORED] += bool(self._client.put(name, self._value(name)))

    def _put_many(self) -> None:
        names = self._names(PUT_MANY_MAX)
        results = self._client.put_many((name, self._value(name)) for name in names)
        self._counters[STORED] += sum(map(bool, results))

    def _by_hand(self) -> None:
        """Save slowly, so that many kills come between reserve and commit."""
        names = self._names(PUT_MANY_MAX)
        space = Namespace.named("default")
        keys = {space.value_key(name): name for name in names}
        size_bytes = sizes(names[0])[0]
        fitting = [key for key, name in keys.items() if size_bytes in sizes(name)]
        answers = self._session.reserve(fitting, size_bytes, space.id)
        granted = [a for a in answers if isinstance(a, Reservation)]
        with on_failure(self._session.abort, granted):
            for reservation in granted:
                value = content(keys[reservation.key], size_bytes)
                half = size_bytes // 2
                reservation.buffer[:half] = value[:half]
                child = self._fork() if self._rng.random() < FORK_CHANCE else 0
                self._pause()
                reservation.buffer[half:] = value[half:]
                self._join(child)
        if self._rng.random() < 0.2:
            self._session.abort(granted)
        elif granted:
            self._counters[STORED] += sum(map(bool, self._session.commit(granted)))

    # --- what programs do to a client ---------------------------------------------

    def _forked(self) -> None:
        self._join(self._fork())

    def _fork(self) -> int:
        """Make a child that closes what it inherits and has a client of its own."""
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends a child that hangs
            signal.alarm(CHILD_MAX_S)
            with suppress(BaseException):
                self._child()
            os._exit(0)
        self._counters[FORKS] += 1
        return pid

    def _child(self) -> None:
        self._client.close()
        self._session.close()
        with suppress(PeerError), self._open() as self._client:
            for _ in range(3):
                self._get()
                self._put()

    def _join(self, child: int) -> None:
        if child:
            _, status = os.waitpid(child, 0)
            if os.waitstatus_to_exitcode(status) == WRONG_BYTES:
                os._exit(WRONG_BYTES)
            if status:
                os._exit(CHILD_HUNG)

    def _interrupted(self) -> None:
        """Do any of the other things, with a signal whose handler raises somewhere in it."""
        try:
            try:
                self._armed = True
                after_s = self._rng.uniform(1e-5, INTERRUPTED_AFTER_S_MAX)
                signal.setitimer(signal.ITIMER_REAL, after_s)
                does, weights = zip(*self._plain, strict=True)
                self._rng.choices(does, weights)[0]()
            finally:
                self._armed = False
        except InterruptedHereError:
            self._counters[INTERRUPTED] += 1
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _interrupt(self, number: int, frame: object) -> None:
        if self._armed:
            self._armed = False
            raise InterruptedHereError

    def _cancelled(self) -> None:
        self._loop.run_until_complete(self._cancel())

    async def _cancel(self) -> None:
        """Cancel a call, and use its memory for something else as soon as the call has ended."""
        put, get, other = self._names(1) + self._names(1) + self._names(1)
        value = bytearray(self._value(put))
        await self._soon(self._async.put(put, value))
        value[:] = bytes(len(value))
        room = bytearray(max(sizes(get) + sizes(other)))
        await self._soon(self._async.get(get, out=room))
        got = await self._async.get(other, out=room)
        self._check(other, got)
        await asyncio.sleep(self._rng.uniform(0, CANCELLED_AFTER_S_MAX))
        self._check(other, got)

    async def _soon(self, call: Coroutine[object, object, object]) -> None:
        with suppress(PeerError):
            try:
                await asyncio.wait_for(call, self._rng.uniform(0, CANCELLED_AFTER_S_MAX))
            except asyncio.TimeoutError:  # noqa: UP041  # another one than TimeoutError in 3.10
                self._counters[CANCELLED] += 1

    def _delete(self) -> None:
        (name,) = self._names(1)
        self._client.delete(name)
