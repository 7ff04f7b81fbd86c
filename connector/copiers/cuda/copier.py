"""Copies KV of a device by one kernel launch for a batch of payloads and one DMA for each.

All of it runs on streams of its own, beside the engine's. A queue is a stream with a staging
buffer and a table, and goes round:

    free -> started -> free, by `wait`
    gather     the kernel packs the batch into staging, then DMAs take it to host memory
    scatter    DMAs bring the batch to staging, then the kernel spreads it over engine blocks

The thread that saves uses the queues `saving` alone, the one that loads `loading`; two of each
take turns, so that one's kernel runs beside the other's DMA.

Must never happen:

- a call that returns or raises while something that it started still runs: the engine may
  use the blocks once the copy guard is left, so every call ends by waiting for both queues;
- a staging buffer or table that is changed before `wait`;
- host memory that is unmapped or unlocked under a DMA: `host_memory` is held for the whole call.

What a device does is behind `Device`, so that a model of one runs the same code
on the host (tests/support/host_device.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import cycle
from typing import Any, Protocol

from connector.copiers.base import Gather, Payload, Scatter
from connector.copiers.cuda.kernel_plan import (
    PAGE_BYTES,
    CopyPart,
    HostPlace,
    Launch,
    PagedLayout,
    batches,
)
from connector.limits import DEVICE_BATCH_BLOCKS


class HostMemory(Protocol):
    """Host memory as a device reaches it, while it is held."""

    def address(self, view: Payload) -> int:
        """Where the device is to read or write the bytes of `view`."""
        ...

    def apart(self, place: HostPlace) -> Iterable[tuple[int, HostPlace]]:
        """What one copy each can take of `place`, and where it is when the rows are packed."""
        ...


class DeviceQueue(Protocol):
    """A staging buffer, and copies through it. One thread at a time may call.

    All but `wait` return at once. What they start is done in their order, beside what other
    queues do.
    """

    staging: int
    """Device address, a multiple of `kernel_plan.STAGING_ALIGNMENT_BYTES`."""
    staging_bytes: int
    table: memoryview
    """For the rows of `Page`s. Read by what `launch` starts, so not to be changed before `wait`."""

    def launch(self, launch: Launch) -> None:
        """Run the kernel over the table."""
        ...

    def store(self, target: HostPlace, source: int) -> None:
        """Packed bytes at a device address into host memory."""
        ...

    def fetch(self, target: int, source: HostPlace) -> None:
        """Host memory to a device address, packed."""
        ...

    def wait(self) -> None:
        """Return when all that was started is done; the only call that may raise for it.

        No deadline: a DMA cannot be called back, and nobody else waits for this
        thread for longer than a deadline of its own.
        """
        ...


class Device(Protocol):
    """A device as one process uses it. Its queues take the largest payload of all groups."""

    saving: Sequence[DeviceQueue]
    loading: Sequence[DeviceQueue]
    """Two queues each: the kernel of one runs beside the DMA of the other."""

    def constant(self, data: bytes) -> int:
        """Device address of a copy that stays as long as this object."""
        ...

    def host_memory(self) -> AbstractContextManager[HostMemory]:
        """Hold the host memory during copies: nothing is unmapped or unlocked under them."""
        ...

    def mark_ready(self) -> Any:
        """See `KVCopier.mark_ready`."""
        ...

    def wait_ready(self, token: Any) -> None:
        """See `KVCopier.wait_ready`."""
        ...


class DeviceCopier:
    """Implements `KVCopier`. Used by two threads, one that gathers and one that scatters.

    A call returns when the bytes are where they belong. When it raises, nothing of it runs any
    more either, and what it was to write is undefined.
    """

    batch_blocks = DEVICE_BATCH_BLOCKS

    def __init__(self, layout: PagedLayout, device: Device, keep: Sequence[Any] = ()) -> None:
        """`keep` is kept alive: what the layout's addresses point into."""
        self._layout = layout
        self._device = device
        self._keep = keep
        self._layer_table = device.constant(layout.layer_table())

    def gather_many(self, items: Sequence[Gather], layer: int | None = None) -> None:
        def start(queue: DeviceQueue, batch: Sequence[tuple[int, CopyPart]]) -> None:
            self._launch(queue, batch, layer, scatter=False)
            for offset, piece in batch:
                for packed, place in host.apart(piece.host):
                    queue.store(place, queue.staging + offset + packed)

        with self._device.host_memory() as host:
            pieces = [self._layout.gathered(i, host.address(i.out), layer) for i in items]
            self._run(self._device.saving, pieces, start)

    def scatter_many(self, items: Sequence[Scatter], layer: int | None = None) -> None:
        def start(queue: DeviceQueue, batch: Sequence[tuple[int, CopyPart]]) -> None:
            for offset, piece in batch:
                for packed, place in host.apart(piece.host):
                    queue.fetch(queue.staging + offset + packed, place)
            self._launch(queue, batch, layer, scatter=True)

        with self._device.host_memory() as host:
            pieces = [self._layout.scattered(i, host.address(i.payload), layer) for i in items]
            self._run(self._device.loading, [p for p in pieces if p.block_ids], start)

    def _launch(
        self,
        queue: DeviceQueue,
        batch: Sequence[tuple[int, CopyPart]],
        layer: int | None,
        *,
        scatter: bool,
    ) -> None:
        staged = [(queue.staging + offset, piece) for offset, piece in batch]
        queue.launch(
            self._layout.launch(
                scatter=scatter,
                layer_table=self._layer_table,
                layer=layer,
                pages=self._layout.write_pages(queue.table, staged),
                heads=max(piece.heads for _, piece in batch),
            )
        )

    def _run(
        self,
        queues: Sequence[DeviceQueue],
        pieces: Sequence[CopyPart],
        start: Callable[[DeviceQueue, Sequence[tuple[int, CopyPart]]], None],
    ) -> None:
        room_bytes = min(queue.staging_bytes for queue in queues)
        pages_max = min(len(queue.table) for queue in queues) // PAGE_BYTES
        turns = cycle(queues)
        try:
            for batch in batches(pieces, self._layout.pages_per_block, room_bytes, pages_max):
                queue = next(turns)
                queue.wait()  # its staging and its table are in use until then
                start(queue, batch)
        finally:
            _wait_all(queues)

    def mark_ready(self) -> Any:
        return self._device.mark_ready()

    def wait_ready(self, token: Any) -> None:
        self._device.wait_ready(token)


def _wait_all(queues: Sequence[DeviceQueue]) -> None:
    """Wait for each, also when an earlier one raises."""
    try:
        queues[0].wait()
    finally:
        if queues[1:]:
            _wait_all(queues[1:])
