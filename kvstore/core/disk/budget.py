"""Limits what is written to the disks, in any 24 hours and again: drives wear out by it."""

from __future__ import annotations

from collections import deque

DAY_HOURS = 24
HOUR_S = 3600
AGAIN_PERCENT = 10
"""What is written again, of what was first written: at most so much, and the last of it is for
blocks that are retained."""
IN_MEMORY_PERCENT = 9
"""Of it, with what blocks take whose copy was written over while they were in memory."""
EARLY_PERCENT = 8
"""After so much of it an idle node writes blocks no more before their turn to be evicted comes:
too many are in memory still when their copies are written over."""
USED_PERCENT = 5
"""Of it, with what blocks take that were used on the disk alone: they are worth the least."""


class WriteBudget:
    """At most `bytes_per_day` in any 24 hours; 0: as much as there is to write."""

    def __init__(self, bytes_per_day: int = 0) -> None:
        self.bytes_per_day = bytes_per_day
        self._hours: deque[list[int]] = deque()
        """[hour, bytes written in it], of the present hour and the 24 before."""
        self._written = 0

    def left(self, now: float) -> int:
        """Return how many bytes may be written at `now`."""
        if not self.bytes_per_day:
            return 1 << 62
        while self._hours and self._hours[0][0] < int(now // HOUR_S) - DAY_HOURS:
            self._written -= self._hours.popleft()[1]
        return max(self.bytes_per_day - self._written, 0)

    def spend(self, size_bytes: int, now: float) -> None:
        """Count what is written at `now`."""
        hour = int(now // HOUR_S)
        if not self._hours or self._hours[-1][0] != hour:
            self._hours.append([hour, 0])
        self._hours[-1][1] += size_bytes
        self._written += size_bytes


class AgainBudget:
    """Holds what is written again to a part of what was first written in this run. A block is first
    written once after each time that it was saved."""

    def __init__(self) -> None:
        self.first_bytes = self.again_bytes = 0

    def allows(self, size_bytes: int, percent: int) -> bool:
        """Return whether so much may be written again."""
        return (self.again_bytes + size_bytes) * 100 <= self.first_bytes * percent
