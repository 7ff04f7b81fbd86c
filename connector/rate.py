"""Limits how often something is asked or logged, and counts what is left out.

Not `kvstore.token_bucket`, which lets bytes trickle in evenly: here a period's worth may come at
once, and a line says at the next one how many were left out.
"""

from __future__ import annotations


class Rate:
    """Allows at most `count_max` in each period, and counts what it refuses."""

    def __init__(self, count_max: int, period_s: float) -> None:
        self._count_max = count_max
        self._period_s = period_s
        self._began_at = float("-inf")
        self._count = 0
        self.refused = 0

    def allows(self, now: float) -> bool:
        if now - self._began_at >= self._period_s:
            self._began_at, self._count = now, 0
        self._count += 1
        if self._count <= self._count_max:
            return True
        self.refused += 1
        return False
