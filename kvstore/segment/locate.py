"""Turns a location into a place in a mapped segment, and checks its header before the copy."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvstore.core.memory.granules import GRANULE_BYTES, PAGE
from kvstore.limits import SLOT_BYTES_MIN
from kvstore.segment.header import Fields, Superblock, fields
from kvstore.types import Key, Location


class SlotHeaders(Protocol):
    """The slot headers of a segment, as a reader has them mapped (attached.py)."""

    slots: int

    @property
    def superblock(self) -> Superblock: ...

    def header(self, slot_id: int) -> bytes: ...


class Spot(NamedTuple):
    """A sealed block of a segment. Compare `image` with the header again after copying (rule 4)."""

    slot_id: int
    image: bytes
    """The header when it was found."""
    header: Fields
    offset: int
    """Position of the payload in the segment, in bytes."""


def locate(shm: SlotHeaders, key: Key, location: Location) -> Spot | None:
    """Return where the block of `location` is; None unless its header is SEALED and says the same.

    The node and its epoch are for the caller to compare: they made it choose `shm`.
    """
    if location.segment != 0 or location.slot >= shm.slots:
        return None
    image = shm.header(location.slot)
    header = sealed_as(image, key, location)
    if header is None:
        return None
    offset = offset_of(shm.superblock.size_bytes, location.slot, header)
    return None if offset is None else Spot(location.slot, image, header, offset)


def spot_of(size_bytes: int, slot_id: int, image: bytes) -> Spot | None:
    """Return where the block of the header `image` is; None unless that is SEALED, whole, and of a
    block that lies in a segment of `size_bytes`."""
    header = fields(image)
    offset = None if header is None else offset_of(size_bytes, slot_id, header)
    return None if header is None or offset is None else Spot(slot_id, image, header, offset)


def sealed_as(image: bytes, key: Key, location: Location) -> Fields | None:
    """Return what the header `image` says; None unless it is SEALED, whole, of that key and
    location."""
    header = fields(image)
    promised = (location.generation, key, location.length, location.granule)
    return header if header is not None and header[:4] == promised else None


def offset_of(size_bytes: int, slot_id: int, header: Fields) -> int | None:
    """Return the offset in bytes of the payload that a header describes; None unless all of it lies
    in a segment of `size_bytes`."""
    length, granule, meta_length = header[2], header[3], header[5]
    offset = slot_id * SLOT_BYTES_MIN + granule * GRANULE_BYTES
    right = granule < PAGE and meta_length <= length and offset + length <= size_bytes
    return offset if right else None
