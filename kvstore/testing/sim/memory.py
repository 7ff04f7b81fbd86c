"""Shared memory of one node start, written the way hardware lets others see it: step by step."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.core.events import Fill, Hold, Mark, Seal, Write
from kvstore.core.sizes import SLOT_BYTES
from kvstore.limits import SLOT_BYTES_MIN
from kvstore.segment.header import (
    HEADER_BYTES,
    SUPERBLOCK_BYTES,
    Superblock,
    hint_of,
    hints_of,
    pack,
    pack_superblock,
    word,
)
from kvstore.types import Key

FILL_STEPS = 2


class SimSegment:
    """Payload and headers as byte arrays, with the layout of the real files."""

    def __init__(self, superblock: Superblock) -> None:
        self.superblock = superblock
        self.slots_per_arena = superblock.arena_bytes // SLOT_BYTES_MIN
        self.bytes = bytearray(superblock.arenas * superblock.arena_bytes)
        self.payload = memoryview(self.bytes)
        self.slots = superblock.arenas * self.slots_per_arena
        self.slot_bytes = tuple(min(size, superblock.arena_bytes) for size in SLOT_BYTES)
        self._head = bytearray(SUPERBLOCK_BYTES + self.slots * HEADER_BYTES)
        self._hints = [0] * hints_of(self.slots)
        self.held = bytearray(self.slots)
        raw = pack_superblock(superblock)
        self._head[: len(raw)] = raw

    def populate(self, offset: int, size_bytes: int) -> None:
        """Pages are always there."""

    def hinted(self, key: Key) -> tuple[int, bytes]:
        slot_id = self._hints[hint_of(key, len(self._hints))]
        return slot_id, self.header(slot_id)

    def header(self, slot_id: int) -> bytes:
        start = SUPERBLOCK_BYTES + slot_id * HEADER_BYTES
        return bytes(self._head[start : start + HEADER_BYTES])

    @property
    def headers(self) -> memoryview:
        """64 bytes a slot."""
        return memoryview(self._head)[SUPERBLOCK_BYTES:]

    def apply(self, write: Write) -> None:
        """All of `steps`, with nobody in between."""
        for _ in self.steps(write):
            pass

    def close(self) -> None:
        """Nothing to give back."""

    def steps(self, write: Write) -> Iterator[None]:
        """Carry out `write`, yielding after each store that others can see by itself."""
        if isinstance(write, Fill):
            size = len(write.value)
            chunk = -(-size // FILL_STEPS)
            for start in range(0, size, chunk):
                part = write.value[start : start + chunk]
                self.bytes[write.offset + start : write.offset + start + len(part)] = part
                yield
            return
        if isinstance(write, Hold):
            self.held[write.slot_id] = write.held
            yield
            return
        start = SUPERBLOCK_BYTES + write.slot_id * HEADER_BYTES
        if isinstance(write, Mark):
            self._store_word(start, word(write.state, write.generation, write.size_class))
            yield
            return
        assert isinstance(write, Seal)
        raw = pack(write[1:])
        self._head[start + 8 : start + 40] = raw[8:40]
        yield
        self._head[start + 40 : start + HEADER_BYTES] = raw[40:]
        yield
        self._head[start : start + 8] = raw[:8]
        yield
        self._hints[hint_of(write.key, len(self._hints))] = write.slot_id

    def _store_word(self, start: int, value: int) -> None:
        self._head[start : start + 8] = value.to_bytes(8, "little")
