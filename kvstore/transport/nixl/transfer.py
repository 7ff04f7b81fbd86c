"""Reads one batch of blocks through NIXL: for each its header, its payload and its header again,
then checks what came and copies it to its destination."""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import xxhash

from kvstore.cuda.base import Copy, DeviceRange
from kvstore.errors import DeadlineError, DeviceError, NodeUnavailableError, PeerError
from kvstore.limits import NIXL_PIECES_MAX, NIXL_REQUEST_BYTES_MAX
from kvstore.protocol.nixl import Endpoint
from kvstore.system.on_failure import on_failure
from kvstore.transport.base import Outcome, Read, Wanted
from kvstore.transport.nixl.child import OK
from kvstore.transport.nixl.process import ChildAnswer
from kvstore.transport.nixl.reader import READ_TIMEOUT_MIN_S, NixlReader, Part, Stage
from kvstore.transport.nixl.vram import VramWay
from kvstore.transport.stream.channel import advance
from kvstore.transport.stream.transport import CHECKSUM_REASON, NOT_THERE_REASON
from kvstore.types import Key, Location

AHEAD = 2
"""Requests of one batch in flight: one is copied while the next is read."""
LATE_REASON = "the READ did not end in time"
CHUNKS_MAX = NIXL_PIECES_MAX // 3
_PIECE = struct.Struct("<QQQ")


class RemoteLayout(Protocol):
    """Says where blocks are in a node's segment; `kvstore.segment.layout.Layout` is one."""

    @property
    def header_bytes(self) -> int: ...

    def places(self, location: Location) -> tuple[int, int] | None:
        """Return the offsets of the block's header and payload; None when the location leads
        nowhere."""
        ...

    def seen(self, image: bytes, key: Key, location: Location) -> tuple[int, int, int] | None:
        """Return (kind, meta length, checksum) in a header; None unless it says what the location
        does."""
        ...


class _Chunk(NamedTuple):
    """A part of a block's payload, with the place of the block's header."""

    block: int
    head_at: int
    data_at: int
    size_bytes: int


class _Request(NamedTuple):
    """A READ in flight."""

    chunks: Sequence[_Chunk]
    part: Part
    future: Future[ChildAnswer]
    posted_at: float


class _Block:
    """One block, and how much of it has arrived; its chunks arrive in order."""

    __slots__ = ("came_bytes", "digest", "image", "pieces", "seen", "vram", "wanted")

    def __init__(self, wanted: Wanted, *, to_vram: bool) -> None:
        self.wanted = wanted
        # Without a checksum nothing would tell what came on the device from what was there before.
        checked = wanted.location.length > 0 and wanted.location.checksum != 0
        self.vram = wanted.vram if to_vram and checked else None
        self.came_bytes = 0
        self.pieces = [piece for piece in wanted.into if piece.nbytes]
        """Destination of the rest, unless that is `vram`."""
        self.digest = xxhash.xxh3_64()
        self.image = b""
        """The header, the same before and after all that has arrived."""
        self.seen = (0, 0, 0)
        """Kind, meta length and checksum, from that header."""


