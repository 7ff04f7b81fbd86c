"""Defines what a client wants to save, and encodes it as a RESERVE request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.protocol.control import join_keys
from kvstore.types import Key


class Want(NamedTuple):
    """One block to save; `value`, when given, travels in the request."""

    key: Key
    size_bytes: int
    kind: int
    meta_length: int
    value: bytes | None
    checksum: int


def reserve_arguments(
    wants: Sequence[Want], namespace_id: int, *, checksums: bool
) -> tuple[object, ...]:
    """The arguments of a RESERVE request, column by column; empty columns are left out, and of
    one whose entries are all equal one stands for all."""
    keys, sizes, kinds, meta_lengths, values, sums = zip(*wants, strict=True)
    return (
        namespace_id,
        join_keys(keys),
        _column(sizes),
        _column(kinds),
        _column(meta_lengths),
        None if values.count(None) == len(values) else values,
        sums if checksums else 0,
    )


def _column(entries: tuple[int, ...]) -> int | tuple[int, ...]:
    first = entries[0]
    return first if entries.count(first) == len(entries) else entries
