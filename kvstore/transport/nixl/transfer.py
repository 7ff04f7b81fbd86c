"""One batch read through NIXL: header, payload and header again of each block, then a copy."""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import xxhash

from kvstore.errors import PeerError
from kvstore.limits import NIXL_PIECES_MAX, NIXL_REQUEST_BYTES_MAX
from kvstore.protocol.nixl import Endpoint
from kvstore.transport.base import Outcome, Read, Wanted
from kvstore.transport.nixl.child import OK
from kvstore.transport.nixl.process import ChildAnswer
from kvstore.transport.nixl.reader import READ_TIMEOUT_MIN_S, NixlReader, Part
from kvstore.transport.stream.channel import advance
from kvstore.transport.stream.transport import CHECKSUM_REASON, NOT_THERE_REASON
from kvstore.types import Key, Location

AHEAD = 2
"""Requests of one transfer at the same time: one is copied while the next is read."""
LOOK_S = 0.05
"""How often whoever waits looks whether another thread has cancelled."""
CHUNKS_MAX = NIXL_PIECES_MAX // 3
_PIECE = struct.Struct("<QQQ")


class RemoteLayout(Protocol):
    """Of a node's segment (`kvstore.segment.layout.Layout`)."""

    @property
    def header_bytes(self) -> int: ...

    def places(self, location: Location) -> tuple[int, int] | None:
        """Offsets of its header and its payload; None when it leads nowhere."""
        ...

    def seen(self, image: bytes, key: Key, location: Location) -> tuple[int, int, int] | None:
        """(kind, meta length, checksum) of a header that says what the location does."""
        ...


class _Chunk(NamedTuple):
    """A part of a block's payload, with the place of the block's header."""

    block: int
    head_at: int
    data_at: int
    size_bytes: int


class _Request(NamedTuple):
    """A READ under way."""

    chunks: Sequence[_Chunk]
    part: Part
    future: Future[ChildAnswer]
    posted_at: float


class _Block:
    """What of one block has come. Its chunks come in order."""

    __slots__ = ("digest", "image", "pieces", "seen", "wanted")

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.pieces = [piece for piece in wanted.into if piece.nbytes]
        """Where what is still to come goes."""
        self.digest = xxhash.xxh3_64()
        self.image = b""
        """Its header, the same before and after all that has come."""
        self.seen = (0, 0, 0)
        """Kind, meta length and checksum, from that header."""


