"""Encodes what a node answers to READ (stream.py), and decodes it: a head for each block asked
for, then for each group of those that come their payloads, a tag of these and a tail for each.
Pure."""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvstore.limits import META_BYTES_MAX
from kvstore.protocol.stream import KINDS, WireError
from kvstore.protocol.stream_seal import TAG_BYTES, StreamSeal, matches

GROUP_BYTES = 4 << 20
"""Payloads that travel together and are judged together; a larger one travels alone. Part of
the protocol: both sides divide a reply by it."""


class Sent(enum.IntEnum):
    """What a node says about one block, before its payload and after it."""

    GOOD = 1
    MISS = 2


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
    MISS: what was sent is not this block."""
    checksum: int
    """xxh3-64 of the payload."""


_LINE_BYTES = 64
"""Heads and tails fill whole cache lines, and so payloads stay aligned: processors copy what is 8
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
    """The tails of a group whose payloads have gone by `seal`."""
    payloads = seal.payload_tag()
    return _sealed(payloads + b"".join(_TAIL.pack(*tail) for tail in tails), seal)


def _sealed(raw: bytes, seal: StreamSeal) -> bytes:
    raw = raw.ljust(_lines_bytes(len(raw)) - TAG_BYTES, b"\0")
    return raw + seal.tag(raw)


def _opened(raw: bytes, size_bytes: int, seal: StreamSeal) -> bytes:
    """The first `size_bytes` of what `_sealed` made of as many."""
    body, tag = raw[:-TAG_BYTES], raw[-TAG_BYTES:]
    if len(raw) != _lines_bytes(size_bytes) or not matches(seal.tag(body), tag):
        raise WireError("a reply that is damaged")
    if any(body[size_bytes:]):
        raise WireError("a reply of more blocks than were asked for")
    return body[:size_bytes]


def grouped(blocks: Iterable[tuple[int, int]]) -> list[list[int]]:
    """The numbers of (number, length) in groups that travel together."""
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
    """Not good because its bytes are not those that the node sent."""


class ReadReply:
    """Follows the answer to one READ: a head for each block, then for each group of those that
    come their payloads and a tail for each."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._heads: list[Head] = []
        self._groups: list[list[int]] = []
        """Of blocks that were not judged yet."""
        self.replies: list[BlockReply | None] = [None] * len(lengths)
        """None while nothing is known of a block."""

    @property
    def done(self) -> bool:
        return None not in self.replies

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
        """The heads that were taken; None for blocks that do not come."""
        return [None if head.follows == Sent.MISS else head for head in self._heads]

    def tails(self, raw: bytes, seal: StreamSeal) -> None:
        """Take the tails of the next group, whose payloads have gone by `seal`.

        Payloads with another tag are no block: one that the node calls off may have spoilt
        those beside it, and else somebody has changed them.
        """
        if not self._groups:
            raise WireError("more than was asked for")
        group = self._groups[0]
        seen = seal.payload_tag()
        said = _opened(raw, len(group) * _TAIL.size + TAG_BYTES, seal)
        same = matches(seen, said[:TAG_BYTES])
        judged = []
        for verdict, checksum in _TAIL.iter_unpack(said[TAG_BYTES:]):
            if verdict not in (Sent.GOOD, Sent.MISS):
                raise WireError(f"verdict {verdict} on a payload")
            judged.append((verdict == Sent.GOOD, checksum))
        torn = not all(good for good, _ in judged)
        for block, (good, checksum) in zip(self._groups.pop(0), judged, strict=True):
            _, kind, meta_length = self._heads[block]
            if good and same:
                self.replies[block] = BlockReply(True, kind, meta_length, checksum)
            else:
                self.replies[block] = BlockReply(False, damaged=not torn)
