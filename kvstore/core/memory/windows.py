"""Finds, among extents that lie beside each other, the part that costs least to empty."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, islice
from typing import NamedTuple

from kvstore.core.memory.granules import PAGE, aligned
from kvstore.core.memory.slots import Slot

COLD_TRIED = 8
"""Evictable blocks, coldest first, around which room is searched."""


class Extent(NamedTuple):
    start: int
    size: int
    slot: Slot | None
    """None means that it is free."""


class Window(NamedTuple):
    cost: int
    extents: list[Extent]

    @property
    def slots(self) -> list[Slot]:
        return [e.slot for e in self.extents if e.slot is not None]


def window_of(run: list[Extent], size: int, cost_of: Callable[[Slot], int]) -> Window | None:
    """Return the cheapest part of `run` that holds `size` granules."""
    total = [0, *accumulate(0 if e.slot is None else cost_of(e.slot) for e in run)]
    best: tuple[int, int, int] | None = None
    whole_pages = aligned(size)
    last = 0
    for first in range(len(run)):
        begin = run[first].start
        if whole_pages:
            begin = -(-begin // PAGE) * PAGE
        while last < len(run) and run[last].start + run[last].size < begin + size:
            last += 1
        if last == len(run):
            break
        cost = total[last + 1] - total[first]
        if best is None or cost < best[0]:
            best = cost, first, last
    if best is None:
        return None
    cost, first, last = best
    return Window(cost, run[first : last + 1])


def cheapest(windows: Iterator[Window | None]) -> Window | None:
    """Return the cheapest of the first `COLD_TRIED` windows, else the first that exists."""
    tried = filter(None, islice(windows, COLD_TRIED))
    best = min(tried, key=lambda window: window.cost, default=None)
    return best or next(filter(None, windows), None)
