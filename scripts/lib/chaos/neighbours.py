"""Runs programs beside the engines of a chaos run that are as rude to the store as they can be.

They are the writers of `scripts/crash-loop` (kvstore/testing/crash/workers.py): they cancel calls
of an `AsyncClient` and use the memory for something else at once, fork in the middle of a save, are
interrupted by a handler of signals that raises, and compare every byte that they read. One is on
the node's host, one on another, past whoever tampers with what the two hosts say to each other.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Mapping, Sequence
from ctypes import c_longlong
from multiprocessing.sharedctypes import RawArray
from typing import Any

from chaos import plan
from kvstore.testing.crash import workers
from kvstore.testing.crash.workers import CHILD_HUNG, FIELDS, WRONG_BYTES, WorkerPlace

NICENESS = 10
"""The machine is the engines': neighbours take what they leave."""
END_S = 10.0
SETTLE_S = 60.0
POLL_S = 0.1
COUNTED = {
    "steps": workers.STEPS,
    "hits": workers.HITS,
    "stored": workers.STORED,
    "forks": workers.FORKS,
    "interrupted": workers.INTERRUPTED,
    "cancelled": workers.CANCELLED,
}
_WHY = {WRONG_BYTES: "read wrong bytes", CHILD_HUNG: "had a forked child that hung"}
_context = multiprocessing.get_context("spawn")


def _work(
    place: WorkerPlace, environment: Mapping[str, str], seed: int, counters: workers.Counters
) -> None:
    os.nice(NICENESS)
    os.environ.update(environment)
    workers.writer(place, seed, counters)


class Neighbours:
    """Starts one writer at each place; `close` ends them."""

    def __init__(
        self, places: Sequence[WorkerPlace], environment: Mapping[str, str], seed: int
    ) -> None:
        self._counters = [RawArray(c_longlong, FIELDS) for _ in places]
        self._stuck: list[str] = []
        self._processes = [
            _context.Process(
                target=_work, args=(place, environment, seed + i, self._counters[i]), daemon=True
            )
            for i, place in enumerate(places)
        ]
        for process in self._processes:
            process.start()

    def settle(self) -> None:
        """Wait, after the last fault, until each has read something again and, together, they have
        been rude in every way."""
        before = [counters[workers.HITS] for counters in self._counters]
        give_up_at = time.monotonic() + SETTLE_S

        def settled() -> bool:
            pairs = zip(self._counters, before, strict=True)
            rude = all(any(c[COUNTED[what]] for c in self._counters) for what in plan.RUDE)
            return rude and all(c[workers.HITS] > hits for c, hits in pairs)

        while not (settled() or self._ended()):
            if time.monotonic() > give_up_at:
                self._stuck = [f"did not get on within {SETTLE_S:.0f} s"]
                break
            time.sleep(POLL_S)

    def _ended(self) -> list[int]:
        codes = [process.exitcode for process in self._processes]
        return [code for code in codes if code is not None]

    def summary(self) -> dict[str, Any]:
        """Return what they did, all together, and what was wrong with any of them."""
        done = {what: sum(c[at] for c in self._counters) for what, at in COUNTED.items()}
        slowest_ms = max(c[workers.SLOWEST_MS] for c in self._counters)
        wrong = [_WHY.get(code, f"ended with {code}") for code in self._ended()]
        return {**done, "slowest_ms": slowest_ms, "wrong": wrong + self._stuck}

    def close(self) -> None:
        for process in self._processes:
            if process.pid is not None and process.exitcode is None:
                os.kill(process.pid, signal.SIGKILL)
            process.join(END_S)