class NixlBatch:
    """Some blocks of one node, read by the caller's thread."""

    def __init__(
        self,
        reader: NixlReader,
        endpoint: Endpoint,
        layout: RemoteLayout,
        wanted: Sequence[Wanted],
        deadline: float,
        vram: VramWay | None = None,
    ) -> None:
        self._reader, self._endpoint, self._layout = reader, endpoint, layout
        self._deadline = deadline
        arena = reader.vram
        proved = vram is not None and arena is not None and arena.proved
        self._vram = (vram, arena) if vram and arena and proved else None
        self._blocks = [_Block(one, to_vram=self._vram is not None) for one in wanted]
        self._outcomes: list[Outcome | None] = [None] * len(wanted)
        self._flying: deque[_Request] = deque()

    def read(self, blame: Callable[[str], None]) -> Sequence[Outcome]:
        """See `Transport.read`; `blame` is called with the reason when a failure is the peer's
        fault."""
        try:
            reason = self._read()
        except PeerError as e:
            reason = str(e)
            blame(reason)
        finally:  # what is under way ends in the arena, never in the caller's memory
            for request in self._flying:
                self._reader.abandon(request.part, request.future)
        failed = Outcome(Read.FAILED, reason)
        return [outcome or failed for outcome in self._outcomes]

    def _read(self) -> str:
        """Return why not all of it was read in time, empty when it was. Raises `PeerError`."""
        left = self._plan()
        chunks = next(left, None)
        while chunks is not None or self._flying:
            while chunks is not None and len(self._flying) < AHEAD:
                part = self._reader.take(0.0 if self._flying else self._deadline)
                if part is None:
                    break
                self._post(chunks, part)
                chunks = next(left, None)
            if not self._flying:
                return "no room to read into in time"
            request = self._flying[0]
            try:
                answer = request.future.result(max(self._deadline - time.monotonic(), 0.0))
            except TimeoutError:
                return self._late(request)
            if answer.status != OK:
                raise NodeUnavailableError(str(answer.body) or LATE_REASON)
            self._absorb(request)
            self._flying.popleft()
            self._reader.give(request.part)
        return ""

    def _post(self, chunks: Sequence[_Chunk], part: Part) -> None:
        """Have the chunks read into `part`. Raises `PeerError`."""
        now = time.monotonic()
        with on_failure(self._reader.give, part):
            stages = self._stages(chunks, part)
            future = self._reader.read(self._endpoint.agent, part, stages, self._deadline)
        self._flying.append(_Request(chunks, part, future, now))

    def _late(self, request: _Request) -> str:
        """Return why a READ that is late failed. Unless the caller gave it less than
        `READ_TIMEOUT_MIN_S`, it is the peer's fault, and the arena is retired, because bytes may
        still come. Then raises `DeadlineError`."""
        if time.monotonic() - request.posted_at < READ_TIMEOUT_MIN_S:
            return LATE_REASON
        self._reader.retire()
        raise DeadlineError(LATE_REASON)

    # --- planning -----------------------------------------------------------

    def _plan(self) -> Iterator[list[_Chunk]]:
        """Yield the chunks that each request reads; large blocks are cut."""
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

    def _stages(self, chunks: Sequence[_Chunk], part: Part) -> list[Stage]:
        """Return the stages of a READ: headers, payload, headers, in this order, so that the last
        ones say whether the payload was the block's all along (rule 4)."""
        endpoint, size_bytes = self._endpoint, self._layout.header_bytes
        before, payload, on_device, after = [], [], [], []
        at, heads = 0, part.start + NIXL_REQUEST_BYTES_MAX
        for chunk in chunks:
            head_at = endpoint.head_at + chunk.head_at
            before.append(_PIECE.pack(head_at, heads, size_bytes))
            after.append(_PIECE.pack(head_at, heads + size_bytes, size_bytes))
            data_at = endpoint.data_at + chunk.data_at
            if self._blocks[chunk.block].vram is not None:
                to = part.number * NIXL_REQUEST_BYTES_MAX + at
                on_device.append(_PIECE.pack(data_at, to, chunk.size_bytes))
            elif chunk.size_bytes:
                payload.append(_PIECE.pack(data_at, part.start + at, chunk.size_bytes))
            heads += 2 * size_bytes
            at += chunk.size_bytes
        device = endpoint.device
        stages = (before, -1, False), (payload, device, False), (on_device, device, True)
        return [
            Stage(b"".join(pieces), where, to_vram)
            for pieces, where, to_vram in (*stages, (after, -1, False))
            if pieces
        ]

    # --- what has come -------------------------------------------------------

    def _absorb(self, request: _Request) -> None:
        """Check what has come and copy it where it is wanted."""
        memory = request.part.memory
        header_bytes = self._layout.header_bytes
        at, heads = 0, NIXL_REQUEST_BYTES_MAX
        come: list[Copy] = []
        numbers: list[int] = []
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
            if block.vram is not None:
                to = block.vram.address + block.came_bytes
                come.append((to, request.part.vram + at - chunk.size_bytes, chunk.size_bytes))
                numbers.append(chunk.block)
                block.came_bytes += chunk.size_bytes
                continue
            if block.seen[2] or block.wanted.location.checksum:
                block.digest.update(payload)
            while payload.nbytes:
                size_bytes = min(payload.nbytes, block.pieces[0].nbytes)
                block.pieces[0][:size_bytes] = payload[:size_bytes]
                advance(block.pieces, size_bytes)
                payload = payload[size_bytes:]
            if not block.pieces:
                self._outcomes[chunk.block] = self._judge(block, block.digest.intdigest())
        if come:
            self._absorb_in_vram(come, numbers)

    def _absorb_in_vram(self, copies: Sequence[Copy], numbers: Sequence[int]) -> None:
        """Have the device copy what has come of the blocks `numbers`, one copy each, and check
        those that are whole: where they lie now."""
        assert self._vram is not None
        whole: list[tuple[int, DeviceRange]] = []
        for number in numbers:
            block = self._blocks[number]
            if block.vram is not None and block.came_bytes == block.vram.size_bytes:
                whole.append((number, block.vram))
        way, arena = self._vram
        try:
            way.bring(arena, copies)
            sums = way.checksums([place for _, place in whole])
        except DeviceError as e:
            way.failed(str(e), arena)
            for number in numbers:
                self._outcomes[number] = Outcome(Read.FAILED, str(e))
            return
        for (number, _), checksum in zip(whole, sums, strict=True):
            outcome = self._judge(self._blocks[number], checksum)
            if outcome.reason == CHECKSUM_REASON:
                way.failed("a block came damaged; whose fault it is is not known", arena)
            self._outcomes[number] = outcome._replace(in_vram=outcome.read is Read.HIT)

    def _matches(self, block: _Block, before: bytes, after: bytes) -> bool:
        """Return whether what came between two looks at the header is the block's (rule 4)."""
        if not block.image:
            seen = self._layout.seen(before, block.wanted.key, block.wanted.location)
            if seen is None:
                return False
            block.image, block.seen = before, seen
        return block.image == before == after

    @staticmethod
    def _judge(block: _Block, digest: int) -> Outcome:
        kind, meta_length, checksum = block.seen
        known = {checksum, block.wanted.location.checksum} - {0}
        if known and known != {digest}:
            return Outcome(Read.MISS, CHECKSUM_REASON)
        return Outcome(Read.HIT, "", kind, meta_length)
