"""Payloads in parts that are hashed while they are still in the processor's cache."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

CHUNK_BYTES = 1 << 20


class Digest:
    """xxh3-64 over chunks; a payload of one piece is hashed in one go."""

    __slots__ = ("_hasher", "_last")

    def __init__(self) -> None:
        self._last: Sequence[memoryview] = ()
        self._hasher: xxhash.xxh3_64 | None = None

    def update(self, chunk: Sequence[memoryview]) -> None:
        """The chunk must stay as it is until the next one, or `value`."""
        if self._last:
            self._take()
        self._last = chunk

    def _take(self) -> xxhash.xxh3_64:
        if self._hasher is None:
            self._hasher = xxhash.xxh3_64()
        for piece in self._last:
            self._hasher.update(piece)
        return self._hasher

    def value(self) -> int:
        if self._hasher is None and len(self._last) == 1:
            return xxhash.xxh3_64_intdigest(self._last[0])
        return self._take().intdigest()


def chunked(pieces: Sequence[memoryview]) -> list[list[memoryview]]:
    """`pieces` in runs of at most `CHUNK_BYTES`; a larger piece is cut."""
    chunks: list[list[memoryview]] = [[]]
    room = CHUNK_BYTES
    for piece in pieces:
        start = 0
        while start < piece.nbytes:
            if room == 0:
                chunks.append([])
                room = CHUNK_BYTES
            part = piece[start : start + room]
            chunks[-1].append(part)
            start += part.nbytes
            room -= part.nbytes
    return chunks
