"""Cuts a sequence into parts that one request, message or copy carries, and picks some of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def in_batches(
    items: Sequence[T],
    count_max: int,
    size_of: Callable[[T], int] | None = None,
    bytes_max: int = 0,
) -> Iterator[Sequence[T]]:
    """Cut `items`, in their order, into slices of at most `count_max` of them; none is empty.

    With `size_of`, the size of an item in bytes, those of a slice have at most `bytes_max`
    together; an item that is larger has a slice of its own.
    """
    if size_of is None:
        for start in range(0, len(items), count_max):
            yield items[start : start + count_max]
        return
    sizes = list(map(size_of, items))
    if 0 < len(items) <= count_max and sum(sizes) <= bytes_max:
        yield items
        return
    start = size_bytes = 0
    for i, its_bytes in enumerate(sizes):
        if i > start and (size_bytes + its_bytes > bytes_max or i - start == count_max):
            yield items[start:i]
            start, size_bytes = i, 0
        size_bytes += its_bytes
    if items:
        yield items[start:]


def picked(column: Sequence[T], which: Sequence[int]) -> Sequence[T]:
    """Return the entries with these numbers, which ascend."""
    return column if len(which) == len(column) else [column[i] for i in which]
