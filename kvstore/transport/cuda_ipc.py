"""Reads from a node in VRAM on this host: opens its memory here, and copies on our own stream.

A copy needs only an address, so a destination may be memory of a device or of the host.
The headers lie in shared memory; each is compared again after the event that says that
the bytes have been copied (rule 4). Who verifies everything compares what has arrived with the
block's checksum, too.

A copy that is queued cannot be taken back. So a read whose deadline passes, that is
interrupted, or whose transport is closed, queues nothing more and ends when what it has
queued is done: at most two windows of `CUDA_IPC_WINDOW_BYTES`, a few milliseconds.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import xxhash

from kvstore.cuda.base import Copy, CudaDevice, CudaEvent, DeviceRange, Stream, address_of, wait
from kvstore.cuda.checksum import DeviceChecksums
from kvstore.errors import DeviceError, InternalError, UsageError
from kvstore.limits import CUDA_IPC_DRAIN_S, CUDA_IPC_WINDOW_BYTES, STREAM_BLOCKS_MAX
from kvstore.nodedir import Announcement
from kvstore.transport.base import Outcome, Read, Wanted
from kvstore.transport.cuda_memory import NAME, DevicePlace, Heads, Opened, OpenMemory
from kvstore.transport.stream.transport import CHECKSUM_REASON
from kvstore.types import Key, Location

WINDOWS = 2
Piece = memoryview | DeviceRange
UNCHECKED_REASON = "it has no checksum, and all is to be verified"
_MISS = Outcome(Read.MISS, "the node does not have it (any more)")


class WantedAnywhere(NamedTuple):
    """One block to read, as `Wanted`, with destinations that may lie on a device."""

    key: Key
    location: Location
    into: Sequence[Piece]


class CudaIpcTransport:
    """Implements `Transport` for nodes that `attach` finds on this host."""

    name = NAME

    def __init__(
        self,
        device: CudaDevice,
        attach: Callable[[Announcement], Heads | None],
        *,
        verifies: bool = False,
        way: str = NAME,
    ) -> None:
        """Make the transport. With `verifies`, only blocks with a checksum are hits, and only with
        the right bytes. `way` is the name under which nodes announce their memory."""
        self.device = device
        self.memory = OpenMemory(device, attach, way)
        self.checksums = DeviceChecksums(device) if verifies else None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stream: Stream | None = None
        self._active: set[_Batch] = set()
        self._hanging: list[_Batch] = []
        """Transfers whose copies may still write; what they use is kept."""
        self._closed = False

    def read(
        self, node: Announcement, wanted: Sequence[Wanted | WantedAnywhere], deadline: float
    ) -> Sequence[Outcome]:
        """See `Transport.read`; it ends later than `deadline` by what is queued on the device then.

        Raises `InternalError` when the device does not carry that out in `CUDA_IPC_DRAIN_S`:
        the destination can neither be used nor given back.
        """
        check_anywhere(wanted)
        try:
            opened = self.memory.use(node, deadline)
        except DeviceError as e:
            return _failed(wanted, str(e))
        if opened is None:
            return _failed(wanted, "the node is not on this host (any more)")
        batch = _Batch(opened, node.epoch, wanted, deadline, self.checksums)
        try:
            return batch.read(self._begun(batch))
        except DeviceError as e:
            return _failed(wanted, str(e))
        finally:
            with self._lock:
                self._active.discard(batch)
                self._changed.notify_all()
                if not batch.ended:
                    self._hanging.append(batch)
            if batch.ended:
                self.memory.done_with(opened)

    def _begun(self, batch: _Batch) -> Stream:
        """Return this transport's own stream, made when it is first needed. Raises `DeviceError`
        once it is closed."""
        with self._lock:
            if self._closed:
                raise DeviceError("this client is closed")
            if self._stream is None:
                self._stream = self.device.stream()
            self._active.add(batch)
            return self._stream

    def close(self) -> None:
        """See `Transport.close`."""
        self.memory.shut()
        with self._lock:
            self._closed = True
            for batch in self._active:
                batch.given_up = "this client is closed"
            if not self._changed.wait_for(lambda: not self._active, CUDA_IPC_DRAIN_S):
                return  # the device hangs: what its copies use stays open and in memory
            if self._stream is not None:
                with contextlib.suppress(DeviceError):
                    if not wait(self._stream.record(), time.monotonic() + CUDA_IPC_DRAIN_S):
                        return
                    self._stream.close()
                self._stream = None
            for batch in self._hanging:
                self.memory.done_with(batch.opened)
            self._hanging.clear()
        if self.checksums is not None:
            self.checksums.close()
        self.memory.close()


def _failed(wanted: Sequence[Wanted | WantedAnywhere], reason: str) -> list[Outcome]:
    return [Outcome(Read.FAILED, reason)] * len(wanted)


class _Window(NamedTuple):
    """Copies in flight together, and the blocks whose bytes they bring."""

    places: list[tuple[int, DevicePlace]]
    """(number of the block, where it was found)"""
    event: CudaEvent


class _Batch:
    """One read, by the thread that called: it queues window after window of copies."""

    def __init__(
        self,
        opened: Opened,
        epoch: int,
        wanted: Sequence[Wanted | WantedAnywhere],
        deadline: float,
        checksums: DeviceChecksums | None,
    ) -> None:
        self.opened = opened
        self._checksums = checksums
        self._epoch = epoch
        self._wanted = wanted
        self._deadline = deadline
        self._outcomes: list[Outcome | None] = [None] * len(wanted)
        self._queued = 0
        """Blocks up to this one have been looked at."""
        self._windows: deque[_Window] = deque()
        self.given_up = ""
        """Why nothing more is queued; any thread may set it."""
        self.ended = True
        """True once nothing is queued that could still write."""

    def read(self, stream: Stream) -> list[Outcome]:
        """See `CudaIpcTransport.read`."""
        self._stream, self.ended = stream, False
        try:
            self._read()
        except DeviceError as e:
            # An event or a stream fails when its context is lost, and all that was queued with it.
            self.given_up = str(e)
        except InternalError:
            raise
        except BaseException:
            self._drain()
            raise
        self.ended = True
        failed = Outcome(Read.FAILED, self.given_up)
        return [outcome or failed for outcome in self._outcomes]

    def _read(self) -> None:
        while True:
            if not self.given_up and time.monotonic() >= self._deadline:
                self.given_up = "timed out"
            while self._queued < len(self._wanted) and len(self._windows) < WINDOWS:
                if self.given_up:
                    break
                self._queue_window()
            if not self._windows:
                return
            _wait(self._windows[0].event, self._deadline)
            self._settle(self._windows.popleft())

    def _drain(self) -> None:
        """Wait for all that is queued, after an interruption that may have come between a copy and
        its event."""
        with contextlib.suppress(DeviceError):
            _wait(self._stream.record(), time.monotonic())
        self.ended = True

    def _queue_window(self) -> None:
        places: list[tuple[int, DevicePlace]] = []
        copies: list[Copy] = []
        room = CUDA_IPC_WINDOW_BYTES
        while self._queued < len(self._wanted):
            one = self._wanted[self._queued]
            if places and one.location.length > room:
                break
            right = one.location.epoch == self._epoch
            place = self.opened.heads.locate(one.key, one.location) if right else None
            if place is None:
                self._outcomes[self._queued] = _MISS
            else:
                room -= one.location.length
                places.append((self._queued, place))
                _add_copies(copies, self.opened.address + place.offset, one.into)
            self._queued += 1
        if not places:
            return
        try:
            self._stream.copy_apart(copies)
        except DeviceError as e:
            self.given_up = str(e)
            places = []  # but some of them may be queued, and are waited for
        self._windows.append(_Window(places, self._stream.record()))

    def _settle(self, window: _Window) -> None:
        heads = self.opened.heads
        # What a node that was killed left behind is swept.
        alive = heads.alive()
        for i, place in window.places:
            same = alive and heads.same(place)
            outcome = Outcome(Read.HIT, "", place.kind, place.meta_length) if same else _MISS
            if same and self._checksums is not None:
                outcome = self._checked(self._wanted[i], place.checksum, outcome, self._checksums)
            self._outcomes[i] = outcome

    @staticmethod
    def _checked(
        one: Wanted | WantedAnywhere, checksum: int, hit: Outcome, checksums: DeviceChecksums
    ) -> Outcome:
        """Return `hit`, if what has arrived has the checksum that header and location name."""
        known = {checksum, one.location.checksum} - {0}
        if not known:
            return Outcome(Read.MISS, UNCHECKED_REASON)
        try:
            arrived = digest_of(one.into, checksums)
        except DeviceError as e:
            return Outcome(Read.FAILED, str(e))
        return hit if known == {arrived} else Outcome(Read.MISS, CHECKSUM_REASON)


def digest_of(pieces: Sequence[Piece], checksums: DeviceChecksums) -> int:
    """Return the xxh3-64 of a payload in `pieces`, all of the host or all of the device. Raises
    `DeviceError`."""
    extents = [(p.address, p.size_bytes) for p in pieces if isinstance(p, DeviceRange)]
    if extents:
        return checksums.of([extents])[0]
    digest = xxhash.xxh3_64()
    for piece in pieces:
        if isinstance(piece, memoryview):
            digest.update(piece)
    return digest.intdigest()


def _wait(event: CudaEvent, deadline: float) -> None:
    """Wait for `event`, for at most `CUDA_IPC_DRAIN_S` beyond the deadline. Raises `InternalError`
    when it is not done by then."""
    if not wait(event, max(deadline, time.monotonic()) + CUDA_IPC_DRAIN_S):
        raise InternalError(f"copies on the device hang for {CUDA_IPC_DRAIN_S} s")


def _add_copies(copies: list[Copy], source: int, into: Sequence[Piece]) -> None:
    """Add the copies of one block; one that goes on where the last one ends, on both sides, is
    made part of it."""
    for piece in into:
        size_bytes = size_of(piece)
        if size_bytes:
            to = piece.address if isinstance(piece, DeviceRange) else address_of(piece)
            last_to, last_source, last_bytes = copies[-1] if copies else (0, 0, 0)
            if (last_to + last_bytes, last_source + last_bytes) == (to, source):
                copies[-1] = (last_to, last_source, last_bytes + size_bytes)
            else:
                copies.append((to, source, size_bytes))
        source += size_bytes


def size_of(piece: Piece) -> int:
    return piece.size_bytes if isinstance(piece, DeviceRange) else piece.nbytes


def check_anywhere(wanted: Sequence[Wanted | WantedAnywhere]) -> None:
    """Do `check_wanted` for pieces that may lie on a device."""
    if len(wanted) > STREAM_BLOCKS_MAX:
        raise UsageError("wanted", len(wanted), f"at most {STREAM_BLOCKS_MAX} blocks a batch")
    for one in wanted:
        size_bytes = sum(map(size_of, one.into))
        readonly = any(isinstance(piece, memoryview) and piece.readonly for piece in one.into)
        if size_bytes != one.location.length or readonly:
            raise UsageError(
                "into", f"{size_bytes} bytes", f"must be {one.location.length} writable bytes"
            )
