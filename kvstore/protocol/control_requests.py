"""Defines what a client wants to save, and encodes it as a RESERVE request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.batches import picked
from kvstore.protocol.control import join_keys
from kvstore.types import Key, Kind


@dataclass(slots=True)
class Wants:
    """Blocks to save, column by column, as the request has them. A single entry may stand for a
    column whose entries are all equal."""

    keys: Sequence[Key]
    sizes: int | Sequence[int]
    """Sizes in bytes, with the description at the end."""
    kinds: int | Sequence[int] = Kind.BLOCK
    meta_lengths: int | Sequence[int] = 0
    values: Sequence[bytes | None] | None = None
    """The values that travel in the request."""
    checksums: int | Sequence[int] = 0

    def __len__(self) -> int:
        return len(self.keys)

    def each_size(self) -> Sequence[int]:
        """Return the size of each block in bytes."""
        return [self.sizes] * len(self.keys) if isinstance(self.sizes, int) else self.sizes

    def of(self, which: Sequence[int]) -> Wants:
        """Return some of the blocks, by their numbers, which ascend."""
        if len(which) == len(self.keys):
            return self
        values = None if self.values is None else picked(self.values, which)
        return Wants(
            picked(self.keys, which),
            _some(self.sizes, which),
            _some(self.kinds, which),
            _some(self.meta_lengths, which),
            values,
            _some(self.checksums, which),
        )


def _some(column: int | Sequence[int], which: Sequence[int]) -> int | Sequence[int]:
    return column if isinstance(column, int) else picked(column, which)


def reserve_arguments(wants: Wants, namespace_id: int, *, checksums: bool) -> tuple[object, ...]:
    """Return the arguments of a RESERVE request."""
    values = wants.values
    if values is not None and values.count(None) == len(values):
        values = None
    return (
        namespace_id,
        join_keys(wants.keys),
        _column(wants.sizes),
        _column(wants.kinds),
        _column(wants.meta_lengths),
        values,
        wants.checksums if checksums else 0,
    )


def _column(entries: int | Sequence[int]) -> int | Sequence[int]:
    if isinstance(entries, int):
        return entries
    first = entries[0]
    return first if entries.count(first) == len(entries) else entries
