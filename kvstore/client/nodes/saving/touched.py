"""Remembers which blocks a client has used, until its nodes are told.

A node takes what one message names for one prefix, and keeps its head for as long as what is behind
(`kvstore/core/memory/eviction.py`). So what was used by one call is told in a message of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.types import Key

TOUCHED_MAX = 4096
"""Keys that are remembered, all runs together."""
TOUCHED_RUNS_MAX = 64
"""Runs that are told apart; what was used beyond is one more, in which the order alone is right."""


class Touched:
    """Keeps runs of keys, each once. Thread-safe so far as that something may be forgotten."""

    __slots__ = ("_keys", "_rest", "_runs")

    def __init__(self) -> None:
        self._runs: dict[tuple[Key, ...], None] = {}
        self._rest: dict[Key, None] = {}
        self._keys = 0

    def add(self, keys: Sequence[Key]) -> None:
        """These were used, in the order of their prefix; of those too many the head counts."""
        if tuple(keys) in self._runs:  # one value that is read again and again
            return
        run = tuple(dict.fromkeys(keys))[: TOUCHED_MAX - self._keys]
        if not run or run in self._runs:
            return
        if len(self._runs) < TOUCHED_RUNS_MAX:
            self._runs[run] = None
            self._keys += len(run)
        else:
            before = len(self._rest)
            self._rest.update(dict.fromkeys(run))
            self._keys += len(self._rest) - before

    def runs(self) -> list[Sequence[Key]]:
        """All that were used, in that order."""
        runs: list[Sequence[Key]] = [*self._runs]
        if self._rest:
            runs.append(list(self._rest))
        return runs
