"""Keeps the free extents of a segment, counted in granules (granules.py).

What must never happen: two free extents that touch (`give` joins them), one that overlaps
another or a slot, or a granule that is in none and belongs to no slot. `free` is their sum.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import chain, islice

from kvstore.core.memory.granules import PAGE, aligned

FITS_TRIED = 4
"""Extents of one size that are searched: one may be too small only because of where it begins, and
then one that is a page larger is not. The extent that became free last is searched too, because
room may have been made there for this value."""


class Space:
    """The free extents. Best fit: what is taken comes out of the smallest one that holds it."""

    __slots__ = ("_by_size", "_ends", "_sizes", "_starts", "free", "size")

    def __init__(self, size: int, free: Iterable[tuple[int, int]] | None = None) -> None:
        """Start with all of `size` granules free, or with these (start, size), of which no two
        touch."""
        self.size = size
        self.free = 0
        self._starts: dict[int, int] = {}
        """Start -> size."""
        self._ends: dict[int, int] = {}
        """End -> start."""
        self._by_size: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []
        """The keys of `_by_size`, ascending."""
        for start, have in [(0, size)] if free is None else free:
            self._insert(start, have)
            self.free += have

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield (start, size) of each extent, in no order."""
        return iter(self._starts.items())

    @property
    def largest(self) -> int:
        """Return the size of the largest free extent, in granules."""
        return self._sizes[-1] if self._sizes else 0

    def take(self, size: int, count: int = 1, *, high: bool) -> range:
        """Take up to `count` times `size` granules, side by side from the upper end of an extent on
        or its lower one; return where, in that order. Empty when none holds `size`."""
        sizes = self._sizes
        whole_pages = aligned(size)
        for index in range(bisect_left(sizes, size), len(sizes)):
            have = sizes[index]
            same = self._by_size[have]
            for start in chain(islice(same, FITS_TRIED), islice(reversed(same), 1)):
                if high:
                    at = start + have - size
                    if whole_pages:
                        at &= -PAGE
                else:
                    at = -(-start // PAGE) * PAGE if whole_pages else start
                if not start <= at <= start + have - size:
                    continue
                room = at + size - start if high else start + have - at
                taken = min(count, room // size)
                if high:
                    at -= (taken - 1) * size
                self._cut(start, have, at, taken * size)
                places = range(at, at + taken * size, size)
                return places[::-1] if high else places
        return range(0)

    def give(self, start: int, size: int) -> None:
        """Make these granules free again, joined with the free extents that they touch."""
        self.free += size
        before = self._ends.get(start)
        if before is not None:
            size += self._remove(before)
            start = before
        if start + size in self._starts:
            size += self._remove(start + size)
        self._insert(start, size)

    def at(self, start: int) -> int:
        """Return the size in granules of the free extent that begins there; 0 when none does."""
        return self._starts.get(start, 0)

    def ending(self, end: int) -> int | None:
        """Return the first granule of the free extent that ends there."""
        return self._ends.get(end)

    def _cut(self, start: int, have: int, at: int, size: int) -> None:
        self._remove(start)
        if at > start:
            self._insert(start, at - start)
        end = at + size
        if end < start + have:
            self._insert(end, start + have - end)
        self.free -= size

    def _insert(self, start: int, size: int) -> None:
        self._starts[start] = size
        self._ends[start + size] = start
        same = self._by_size.get(size)
        if same is None:
            self._by_size[size] = {start: None}
            insort(self._sizes, size)
        else:
            same[start] = None

    def _remove(self, start: int) -> int:
        size = self._starts.pop(start)
        del self._ends[start + size]
        same = self._by_size[size]
        del same[start]
        if not same:
            del self._by_size[size]
            del self._sizes[bisect_left(self._sizes, size)]
        return size
