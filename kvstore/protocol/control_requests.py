"""Defines what a client wants to save, and encodes it as a RESERVE request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

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
) -> tuple[Any, ...]:
    """The arguments of a RESERVE request, column by column; empty columns are left out."""
    keys, sizes, kinds, meta_lengths, values, sums = zip(*wants, strict=True)
    return (
        namespace_id,
        join_keys(keys),
        sizes,
        kinds,
        meta_lengths,
        values if any(value is not None for value in values) else None,
        sums if checksums else 0,
    )
