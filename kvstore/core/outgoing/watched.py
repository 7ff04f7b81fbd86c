"""Counts what tells an operator whether a node is too small, and what engines and clients found.

Plain numbers that only grow. Nothing is decided by them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from kvstore.core.memory.slots import Slot, SlotState
from kvstore.core.outgoing.departures import Departures, GoneWhy

AGE_BOUNDS_S = (1, 10, 60, 300, 900, 3600, 14_400, 86_400)
"""Upper bounds of the histogram of ages; one more bucket counts higher ages."""
REPORTED = (
    *("asked_tokens", "engine_tokens", "hit_tokens"),
    *("client_hits", "client_misses", "client_hit_bytes"),
)
REPORTED_NAMES_MAX = 64
"""Names under which engines and clients may count; counts under further names are ignored."""


class Ages:
    """A histogram of ages."""

    __slots__ = ("_counts", "_sum_s")

    def __init__(self) -> None:
        self._counts = [0] * (len(AGE_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def note(self, age_s: float) -> None:
        self._counts[bisect_left(AGE_BOUNDS_S, age_s)] += 1
        self._sum_s += age_s

    def numbers(self, name: str) -> dict[str, int | float]:
        """Return the number of ages, their sum in seconds, and for each bound the number of ages
        up to it."""
        found: dict[str, int | float] = {name: sum(self._counts), f"{name}_s": self._sum_s}
        at_most = 0
        for bound, count in zip(AGE_BOUNDS_S, self._counts, strict=False):
            at_most += count
            found[f"{name}_le_{bound}"] = at_most
        return found


class Watched:
    """What one node has counted since it started."""

    def __init__(self) -> None:
        self.bytes = {"stored_bytes": 0, "served_bytes": 0, "ever_read_bytes": 0}
        names = ("evicted_age", "evicted_idle", "returned", "read_gap")
        self._ages = {name: Ages() for name in names}
        self.reported = dict.fromkeys(REPORTED, 0)
        """Counts reported by engines and clients of this host. Missed tokens are added under
        "missed_tokens:REASON"."""

    def evicted(self, victims: Iterable[Slot], now: float) -> None:
        """Note the ages of evicted blocks. The age of a block that an earlier start of the node
        stored is not known."""
        ages, idle = self._ages["evicted_age"], self._ages["evicted_idle"]
        for slot in victims:
            if slot.reserved_at:
                ages.note(max(now - slot.reserved_at, 0.0))
                idle.note(max(now - slot.used_at, 0.0))

    def stored(self, slots: Iterable[Slot], gone: Departures) -> None:
        """Count blocks that clients stored. One that was evicted before was looked up in vain."""
        for slot in slots:
            self.bytes["stored_bytes"] += slot.length
            before = gone.get(slot.key)
            if before is not None and before.why is GoneWhy.EVICTED:
                self._ages["returned"].note(max(slot.reserved_at - before.at, 0.0))

    def read(self, slots: Iterable[Slot], now: float) -> None:
        """Note that blocks are read: how long nobody had used them, and the bytes of those that
        nobody had read. Blocks of an earlier start of the node are not counted."""
        gaps = self._ages["read_gap"]
        for slot in slots:
            if slot.state is SlotState.SEALED:
                if slot.reserved_at:
                    gaps.note(max(now - slot.used_at, 0.0))
                    self.bytes["ever_read_bytes"] += 0 if slot.read else slot.length
                slot.read = True

    def report(self, counts: Mapping[str, int]) -> None:
        """Add what an engine has counted since its last report."""
        for name, count in counts.items():
            if name in self.reported or len(self.reported) < REPORTED_NAMES_MAX:
                self.reported[name] = self.reported.get(name, 0) + count

    def for_heartbeat(self) -> dict[str, int]:
        """Return the numbers that every heartbeat announces, without those that are 0."""
        ages = self._ages["evicted_age"].numbers("evicted_age")
        del ages["evicted_age_s"]
        found = {**self.bytes, **self.reported, **ages}
        return {name: int(count) for name, count in found.items() if count}

    def numbers(self) -> dict[str, int | float]:
        """Return all numbers."""
        found: dict[str, int | float] = {**self.bytes, **self.reported}
        for name, ages in self._ages.items():
            found |= ages.numbers(name)
        return found
