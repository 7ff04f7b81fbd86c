"""Reading from a node in VRAM on this host: its memory opened here, copies on our own stream.

A copy needs only an address, so a destination may be memory of a device or of the host.
The headers lie in shared memory; each is compared again after the event that says that
the bytes have been copied (rule 4).

A copy that is queued cannot be taken back. So a transfer whose deadline passes, or that is
cancelled, queues nothing more and ends when what it has queued is done: at most two
windows of `CUDA_IPC_WINDOW_BYTES`, a few milliseconds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.cuda.base import Copy, CudaDevice, DeviceRange, Event, Stream, address_of, wait
from kvstore.errors import DeviceError, InternalError, UsageError
from kvstore.limits import CUDA_IPC_DRAIN_S, CUDA_IPC_WINDOW_BYTES, STREAM_BLOCKS_MAX
from kvstore.nodedir import Announcement
from kvstore.transport.base import Outcome, Read, Wanted
from kvstore.transport.cuda_memory import NAME, DevicePlace, Heads, Opened, OpenMemory
from kvstore.types import Key, Location

WINDOWS = 2
LOOK_S = 0.01
"""How often a wait looks whether it was cancelled."""
Piece = memoryview | DeviceRange
_MISS = Outcome(Read.MISS, "the node does not have it (any more)")


class WantedAnywhere(NamedTuple):
    """`Wanted` with pieces that may lie on a device."""

    key: Key
    location: Location
    into: Sequence[Piece]


class CudaIpcTransport:
    """Implements `Transport` for nodes that `attach` finds on this host."""

    name = NAME

    def __init__(self, device: CudaDevice, attach: Callable[[Announcement], Heads | None]) -> None:
        self.device = device
        self.memory = OpenMemory(device, attach)
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._active: set[CudaIpcTransfer] = set()

    def submit(
        self, node: Announcement, wanted: Sequence[Wanted | WantedAnywhere], deadline: float
    ) -> CudaIpcTransfer:
        """See `Transport.submit`."""
        check_anywhere(wanted)
        transfer = CudaIpcTransfer(self, wanted, deadline)
        try:
            opened = self.memory.use(node)
            stream = None if opened is None else self.stream()
        except DeviceError as e:
            transfer.end(str(e))
            return transfer
        if opened is None or stream is None:
            transfer.end("the node is not on this host (any more)")
            return transfer
        with self._lock:
            self._active.add(transfer)
        transfer.start(opened, stream, node.epoch)
        return transfer

    def stream(self) -> Stream:
        """Our own; made when it is first needed. Raises `DeviceError`."""
        with self._lock:
            if self._stream is None:
                self._stream = self.device.stream()
            return self._stream

    def ended(self, transfer: CudaIpcTransfer, opened: Opened) -> None:
        with self._lock:
            self._active.discard(transfer)
        self.memory.done_with(opened)

    def close(self) -> None:
        """See `Transport.close`."""
        self.memory.shut()
        with self._lock:
            active = list(self._active)
        for transfer in active:
            try:
                transfer.cancel()
            except InternalError:
                return  # the device hangs: what its copies use stays open and in memory
        self.memory.close()
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


class _Window(NamedTuple):
    """Copies that are under way, and the blocks that they are of."""

    places: list[tuple[int, DevicePlace]]
    """(number of the block, where it was found)"""
    event: Event


class CudaIpcTransfer:
    """Implements `Transfer`. Queues window after window; whoever polls or waits moves it on."""

    def __init__(
        self,
        transport: CudaIpcTransport,
        wanted: Sequence[Wanted | WantedAnywhere],
        deadline: float,
    ) -> None:
        self._transport = transport
        self._wanted = wanted
        """Kept as long as copies into it are queued."""
        self._deadline = deadline
        self._lock = threading.Lock()
        self._outcomes: list[Outcome | None] = [None] * len(wanted)
        self._queued = 0
        """Blocks up to this one have been looked at."""
        self._windows: deque[_Window] = deque()
        self._given_up = ""
        self._opened: Opened | None = None

    def start(self, opened: Opened, stream: Stream, epoch: int) -> None:
        with self._lock:
            self._opened, self._stream, self._epoch = opened, stream, epoch
            self._advance()

    def poll(self) -> bool:
        """See `Transfer.poll`."""
        if self._opened is not None and self._lock.acquire(blocking=False):
            try:
                self._advance()
            finally:
                self._lock.release()
        return self._opened is None

    def wait(self) -> Sequence[Outcome]:
        """See `Transfer.wait`; it ends after its deadline by what is queued then.

        Raises `InternalError` when the device does not carry that out in `CUDA_IPC_DRAIN_S`:
        the destination can neither be used nor given back.
        """
        give_up_at = max(self._deadline, time.monotonic()) + CUDA_IPC_DRAIN_S
        while not self.poll():
            with self._lock:
                if not self._windows:
                    continue
                event, now = self._windows[0].event, time.monotonic()
                if not self._done_before(event, now + LOOK_S) and now > give_up_at:
                    raise InternalError(f"copies on the device hang for {CUDA_IPC_DRAIN_S} s")
        return self._all()

    def cancel(self) -> None:
        """See `Transfer.cancel`; raises like `wait`."""
        self._given_up = "cancelled"
        with self._lock:
            give_up_at = time.monotonic() + CUDA_IPC_DRAIN_S
            while self._opened is not None:
                self._advance()
                if self._windows and not self._done_before(self._windows[0].event, give_up_at):
                    raise InternalError(f"copies on the device hang for {CUDA_IPC_DRAIN_S} s")

    def _done_before(self, event: Event, deadline: float) -> bool:
        try:
            return wait(event, deadline)
        except DeviceError as e:
            self._lost(e)
            return True

    def end(self, reason: str) -> None:
        """Nothing is under way any more; what has no outcome yet has FAILED."""
        failed = Outcome(Read.FAILED, reason)
        self._outcomes = [outcome or failed for outcome in self._outcomes]
        self._windows.clear()
        opened, self._opened = self._opened, None
        if opened is not None:
            self._transport.ended(self, opened)

    def _all(self) -> Sequence[Outcome]:
        return [outcome for outcome in self._outcomes if outcome is not None]

    # --- under the lock ---------------------------------------------------------

    def _advance(self) -> None:
        """Settle what is done, queue what there is room for, end when nothing is left."""
        if self._opened is not None:
            try:
                self._step()
            except DeviceError as e:
                self._lost(e)

    def _lost(self, error: DeviceError) -> None:
        """An event or a stream fails when its context is lost, and all that was queued with it."""
        self.end(str(error))

    def _step(self) -> None:
        while self._windows and self._windows[0].event.done():
            self._settle(self._windows.popleft())
        if not self._given_up and time.monotonic() >= self._deadline:
            self._given_up = "too late"
        while (
            not self._given_up and self._queued < len(self._wanted) and len(self._windows) < WINDOWS
        ):
            self._queue_window()
        if not self._windows and (self._given_up or self._queued == len(self._wanted)):
            self.end(self._given_up)

    def _queue_window(self) -> None:
        assert self._opened is not None
        places: list[tuple[int, DevicePlace]] = []
        copies: list[Copy] = []
        room = CUDA_IPC_WINDOW_BYTES
        while self._queued < len(self._wanted):
            one = self._wanted[self._queued]
            if places and one.location.length > room:
                break
            right = one.location.epoch == self._epoch
            place = self._opened.heads.locate(one.key, one.location) if right else None
            if place is None:
                self._outcomes[self._queued] = _MISS
            else:
                room -= one.location.length
                places.append((self._queued, place))
                _add_copies(copies, self._opened.address + place.offset, one.into)
            self._queued += 1
        if not places:
            return
        try:
            self._stream.copy(copies)
        except DeviceError as e:
            self._given_up = str(e)
            places = []  # but some of them may be queued, and are waited for
        self._windows.append(_Window(places, self._stream.record()))

    def _settle(self, window: _Window) -> None:
        assert self._opened is not None
        heads = self._opened.heads
        # The headers outlive a node that is killed, its memory need not.
        alive = heads.alive()
        for i, place in window.places:
            if self._given_up == "cancelled":
                self._outcomes[i] = Outcome(Read.FAILED, self._given_up)
            elif alive and heads.same(place):
                self._outcomes[i] = Outcome(Read.HIT, "", place.kind, place.meta_length)
            else:
                self._outcomes[i] = _MISS


def _add_copies(copies: list[Copy], source: int, into: Sequence[Piece]) -> None:
    """Those of one block; what follows the last one on both sides is made part of it."""
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
    """`check_wanted` for pieces that may lie on a device."""
    if len(wanted) > STREAM_BLOCKS_MAX:
        raise UsageError("wanted", len(wanted), f"at most {STREAM_BLOCKS_MAX} blocks a batch")
    for one in wanted:
        size_bytes = sum(map(size_of, one.into))
        readonly = any(isinstance(piece, memoryview) and piece.readonly for piece in one.into)
        if size_bytes != one.location.length or readonly:
            raise UsageError(
                "into", f"{size_bytes} bytes", f"must be {one.location.length} writable bytes"
            )
