"""Encodes what a node answers to READ (stream.py), and decodes it: a head for each block asked
for, then for each group of those that come their payloads, a tag of these and a tail for each.
Pure."""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvstore.limits import META_BYTES_MAX
from kvstore.protocol.chunks import Digests, chunked
from kvstore.protocol.stream import KINDS, WireError
from kvstore.protocol.stream_seal import TAG_BYTES, StreamSeal, matches

GROUP_BYTES = 4 << 20
"""Bytes of payloads that travel together and are judged together; a larger payload travels alone.
It is part of the protocol: both sides divide a reply by it."""


class Sent(enum.IntEnum):
    """What a node says about one block, before its payload and after it."""

    GOOD = 1
    MISS = 2
    FAILED = 3
    """After a payload alone: it may be here, and a disk did not give it in time."""


_HEAD = struct.Struct("<BBH")
_TAIL = struct.Struct("<BxxxQ")


class Head(NamedTuple):
    """What is known of a block before its payload."""

    follows: int
    """GOOD: its payload comes, as long as the location says; MISS: it is not here."""
    kind: int = 0
    meta_length: int = 0


class Tail(NamedTuple):
    """What is known of a block after its payload."""

    verdict: int
    """GOOD: the block was in place, the same from before its first byte to after its last.
    MISS, FAILED: what was sent is not this block."""
    checksum: int
    """xxh3-64 of the payload."""


_LINE_BYTES = 64
"""Heads and tails fill whole cache lines, so that payloads stay aligned: processors copy what is 8
or 16 bytes off at half the speed."""


def heads_bytes(blocks: int) -> int:
    return _lines_bytes(blocks * _HEAD.size)


def tails_bytes(blocks: int) -> int:
    return _lines_bytes(blocks * _TAIL.size + TAG_BYTES)


