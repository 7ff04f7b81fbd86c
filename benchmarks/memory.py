"""Makes the buffers that are measured, and the yardstick: `memmove` between private pages.

All buffers, the yardstick's and those that are handed to the store, are alike:
anonymous mappings of 4 KiB pages (no huge pages, as shared memory has none by
default), touched before anything is timed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash

PAGE_BYTES = 4096
_TILE_BYTES = 1 << 20
_WORDS_PER_PAGE = PAGE_BYTES // 8

memmove = ctypes.memmove
"""(to, from, bytes), addresses as integers."""


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _private_pages(size_bytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return pages


class Memory:
    """Holds private pages that one worker uses for all its cases.

    New pages are slower at first, where the host too has to find memory for them.
    """

    def __init__(self, size_bytes: int, allocate: Callable[[int], Any] | None = None) -> None:
        """Of `allocate`, where a peer wants memory of its own."""
        size_bytes = _whole_pages(size_bytes)
        self._map = (allocate or _private_pages)(size_bytes)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.view = memoryview(self._map).cast("B")
        tile = np.frombuffer(os.urandom(_TILE_BYTES), np.uint8)
        for start in range(0, size_bytes, _TILE_BYTES):
            part = self.bytes[start : start + _TILE_BYTES]
            part[:] = tile[: len(part)]


class Buffers:
    """Holds `count` buffers of `size_bytes` each at the head of `memory`, full of random bytes."""

    def __init__(self, memory: Memory, count: int, size_bytes: int) -> None:
        stride = _whole_pages(size_bytes)
        self.size_bytes = size_bytes
        mine = memory.bytes[: count * stride]
        self._pages = mine.view(np.uint64).reshape(-1, _WORDS_PER_PAGE)
        self._pages_each = stride // PAGE_BYTES
        base = mine.ctypes.data
        starts = range(0, count * stride, stride)
        self.views = [memory.view[start : start + size_bytes] for start in starts]
        self.addresses = [base + start for start in starts]

    def stamp(self, position: int, number: int) -> int:
        """Make a buffer's content that of value `number`, different in every page.

        Returns its xxh3-64.
        """
        first = position * self._pages_each
        pages = self._pages[first : first + self._pages_each]
        pages[:, 0] = np.uint64(number << 24) + np.arange(self._pages_each, dtype=np.uint64)
        return self.checksum(position)

    def checksum(self, position: int) -> int:
        return xxhash.xxh3_64_intdigest(self.views[position])

    def checksums(self, positions: Sequence[int]) -> list[int]:
        return [self.checksum(position) for position in positions]


def memcpy(to: Sequence[int], from_: Sequence[int], size_bytes: int) -> None:
    """Copy buffer by buffer, as the measured operation does."""
    for destination, source in zip(to, from_, strict=True):
        memmove(destination, source, size_bytes)
