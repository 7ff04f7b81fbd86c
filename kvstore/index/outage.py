"""Puts circuit breakers before an index: while Redis does not answer, calls fail at once.

Calls that read, calls that write and `renew`, which a full index takes though it refuses what is
written, are a side each, with a breaker (circuit_breaker.py) and a flag `open`, which is what
callers look at:

    open     set by                                                  a call then
    False    `_probe_until_closed`, once a ping was answered         asks the index
    True     `_failed`, when the side's breaker says so              raises at once

Flag and breaker change under the lock, but for a call that succeeded: a count one too high or
too low is fine, a lock for each call is not. While a side is open, one thread asks for all
callers: it pings with growing delays, and ends when no side is open. A forked child, where that
thread is missing, starts with both sides closed.

Must never happen:

- a call that waits while its side is open, except `ping` and `close`, which always go through;
- a side that stays open with nobody pinging: each refused call sees to the thread anew;
- a caller's mistake, or what a signal's handler raised, counted as a failure of the index.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import ParamSpec, TypeVar

from kvstore.circuit_breaker import Breaker, BreakerState
from kvstore.errors import (
    IndexBreakerOpenError,
    IndexDeadlineError,
    IndexUnavailableError,
    KVStoreError,
)
from kvstore.index.base import Index, KeyedRecord, KeyRecord, Place, Record, patient
from kvstore.machine import REAL, Machine
from kvstore.system.fork import in_each_child
from kvstore.system.threads import interpreter_ends
from kvstore.types import Key

log = logging.getLogger("kvstore.index")

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Side:
    """One breaker. `open` is what callers look at, without a lock."""

    __slots__ = ("breaker", "last", "open")

    def __init__(self, breaker: Breaker) -> None:
        self.breaker = breaker
        self.open = False
        self.last = IndexUnavailableError("")
        """How it failed last, as a call or as a probe."""


def _without_frames(error: IndexUnavailableError) -> IndexUnavailableError:
    """Return a copy of `error` to keep: the error itself keeps alive what the failing call held."""
    return type(error)(str(error))


class GuardedIndex:
    """An `Index` that stops asking `index` after failures in a row, or one that hung.

    Reading and writing calls have a breaker each, and so has `renew`: a publish that is not
    allowed, or slow, says nothing about lookups. While one is open its calls raise
    `IndexUnavailableError` at once, and a daemon thread pings with growing delays;
    the first answer closes it. `IndexUnavailableError` counts as a failure, and what is
    none of our errors becomes one; what a handler of signals raises does not
    (`kvstore/system/interruption.py`).
    `ping` and `close` always go through.
    """

    def __init__(
        self,
        index: Index,
        *,
        failures_max: int = 3,
        retry_after_s: float = 0.05,
        retry_after_max_s: float = 5.0,
        waits_first: bool = False,
        machine: Machine = REAL,
    ) -> None:
        """Open a side after `failures_max` failures in a row, or one time-out. Pauses between pings
        grow from `retry_after_s` to `retry_after_max_s` (seconds). Pings may take
        `PATIENT_TIMEOUT_S`, and with `waits_first` so may all calls until one has ended."""

        def side() -> _Side:
            return _Side(
                Breaker(
                    failures_max=failures_max,
                    retry_after_s=retry_after_s,
                    retry_after_max_s=retry_after_max_s,
                )
            )

        self._index = index
        self._waits = waits_first
        self._machine = machine
        self._now = machine.monotonic
        self._closed = machine.event()
        self._reading = side()
        self._writing = side()
        self._renewing = side()
        self._sides = (self._reading, self._writing, self._renewing)
        self._lock = self._machine.lock()
        self._probing = False
        in_each_child(self)

    @property
    def index(self) -> Index:
        """Return what is behind the breakers."""
        return self._index

    def match(self, keys: Sequence[Key]) -> list[Record]:
        return self._call(self._reading, self._index.match, keys)

    def lookup(self, keys: Sequence[Key]) -> list[Record | None]:
        return self._call(self._reading, self._index.lookup, keys)

    def publish(self, records: Sequence[KeyedRecord]) -> Sequence[KeyedRecord]:
        return self._call(self._writing, self._index.publish, records)

    def remove(self, records: Sequence[KeyedRecord]) -> int:
        return self._call(self._writing, self._index.remove, records)

    def announce(self, node_id: int, announcement: bytes, ttl_s: float) -> None:
        self._call(self._writing, self._index.announce, node_id, announcement, ttl_s)

    def renew(self, node_id: int, ttl_s: float) -> bool:
        return self._call(self._renewing, self._index.renew, node_id, ttl_s)

    def withdraw(self, node_id: int) -> None:
        self._call(self._writing, self._index.withdraw, node_id)

    def node(self, node_id: int) -> bytes | None:
        return self._call(self._reading, self._index.node, node_id)

    def nodes(self) -> dict[int, bytes]:
        return self._call(self._reading, self._index.nodes)

    def scan(self, place: Place) -> tuple[Place, list[KeyRecord]]:
        return self._call(self._writing, self._index.scan, place)

    def ping(self) -> None:
        self._index.ping()

    def identity(self) -> str:
        return self._index.identity()

    def incarnation(self) -> str:
        return self._call(self._writing, self._index.incarnation)

    def close(self) -> None:
        self._closed.set()
        self._index.close()

    def _call(self, side: _Side, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if side.open:
            self._probe()
            why = f"the index failed and is being probed (breaker open): {side.last}"
            raise IndexBreakerOpenError(why) from side.last
        try:
            with patient() if self._waits else nullcontext():
                answer = call(*args, **kwargs)
        except Exception as e:
            self._count(side, e)
            if isinstance(e, KVStoreError):
                raise
            raise IndexUnavailableError(f"the index failed: {e!r}") from e
        finally:
            self._waits = False
        # A race that resets a count one failure early or late is fine; a lock per call is not.
        if side.breaker.failures and not side.open:
            side.breaker.succeeded()
        return answer

    def _count(self, side: _Side, error: Exception) -> None:
        """Count what an index call raised, if it is the index's failure."""
        if isinstance(error, IndexUnavailableError):
            side.last = _without_frames(error)
            self._failed(side, hung=isinstance(error, IndexDeadlineError))
        elif not isinstance(error, KVStoreError):
            # Our bug, but a heartbeat or a lookup that ends with it would not be there again.
            log.error("an index call raised an unexpected error", exc_info=error)
            side.last = IndexUnavailableError(repr(error))
            self._failed(side, hung=False)

    def _failed(self, side: _Side, *, hung: bool) -> None:
        with self._lock:
            side.breaker.failed(self._now(), hung=hung)
            if side.open or side.breaker.state is BreakerState.CLOSED:
                return
            side.open = True
        self._probe()

    def _probe(self) -> None:
        """Start the thread that asks again, unless there is one: it says so itself. A start may be
        interrupted by a signal, or find no room, and then the next call is another try."""
        if self._probing or self._closed.is_set():
            return
        try:
            self._machine.start_thread(self._probe_until_closed, "kvstore-index-probe")
        except RuntimeError as e:
            if interpreter_ends(e):
                self._probe_until_closed(waits=False)

    def _probe_until_closed(self, *, waits: bool = True) -> None:
        """Probe while a side is open; without `waits` only what is due now."""
        with self._lock:
            if self._probing:
                return
            self._probing = True
        while not self._closed.is_set():
            with self._lock:
                waiting = [side for side in self._sides if side.open]
                due_s = min([side.breaker.probe_at for side in waiting], default=0.0) - self._now()
                if not waiting or (due_s > 0 and not waits):
                    self._probing = False
                    return
            if due_s > 0:
                self._closed.wait(due_s)
                continue
            with self._lock:
                probing = [side for side in waiting if side.breaker.allows(self._now())]
            failure = self._ping_failure()
            with self._lock:
                for side in probing:
                    if failure is not None:
                        side.last = failure
                        side.breaker.failed(self._now())
                    else:
                        side.breaker.succeeded()
                        side.open = False

    def _ping_failure(self) -> IndexUnavailableError | None:
        """Return why the index does not answer a ping; None when it does."""
        try:
            with patient():
                self._index.ping()
        except IndexUnavailableError as e:
            return _without_frames(e)
        except Exception as e:  # whatever it is, this thread must live on, or the side stays open
            return IndexUnavailableError(repr(e))
        return None

    def after_fork_in_child(self) -> None:
        """Take a new lock and close the sides: the parent's prober is not in the child, and a
        thread that is not may hold its lock."""
        self._lock = self._machine.lock()
        self._probing = False
        for side in self._sides:
            if side.open:
                side.open = False
                side.breaker.allows(side.breaker.probe_at)
                side.breaker.succeeded()
