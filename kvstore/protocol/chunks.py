"""Cuts payloads into parts that are hashed while they are still in the processor's cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import xxhash

CHUNK_BYTES = 1 << 20
_OF_NOTHING = xxhash.xxh3_64_intdigest(b"")


class Chunk(NamedTuple):
    """At most `CHUNK_BYTES` of payloads that follow each other."""

    pieces: list[memoryview]
    payloads: list[int]
    """The number of the payload that each piece belongs to."""


def chunked(payloads: Sequence[Sequence[memoryview]]) -> list[Chunk]:
    """Return the pieces of all `payloads`, in order; a larger piece is cut."""
    chunks: list[Chunk] = []
    room = 0
    for number, pieces in enumerate(payloads):
        for piece in pieces:
            start = 0
            while start < piece.nbytes:
                if room == 0:
                    chunks.append(Chunk([], []))
                    room = CHUNK_BYTES
                part = piece[start : start + room]
                chunks[-1].pieces.append(part)
                chunks[-1].payloads.append(number)
                start += part.nbytes
                room -= part.nbytes
    return chunks


class Digests:
    """Computes the xxh3-64 of payloads of those lengths (bytes), whose chunks come in order. What
    comes in a single piece is hashed in one go: 17 us a MiB instead of 26."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._values: dict[int, int] = {}
        self._hashers: dict[int, xxhash.xxh3_64] = {}

    def update(self, chunk: Chunk) -> None:
        for piece, number in zip(*chunk, strict=True):
            if piece.nbytes == self._lengths[number]:
                self._values[number] = xxhash.xxh3_64_intdigest(piece)
                continue
            hasher = self._hashers.get(number)
            if hasher is None:
                hasher = self._hashers[number] = xxhash.xxh3_64()
            hasher.update(piece)

    def value(self, number: int = 0) -> int:
        """Return the digest of the payload of that number, whose chunks have all come."""
        hasher = self._hashers.get(number)
        if hasher is None:
            return self._values.get(number, _OF_NOTHING)
        return int(hasher.intdigest())
