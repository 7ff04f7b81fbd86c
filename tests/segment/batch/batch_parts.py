"""Saves into a segment and reads from it, as the contract of batch readers needs it."""

from __future__ import annotations

from typing import Any

from kvstore.core.events import Fill, Mark, Seal
from kvstore.segment.attached import AttachedShm
from kvstore.segment.batch_read import BatchReader, MappedSegment
from kvstore.segment.shm import OwnedShm

SIZE = 128 << 10
SLOTS = SIZE // 4096
VALUE = bytes(range(250)) * 4
KINDS = 1 << 1 | 1 << 0


def mapped(shm: AttachedShm) -> MappedSegment:
    """Return what a reader of many is given."""
    return shm._mapped


def key_of(hint: int, name: bytes = b"a") -> bytes:
    return name.ljust(8) + hint.to_bytes(4, "little") + name.ljust(20)


KEY = key_of(9)


def save(
    owned: OwnedShm,
    slot_id: int = 3,
    key: bytes = KEY,
    value: bytes = VALUE,
    *,
    granule: int = 0,
    kind: int = 1,
    meta_length: int = 0,
    generation: int = 1,
) -> None:
    owned.apply(Mark(slot_id, generation, 1))
    owned.apply(Fill(slot_id * 4096 + granule * 1024, value))
    whole = (generation, key, len(value), granule, kind, meta_length, 0, 0)
    owned.apply(Seal(slot_id, *whole))


def seal(owned: OwnedShm, slot_id: int, length: int, granule: int = 0, meta: int = 0) -> None:
    """Say so in a header, whatever there is."""
    owned.apply(Seal(slot_id, 1, KEY, length, granule, 1, meta, 0, 0))


def read(
    reader: BatchReader, shm: AttachedShm, *keys: bytes, outs: list[Any] | None = None, **more: Any
) -> list[Any]:
    wanted = list(keys) or [KEY]
    targets = [None] * len(wanted) if outs is None else outs
    values, size_bytes = reader.read(mapped(shm), wanted, targets, KINDS, **more)
    assert size_bytes == sum(len(value) for value in values if value is not None)
    return values
