"""What `Client.match_prefix` and `Client.pin` give back."""

from __future__ import annotations

from typing import NamedTuple, Self

from kvstore.client.base import Found
from kvstore.client.host_writer import HostWriter
from kvstore.client.reader import Place
from kvstore.types import Key


class Match(NamedTuple):
    """The longest leading run of blocks of a token sequence that is in the store."""

    tokens: int
    """Tokens covered, a multiple of block_tokens."""
    blocks: int
    found: list[Found]


class Pinned:
    """A read-only view of a value in place; the block stays until `close()` or the `with` ends.

    Also safe to drop: the pin ends with the client at the latest.
    """

    def __init__(self, writer: HostWriter, place: Place, key: Key, record: bytes) -> None:
        self._writer = writer
        self._key = key
        self._record: bytes | None = record
        self.buffer: memoryview = place.data[:]  # of its own: the place is remembered
        """The value's bytes, read-only, format 'B', no copy."""

    def close(self) -> None:
        """Release the view and let the block go. Safe to call twice.

        Raises `BufferError`, and lets nothing go, while somebody holds `buffer` by the buffer
        protocol: close again when that is over.
        """
        self.buffer.release()
        record, self._record = self._record, None
        if record is not None:
            self._writer.unpin(self._key, record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
