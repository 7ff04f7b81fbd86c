"""From a location to a place in a segment: what a reader may believe before it has copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvstore.segment.copying import copy
from kvstore.segment.header import Fields, Superblock, fields
from kvstore.segment.shm import AttachedHeads, AttachedShm
from kvstore.types import Key, Location


class Shape(Protocol):
    """How a segment is divided."""

    @property
    def superblock(self) -> Superblock: ...

    @property
    def slots_per_arena(self) -> int: ...

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """By size class."""
        ...


class Spot(NamedTuple):
    """A sealed block of a segment. Compare `image` with the header again after copying (rule 4)."""

    slot_id: int
    image: bytes
    """The header when it was found."""
    header: Fields
    offset: int
    """Of the payload, in the segment."""


def locate(shm: AttachedHeads, key: Key, location: Location) -> Spot | None:
    """None unless the slot's header is SEALED and says what the location does.

    The node and its epoch are for the caller to compare: they made it choose `shm`.
    """
    if location.segment != 0 or location.slot >= shm.slots:
        return None
    image = shm.header(location.slot)
    header = sealed_as(image, key, location)
    if header is None:
        return None
    offset = offset_of(shm, location.slot, header)
    return None if offset is None else Spot(location.slot, image, header, offset)


def sealed_as(image: bytes, key: Key, location: Location) -> Fields | None:
    """What a header says, None unless it is SEALED, whole, and of that key and location."""
    header = fields(image)
    promised = (location.generation, key, location.length, location.size_class)
    return header if header is not None and header[:4] == promised else None


def offset_of(shape: Shape, slot_id: int, header: Fields) -> int | None:
    """Where the payload that a header describes begins, None unless it lies in its arena."""
    length, size_class, meta_length = header[2], header[3], header[5]
    arena_bytes = shape.superblock.arena_bytes
    arena, position = divmod(slot_id, shape.slots_per_arena)
    if arena >= shape.superblock.arenas or size_class >= len(shape.slot_bytes):
        return None
    slot_bytes = shape.slot_bytes[size_class]
    start = position * slot_bytes
    if not meta_length <= length <= slot_bytes or start + slot_bytes > arena_bytes:
        return None
    return arena * arena_bytes + start


def copy_out(
    shm: AttachedShm, key: Key, location: Location, into: Sequence[memoryview]
) -> tuple[int, int] | None:
    """Copy a payload into pieces that are together as long as it: its kind and meta length.

    None when it is not there, or was changed meanwhile (rule 4).
    """
    spot = locate(shm, key, location)
    if spot is None:
        return None
    start = spot.offset
    for piece in into:
        copy(piece, shm.payload[start : start + piece.nbytes])
        start += piece.nbytes
    if shm.header(spot.slot_id) != spot.image:
        return None
    return spot.header[4], spot.header[5]
