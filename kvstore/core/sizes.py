"""Size classes: four to a doubling, so a slot is never more than 25% larger than its value.

The smallest class is the exception: values under `SLOT_BYTES_MIN` share it.
"""

from __future__ import annotations

from bisect import bisect_left

from kvstore.limits import ARENA_BYTES_MAX, SLOT_BYTES_MIN

_STEPS = 4


def _all_sizes() -> list[int]:
    sizes: list[int] = []
    size_class = 0
    while True:
        base = SLOT_BYTES_MIN << (size_class // _STEPS)
        size = base + base * (size_class % _STEPS) // _STEPS
        if size > ARENA_BYTES_MAX:
            return sizes
        sizes.append(size)
        size_class += 1


SLOT_BYTES: tuple[int, ...] = tuple(_all_sizes())
"""Slot size in bytes by size class."""


def size_class_of(length: int) -> int:
    """The smallest class whose slots hold `length` bytes; len(SLOT_BYTES) when none does."""
    return bisect_left(SLOT_BYTES, length)
