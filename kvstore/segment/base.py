"""What a node needs of a segment, and what a reader needs of one that somebody else owns."""

from __future__ import annotations

from typing import Protocol

from kvstore.core.events import Write
from kvstore.segment.header import Superblock


class OwnedSegment(Protocol):
    """The owner's side: alone in writing headers, and payload of values sent inline."""

    def apply(self, write: Write) -> None:
        """Carry out one write of the core, whole, before the next one starts."""
        ...

    def header(self, slot_id: int) -> bytes:
        """The 64 header bytes of a slot."""
        ...

    def checksum(self, offset: int, length: int) -> int:
        """xxh3-64 of payload bytes as they are now."""
        ...

    def close(self) -> None:
        """Unmap and remove it from the machine. Safe to call twice."""
        ...


class ReadableSegment(Protocol):
    """A reader's side: a mapping that cannot write."""

    @property
    def superblock(self) -> Superblock: ...

    @property
    def payload(self) -> memoryview:
        """All payload bytes, read-only."""
        ...

    def header(self, slot_id: int) -> bytes:
        """The 64 header bytes of a slot, as they are now."""
        ...

    def close(self) -> None: ...
