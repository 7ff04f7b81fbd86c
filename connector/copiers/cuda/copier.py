"""Copies KV of a device by one kernel launch for a batch of payloads and one DMA for each.

All of it runs beside the engine's streams. What saves and what loads have a lane each: two
streams, one for kernels and one for DMA, and staging buffers that go round between them:

    free -> first stream -> second stream -> free
    gather     the kernel packs the batch into a buffer, then DMAs take it to host memory
    scatter    DMAs bring the batch to a buffer, then the kernel spreads it over engine blocks

A payload that lies in one piece in the engine's memory goes by DMA alone, and so does each layer of
an engine block where the payload has its bytes in the same order.

One stream waits for the other on the device, so a call gives the driver all that it has to do and
waits once, at its end: meanwhile kernels and DMAs of several batches run side by side.

Must never happen:

- a call that returns or raises while something that it started still runs: the engine may
  use the blocks once the copy guard is left, so every call ends by waiting for both streams;
- a buffer that is filled before what was in it is where it belongs, or emptied before it is
  full: `_Turns` has the marks for both;
- rows of the table that are changed before the streams were waited for;
- host memory that is unmapped or unlocked under a DMA: `host_memory` is held for the whole call.

What a device does is behind `Device`, so that a model of one runs the same code
on the host (tests/support/device/host_device.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from connector.copiers.base import Gather, HeadPart, Payload, Ready, Scatter
from connector.copiers.cuda.kernel_plan import (
    PAGE_BYTES,
    CopyPart,
    HostPlace,
    Launch,
    PagedLayout,
    batches,
)
from connector.limits import DEVICE_BATCH_BLOCKS

if TYPE_CHECKING:
    import torch


class HostMemory(Protocol):
    """Describes host memory as a device reaches it, while it is held."""

    def address(self, view: Payload) -> int:
        """Return where the device is to read or write the bytes of `view`."""
        ...

    def apart(self, place: HostPlace) -> Iterable[tuple[int, HostPlace]]:
        """Return what one copy each can take of `place`, and where it is when the rows are
        packed."""
        ...


class StagedCopy(NamedTuple):
    """Describes one copy between staging, where rows are packed, and where a payload is."""

    place: HostPlace
    staged: int
    """Device address of the staging buffer, or of the engine's block itself where nothing is
    staged."""


class DeviceStream(Protocol):
    """Does what it is given, in that order, independently of other streams."""

    def mark(self, number: int) -> object:
        """Return a token for all that was given so far; `number` may be used again, for a later
        one."""
        ...

    def follow(self, mark: object) -> None:
        """Do what is given from now on after what the other stream's `mark` stands for. The
        calling thread does not wait."""
        ...

    def wait(self) -> None:
        """Return when all that was given is done; only this call may raise for it.

        There is no deadline: a DMA cannot be cancelled, and other threads wait for this one only up
        to their own deadlines.
        """
        ...


class DeviceLane(Protocol):
    """Owns staging buffers, and copies through them. One thread at a time may call."""

    buffers: Sequence[int]
    """Device addresses, multiples of `kernel_plan.STAGING_ALIGNMENT_BYTES`."""
    buffer_bytes: int
    """Size of each."""
    table: memoryview
    """Memory for the rows of `Page`s. `launch` reads them at any time before `kernels` was waited
    for."""

    @property
    def kernels(self) -> DeviceStream: ...

    @property
    def copies(self) -> DeviceStream: ...

    def launch(self, launch: Launch, row: int) -> None:
        """Run the kernel over the table from `row` on, in `kernels`."""
        ...

    def store(self, copies: Sequence[StagedCopy]) -> None:
        """Copy from staging, in any order: none of `copies` may touch what another one writes."""
        ...

    def fetch(self, copies: Sequence[StagedCopy]) -> None:
        """Copy to staging, as `store` copies from it."""
        ...


class Device(Protocol):
    """Represents a device as one process uses it. A staging buffer takes one layer of a payload at
    least."""

    saving: DeviceLane
    loading: DeviceLane

    def constant(self, data: bytes) -> int:
        """Return the device address of a copy that stays as long as this object."""
        ...

    def host_memory(self) -> AbstractContextManager[HostMemory]:
        """Hold the host memory during copies: nothing is unmapped or unlocked under them."""
        ...

    def mark_ready(self) -> Ready | None:
        """See `KVCopier.mark_ready`."""
        ...

    def wait_ready(self, token: Ready | None) -> None:
        """See `KVCopier.wait_ready`."""
        ...


class DeviceCopier:
    """Implements `KVCopier`. Used by two threads, one that gathers and one that scatters.

    A call returns when the bytes are where they belong. When it raises, nothing of it runs any
    more either, and what it was to write is undefined.
    """

    batch_blocks = DEVICE_BATCH_BLOCKS

    def __init__(
        self, layout: PagedLayout, device: Device, keep: Sequence[torch.Tensor] = ()
    ) -> None:
        """`keep` is kept alive: what the layout's addresses point into."""
        self._layout = layout
        self._device = device
        self._keep = keep
        self._layer_table = device.constant(layout.layer_table())

    def gather_many(self, items: Sequence[Gather], layer: int | None = None) -> None:
        lane = self._device.saving
        with self._device.host_memory() as host, _Turns(lane) as turns:
            places = [(item, host.address(item.out)) for item in items]
            if self._layout.goes_direct(layer):
                (layers,) = self._layout.layer_runs(layer, self._layout.payload_bytes)
                whole = [self._layout.gathered(*place, layers) for place in places]
                lane.store(list(self._direct(host, whole, layers)))
                return
            for layers in self._layout.layer_runs(layer, lane.buffer_bytes):
                pieces = [self._layout.gathered(*place, layers) for place in places]
                for turn in turns.of(pieces, self._layout.pages_per_block):
                    turn.begin(lane.kernels)
                    self._launch(lane, turn, layers, scatter=False)
                    turn.go_on(lane.copies)
                    lane.store(list(_copies(host, turn)))
                    turn.end()

    def scatter_many(self, items: Sequence[Scatter], layer: int | None = None) -> None:
        lane = self._device.loading
        with self._device.host_memory() as host, _Turns(lane) as turns:
            places = [(i, host.address(i.payload)) for i in items]
            if self._layout.goes_direct(layer):
                (layers,) = self._layout.layer_runs(layer, self._layout.payload_bytes)
                # Workers name the heads of every load, also where it takes all of them.
                every = (None, HeadPart(self._layout.heads, 0, 0, self._layout.heads))
                whole = [
                    self._layout.scattered(*place, layers)
                    for place in places
                    if place[0].part in every
                ]
                lane.fetch(list(self._direct(host, whole, layers)))
                places = [place for place in places if place[0].part not in every]
            for layers in self._layout.layer_runs(layer, lane.buffer_bytes):
                checked = [self._layout.scattered(*place, layers) for place in places]
                pieces = [piece for piece in checked if piece.block_ids]
                for turn in turns.of(pieces, self._layout.pages_per_block):
                    turn.begin(lane.copies)
                    lane.fetch(list(_copies(host, turn)))
                    turn.go_on(lane.kernels)
                    self._launch(lane, turn, layers, scatter=True)
                    turn.end()

    def _direct(
        self, host: HostMemory, pieces: Iterable[CopyPart], layers: range
    ) -> Iterator[StagedCopy]:
        """Yield the copies between payloads and the engine's own memory."""
        for piece in pieces:
            for whole, there in self._layout.direct(piece, layers):
                for packed, place in host.apart(whole):
                    yield StagedCopy(place, there + packed)

    def _launch(self, lane: DeviceLane, turn: _Turn, layers: range, *, scatter: bool) -> None:
        launch = self._layout.launch(
            scatter=scatter,
            layer_table=self._layer_table,
            layers=layers,
            pages=self._layout.write_pages(lane.table[turn.row * PAGE_BYTES :], turn.staged),
            heads=max(piece.heads for _, piece in turn.staged),
        )
        lane.launch(launch, turn.row)

    def mark_ready(self) -> Ready | None:
        return self._device.mark_ready()

    def wait_ready(self, token: Ready | None) -> None:
        self._device.wait_ready(token)


