"""Computes where blocks are in a segment that is not mapped here, for one-sided readers."""

from __future__ import annotations

from kvstore.limits import (
    SEGMENT_BYTES_MIN,
    SLOT_BYTES_MIN,
    SLOTS_PER_SEGMENT_MAX,
)
from kvstore.nodedir import Announcement
from kvstore.segment.header import HEADER_BYTES, SUPERBLOCK_BYTES, Superblock
from kvstore.segment.locate import offset_of, sealed_as
from kvstore.types import Key, Location


class Layout:
    """Says where the blocks of an announced node's segment are. A location that leads out of the
    segment has no place, nor has any when no segment can have the announced size."""

    header_bytes = HEADER_BYTES

    def __init__(self, announcement: Announcement) -> None:
        self.superblock = Superblock(
            announcement.node_id, announcement.epoch, 0, announcement.size_bytes
        )
        right = (
            SEGMENT_BYTES_MIN <= announcement.size_bytes <= SLOTS_PER_SEGMENT_MAX * SLOT_BYTES_MIN
        )
        self.slots = announcement.size_bytes // SLOT_BYTES_MIN if right else 0

    def places(self, location: Location) -> tuple[int, int] | None:
        """Return (offset of the header in the header file, of the payload in the segment), in
        bytes; None when the location is outside."""
        block = self.superblock
        if (location.node_id, location.epoch, location.segment) != block[:3]:
            return None
        if location.slot >= self.slots:
            return None
        header = (location.generation, b"", location.length, location.granule, 0, 0, 0, 0)
        offset = offset_of(block.size_bytes, location.slot, header)
        if offset is None:
            return None
        return SUPERBLOCK_BYTES + location.slot * HEADER_BYTES, offset

    @staticmethod
    def seen(image: bytes, key: Key, location: Location) -> tuple[int, int, int] | None:
        """Return (kind, meta length, checksum) in a header, None unless it is SEALED, whole, and of
        that key and location."""
        header = sealed_as(image, key, location)
        if header is None:
            return None
        _, _, length, _, kind, meta_length, checksum, _ = header
        return (kind, meta_length, checksum) if meta_length <= length else None
