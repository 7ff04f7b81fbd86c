"""Where blocks are in a segment that is not mapped here: what a one-sided reader computes."""

from __future__ import annotations

from kvstore.core.sizes import SLOT_BYTES
from kvstore.limits import (
    ARENA_BYTES_MAX,
    ARENA_BYTES_MIN,
    SLOT_BYTES_MIN,
    SLOTS_PER_SEGMENT_MAX,
)
from kvstore.nodedir import Announcement
from kvstore.segment.header import HEADER_BYTES, SUPERBLOCK_BYTES, Superblock
from kvstore.segment.locate import offset_of, sealed_as
from kvstore.types import Key, Location


class Layout:
    """Of the segment of an announced node. A location that leads out of it leads nowhere, and so
    does every one when there is no segment of the announced shape."""

    header_bytes = HEADER_BYTES

    def __init__(self, word: Announcement) -> None:
        self.superblock = Superblock(word.node_id, word.epoch, 0, word.arenas, word.arena_bytes)
        right = ARENA_BYTES_MIN <= word.arena_bytes <= ARENA_BYTES_MAX
        self.slots_per_arena = word.arena_bytes // SLOT_BYTES_MIN
        self.slots = min(word.arenas * self.slots_per_arena, SLOTS_PER_SEGMENT_MAX) if right else 0
        self.slot_bytes = tuple(min(size, word.arena_bytes) for size in SLOT_BYTES)

    def places(self, location: Location) -> tuple[int, int] | None:
        """(offset of its header in the header file, of its payload in the segment)."""
        block = self.superblock
        if (location.node_id, location.epoch, location.segment) != block[:3]:
            return None
        if location.slot >= self.slots:
            return None
        header = (location.generation, b"", location.length, location.size_class, 0, 0, 0, 0)
        offset = offset_of(self, location.slot, header)
        if offset is None:
            return None
        return SUPERBLOCK_BYTES + location.slot * HEADER_BYTES, offset

    @staticmethod
    def seen(image: bytes, key: Key, location: Location) -> tuple[int, int, int] | None:
        """(kind, meta length, checksum) in a header, None unless it is SEALED, whole, and of that
        key and location."""
        header = sealed_as(image, key, location)
        if header is None:
            return None
        _, _, length, _, kind, meta_length, checksum, _ = header
        return (kind, meta_length, checksum) if meta_length <= length else None