class NixlTransfer:
    """Implements `Transfer`."""

    def __init__(self, wanted: Sequence[Wanted], deadline: float) -> None:
        self._deadline = deadline
        self._blocks = [_Block(one) for one in wanted]
        self._lock = threading.Lock()
        self._outcomes: list[Outcome | None] = [None] * len(wanted)
        self._left: Iterator[list[_Chunk]] = iter(())
        self._next: list[_Chunk] | None = None
        self._flying: deque[_Request] = deque()
        self._ended = not wanted
        self._cancelled = False
        self._blame: Callable[[str], None] = lambda reason: None

    def begin(
        self, reader: NixlReader, way: Endpoint, layout: RemoteLayout, blame: Callable[[str], None]
    ) -> None:
        """Start reading; `blame` hears why when it is the peer's fault that it failed."""
        with self._lock:
            self._reader, self._way, self._layout, self._blame = reader, way, layout, blame
            self._left = self._plan()
            self._next = next(self._left, None)
            try:
                self._post(wait=False)
            except PeerError as e:
                self._fail(str(e), blame=True)

    def fail(self, reason: str) -> None:
        """It cannot even begin."""
        with self._lock:
            self._fail(reason)

    def poll(self) -> bool:
        """See `Transfer.poll`."""
        if not self._ended and self._lock.acquire(blocking=False):
            try:
                self._advance(wait=False)
            finally:
                self._lock.release()
        return self._ended

    def wait(self) -> Sequence[Outcome]:
        """See `Transfer.wait`."""
        with self._lock:
            self._advance(wait=True)
            return [outcome for outcome in self._outcomes if outcome is not None]

    def cancel(self) -> None:
        """See `Transfer.cancel`."""
        self._cancelled = True
        with self._lock:
            self._fail("cancelled")

    # --- planning -----------------------------------------------------------

    def _plan(self) -> Iterator[list[_Chunk]]:
        """What each request reads; large blocks are cut."""
        chunks: list[_Chunk] = []
        room = NIXL_REQUEST_BYTES_MAX
        for number, block in enumerate(self._blocks):
            places = self._layout.places(block.wanted.location)
            if places is None:
                self._outcomes[number] = Outcome(Read.MISS, NOT_THERE_REASON)
                continue
            head_at, data_at = places
            left = block.wanted.location.length
            while True:
                if room == 0 or len(chunks) == CHUNKS_MAX:
                    yield chunks
                    chunks, room = [], NIXL_REQUEST_BYTES_MAX
                size_bytes = min(left, room)
                chunks.append(_Chunk(number, head_at, data_at, size_bytes))
                data_at += size_bytes
                left -= size_bytes
                room -= size_bytes
                if not left:
                    break
        if chunks:
            yield chunks

    def _stages(self, chunks: Sequence[_Chunk], part: Part) -> list[bytes]:
        """Headers, payload, headers: in this order, so that the last say whether the payload was
        the block's all along (rule 4)."""
        way, size_bytes = self._way, self._layout.header_bytes
        before, payload, after = [], [], []
        to, heads = part.start, part.start + NIXL_REQUEST_BYTES_MAX
        for chunk in chunks:
            head_at = way.head_at + chunk.head_at
            before.append(_PIECE.pack(head_at, heads, size_bytes))
            after.append(_PIECE.pack(head_at, heads + size_bytes, size_bytes))
            if chunk.size_bytes:
                payload.append(_PIECE.pack(way.data_at + chunk.data_at, to, chunk.size_bytes))
            heads += 2 * size_bytes
            to += chunk.size_bytes
        return [b"".join(stage) for stage in (before, payload, after) if stage]

    # --- driving ------------------------------------------------------------

    def _advance(self, *, wait: bool) -> None:
        while not self._ended:
            if self._cancelled:
                self._fail("cancelled")
                return
            try:
                self._post(wait=wait)
            except PeerError as e:
                self._fail(str(e), blame=True)
                return
            if not self._flying:
                if self._next is None:
                    self._ended = True
                elif time.monotonic() >= self._deadline or not self._reader.usable:
                    self._fail("no room to read into in time")
                elif not wait:
                    return
                continue
            request = self._flying[0]
            left_s = self._deadline - time.monotonic()
            try:
                answer = request.future.result(min(max(left_s, 0.0), LOOK_S) if wait else 0.0)
            except TimeoutError:
                if left_s <= 0:
                    self._late(request)
                elif not wait:
                    return
                continue
            self._flying.popleft()
            if answer.status != OK:
                self._reader.abandon(request.part, request.future)
                self._fail(str(answer.body) or "the READ did not end in time", blame=True)
                return
            self._absorb(request)
            self._reader.give(request.part)

    def _post(self, *, wait: bool) -> None:
        """Keep requests under way; waits for room only when there is none. Raises `PeerError`."""
        while self._next is not None and len(self._flying) < AHEAD:
            now = time.monotonic()
            until = min(self._deadline, now + LOOK_S) if wait and not self._flying else now
            part = self._reader.take(until)
            if part is None:
                return
            try:
                stages = self._stages(self._next, part)
                future = self._reader.read(self._way.agent, part, stages, self._deadline)
            except BaseException:
                self._reader.give(part)
                raise
            self._flying.append(_Request(self._next, part, future, now))
            self._next = next(self._left, None)

    def _absorb(self, request: _Request) -> None:
        """Check what has come and copy it where it is wanted."""
        memory = request.part.memory
        header_bytes = self._layout.header_bytes
        at, heads = 0, NIXL_REQUEST_BYTES_MAX
        for chunk in request.chunks:
            payload = memory[at : at + chunk.size_bytes]
            before = memory[heads : heads + header_bytes]
            after = memory[heads + header_bytes : heads + 2 * header_bytes]
            at += chunk.size_bytes
            heads += 2 * header_bytes
            if self._outcomes[chunk.block] is not None:
                continue
            block = self._blocks[chunk.block]
            if not self._matches(block, bytes(before), bytes(after)):
                self._outcomes[chunk.block] = Outcome(Read.MISS, NOT_THERE_REASON)
                continue
            if block.seen[2] or block.wanted.location.checksum:
                block.digest.update(payload)
            while payload.nbytes:
                size_bytes = min(payload.nbytes, block.pieces[0].nbytes)
                block.pieces[0][:size_bytes] = payload[:size_bytes]
                advance(block.pieces, size_bytes)
                payload = payload[size_bytes:]
            if not block.pieces:
                self._outcomes[chunk.block] = self._judge(block)

    def _matches(self, block: _Block, before: bytes, after: bytes) -> bool:
        """Whether what came between two looks at the header is the block's (rule 4)."""
        if not block.image:
            seen = self._layout.seen(before, block.wanted.key, block.wanted.location)
            if seen is None:
                return False
            block.image, block.seen = before, seen
        return block.image == before == after

    @staticmethod
    def _judge(block: _Block) -> Outcome:
        kind, meta_length, checksum = block.seen
        known = {checksum, block.wanted.location.checksum} - {0}
        if known and known != {block.digest.intdigest()}:
            return Outcome(Read.MISS, CHECKSUM_REASON)
        return Outcome(Read.HIT, "", kind, meta_length)

    # --- ending -------------------------------------------------------------

    def _late(self, request: _Request) -> None:
        """Bytes may still come: unless the caller was in a hurry, the arena is given up."""
        patient = time.monotonic() - request.posted_at >= READ_TIMEOUT_MIN_S
        if patient:
            self._reader.retire()
        self._fail("the READ did not end in time", blame=patient)

    def _fail(self, reason: str, *, blame: bool = False) -> None:
        """What is not known yet is FAILED; the caller's memory is not written any more."""
        if self._ended:
            return
        for request in self._flying:
            self._reader.abandon(request.part, request.future)
        self._flying.clear()
        self._next = None
        failed = Outcome(Read.FAILED, reason)
        self._outcomes = [outcome or failed for outcome in self._outcomes]
        self._ended = True
        if blame:
            self._blame(reason)
