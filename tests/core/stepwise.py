"""A segment written store by store, as others would see it: for killing a node in between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvstore.core.events import Bounds, Copy, Fill, Hold, Keep, Mark, Seal, Write
from kvstore.limits import SLOT_BYTES_MIN
from kvstore.segment.header import HEADER_BYTES, Superblock, pack, word

FILL_STEPS = 2


class StepwiseSegment:
    """Payload, headers and pin bytes as byte arrays, laid out as in the real files."""

    def __init__(self, superblock: Superblock) -> None:
        self.superblock = superblock
        self.bytes = bytearray(superblock.size_bytes)
        slots = superblock.size_bytes // SLOT_BYTES_MIN
        self.bounds = Bounds(0, 0, slots)
        self._head = bytearray(slots * HEADER_BYTES)
        self.held = bytearray(slots)
        self.terms: dict[int, Keep] = {}
        """What says that a slot's block is retained, by slot."""

    @property
    def headers(self) -> memoryview:
        """64 bytes a slot."""
        return memoryview(self._head)

    def retained(self, sealed: Iterable[Seal]) -> list[Keep]:
        """The terms of those blocks."""
        return [self.terms[b.slot_id] for b in sealed if b.slot_id in self.terms]

    def header(self, slot_id: int) -> bytes:
        return bytes(self._head[slot_id * HEADER_BYTES : (slot_id + 1) * HEADER_BYTES])

    def steps(self, write: Write) -> Iterator[None]:
        """Carry out `write`, yielding after each store that others can see by itself."""
        if isinstance(write, Copy):
            value = bytes(self.bytes[write.source : write.source + write.length])
            yield from self.steps(Fill(write.destination, value))
            return
        if isinstance(write, Fill):
            size = len(write.value)
            chunk = -(-size // FILL_STEPS)
            for start in range(0, size, chunk):
                part = write.value[start : start + chunk]
                self.bytes[write.offset + start : write.offset + start + len(part)] = part
                yield
            return
        if isinstance(write, Bounds):
            for done in (self.bounds._replace(generation=write.generation), write):
                self.bounds = done
                yield
            return
        if isinstance(write, Hold):
            self.held[write.slot_id] = write.held
            yield
            return
        if isinstance(write, Keep):
            self.terms.pop(write.slot_id, None)
            if write.until_s:
                self.terms[write.slot_id] = write
            yield
            return
        start = write.slot_id * HEADER_BYTES
        if isinstance(write, Mark):
            said = word(write.state, write.generation, write.granule, write.size)
            self._head[start : start + 8] = said.to_bytes(8, "little")
            yield
            return
        assert isinstance(write, Seal)
        raw = pack(write[1:])
        for first, end in ((8, 40), (40, HEADER_BYTES), (0, 8)):
            self._head[start + first : start + end] = raw[first:end]
            yield