class _Turn:
    """Moves one batch in one staging buffer: a stream fills it, then another one empties it."""

    def __init__(
        self, turns: _Turns, number: int, staged: Sequence[tuple[int, CopyPart]], row: int
    ) -> None:
        self._turns = turns
        self._number = number
        self.staged = staged
        """Position of each piece in the buffer."""
        self.row = row
        """The first row of the table for this batch."""
        self._stream: DeviceStream | None = None

    def begin(self, stream: DeviceStream) -> None:
        """Have `stream` fill the buffer, once its former content has been copied out."""
        self._stream = stream
        emptied = self._turns.emptied[self._number]
        if emptied is not None:
            stream.follow(emptied)

    def go_on(self, stream: DeviceStream) -> None:
        """Have `stream` empty the buffer, once it is full."""
        assert self._stream is not None
        stream.follow(self._stream.mark(self._number))
        self._stream = stream

    def end(self) -> None:
        assert self._stream is not None
        self._turns.emptied[self._number] = self._stream.mark(self._number)


class _Turns:
    """Gives out a lane's staging buffers during one call, one after the other, and rows of its
    table.

    As a context it ends by waiting for both streams, whatever is raised in it.
    """

    def __init__(self, lane: DeviceLane) -> None:
        self._lane = lane
        self.emptied: list[object] = [None] * len(lane.buffers)
        """The mark after which each buffer may be filled again; None: it is empty."""
        self._next = 0
        self._row = 0
        self._rows = len(lane.table) // PAGE_BYTES

    def __enter__(self) -> _Turns:
        return self

    def of(self, pieces: Sequence[CopyPart], pages_per_block: int) -> Iterator[_Turn]:
        for batch in batches(pieces, pages_per_block, self._lane.buffer_bytes, self._rows):
            rows = sum(len(piece.block_ids) for _, piece in batch) * pages_per_block
            if self._row + rows > self._rows:
                self._wait()
                self._row = 0
            number, start = self._next, self._lane.buffers[self._next]
            staged = [(start + offset, piece) for offset, piece in batch]
            yield _Turn(self, number, staged, self._row)
            self._next = (number + 1) % len(self._lane.buffers)
            self._row += rows

    def _wait(self) -> None:
        """Wait for copies and kernels, for the one also when the other raises."""
        try:
            self._lane.copies.wait()
        finally:
            self._lane.kernels.wait()

    def __exit__(self, *_: object) -> None:
        self._wait()


def _copies(host: HostMemory, turn: _Turn) -> Iterator[StagedCopy]:
    for staged, piece in turn.staged:
        for packed, place in host.apart(piece.host):
            yield StagedCopy(place, staged + packed)