def _lines_bytes(size_bytes: int) -> int:
    return -(-(size_bytes + TAG_BYTES) // _LINE_BYTES) * _LINE_BYTES


def pack_heads(heads: Sequence[Head], seal: StreamSeal) -> bytes:
    return _sealed(b"".join(_HEAD.pack(*head) for head in heads), seal)


def pack_tails(tails: Sequence[Tail], seal: StreamSeal) -> bytes:
    """Return the tails of a group whose payloads have gone by `seal`."""
    payloads = seal.payload_tag()
    return _sealed(payloads + b"".join(_TAIL.pack(*tail) for tail in tails), seal)


def _sealed(raw: bytes, seal: StreamSeal) -> bytes:
    raw = raw.ljust(_lines_bytes(len(raw)) - TAG_BYTES, b"\0")
    return raw + seal.tag(raw)


def _opened(raw: bytes, size_bytes: int, seal: StreamSeal) -> bytes:
    """Return the first `size_bytes` of what `_sealed` made of as many."""
    body, tag = raw[:-TAG_BYTES], raw[-TAG_BYTES:]
    if len(raw) != _lines_bytes(size_bytes) or not matches(seal.tag(body), tag):
        raise WireError("a reply that is damaged")
    if any(body[size_bytes:]):
        raise WireError("a reply of more blocks than were asked for")
    return body[:size_bytes]


def grouped(blocks: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return the numbers of (number, length) in groups that travel together."""
    groups: list[list[int]] = []
    room = 0
    for number, length in blocks:
        if not groups or length > room:
            groups.append([])
            room = GROUP_BYTES
        groups[-1].append(number)
        room -= length
    return groups


class BlockReply(NamedTuple):
    """One block as the node sent it; `checksum` is what its bytes must have."""

    good: bool
    kind: int = 0
    meta_length: int = 0
    checksum: int = 0
    damaged: bool = False
    """True if it is not good because its bytes differ from those that the node sent."""
    failed: bool = False
    """True if the node's disk did not give it."""


class ReadReply:
    """Reads the answer to one READ, without I/O: a head for each block, then for each group of
    those that come their payloads and a tail for each."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._heads: list[Head] = []
        self._groups: list[list[int]] = []
        """Groups of blocks that were not judged yet."""
        self.replies: list[BlockReply | None] = [None] * len(lengths)
        """A reply for each block; None while nothing is known of it."""

    def memory(
        self, into: Sequence[Sequence[memoryview]], seal: StreamSeal
    ) -> Iterator[list[memoryview]]:
        """Yield the memory that the answer fills, in the order of its bytes, with payloads straight
        `into` the memory of their blocks. Each is to be full before the next is asked for. Raises
        `WireError`."""
        heads = memoryview(bytearray(heads_bytes(len(into))))
        yield [heads]
        for group in self.heads(bytes(heads), seal):
            tails = memoryview(bytearray(tails_bytes(len(group))))
            digests = Digests([self._lengths[block] for block in group])
            chunks = chunked([into[block] for block in group])
            for chunk in chunks:
                yield [*chunk.pieces, *([tails] if chunk is chunks[-1] else ())]
                digests.update(chunk)
                for piece in chunk.pieces:
                    seal.update(piece)
            if not chunks:
                yield [tails]
            self.tails(bytes(tails), seal, [digests.value(i) for i in range(len(group))])

    def heads(self, raw: bytes, seal: StreamSeal) -> Sequence[Sequence[int]]:
        """Take the heads; the blocks that come, in the groups in which they do."""
        body = _opened(raw, len(self._lengths) * _HEAD.size, seal)
        self._heads = [Head(*item) for item in _HEAD.iter_unpack(body)]
        coming = []
        for block, (head, length) in enumerate(zip(self._heads, self._lengths, strict=True)):
            if head.follows == Sent.MISS:
                self.replies[block] = BlockReply(good=False)
                continue
            if head.follows != Sent.GOOD:
                raise WireError(f"{head.follows} where a payload or none was due")
            if head.kind not in KINDS or head.meta_length > min(length, META_BYTES_MAX):
                raise WireError(
                    f"a block of kind {head.kind} with {head.meta_length} bytes of meta"
                )
            coming.append((block, length))
        self._groups = grouped(coming)
        return list(self._groups)

    def there(self) -> list[Head | None]:
        """Return the heads that were taken; None for blocks that do not come."""
        return [None if head.follows == Sent.MISS else head for head in self._heads]

    def tails(
        self, raw: bytes, seal: StreamSeal, checksums: Sequence[int | None] | None = None
    ) -> None:
        """Take the tails of the next group, whose payloads have gone by `seal` and have these
        `checksums`, where they were computed.

        Payloads with another tag are no block: one that the node calls off may have spoilt
        those beside it, and else somebody has changed them.
        """
        if not self._groups:
            raise WireError("more than was asked for")
        group = self._groups[0]
        tag = seal.payload_tag()
        tail_bytes = _opened(raw, len(group) * _TAIL.size + TAG_BYTES, seal)
        same = matches(tag, tail_bytes[:TAG_BYTES])
        judged = []
        for verdict, checksum in _TAIL.iter_unpack(tail_bytes[TAG_BYTES:]):
            if verdict not in (Sent.GOOD, Sent.MISS, Sent.FAILED):
                raise WireError(f"verdict {verdict} on a payload")
            judged.append((verdict, checksum))
        torn = any(verdict != Sent.GOOD for verdict, _ in judged)
        seen = checksums or [checksum for _, checksum in judged]
        for block, (verdict, checksum), came in zip(self._groups.pop(0), judged, seen, strict=True):
            _, kind, meta_length = self._heads[block]
            good = verdict == Sent.GOOD
            if verdict == Sent.FAILED:
                self.replies[block] = BlockReply(False, failed=True)
            elif good and same and came == checksum:
                self.replies[block] = BlockReply(True, kind, meta_length, checksum)
            else:
                self.replies[block] = BlockReply(False, damaged=not torn or (good and same))
