"""A GPU as an engine and our copier use it: late streams, and kernels that run in their turn.

Memory, streams and events are those of `kvstore.testing.cuda.ModelCuda`, whose threads carry
everything out some time after it was queued. The copier's kernel is its own source, compiled
for the host. So whoever does not wait for an event, or gives memory away too early, reads or
leaves behind wrong bytes.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from host_device import kernels, run_kernel

from connector.copiers.base import KVMemory
from connector.copiers.cuda.copier import DeviceCopier, StagedCopy
from connector.copiers.cuda.kernel_plan import (
    PAGE_BYTES,
    STAGING_ALIGNMENT_BYTES,
    HostPlace,
    Launch,
    layout_of,
)
from connector.copiers.cuda.page_lock import address_of
from kvstore.cuda.base import CudaEvent, wait
from kvstore.testing.cuda import ModelCuda

PATIENCE_S = 60.0
STAGING_BYTES = 1 << 16
BUFFERS = 3
PAGES_MAX = 1 << 10


def reached(event: CudaEvent) -> None:
    """Return when `event` has come, as `cuEventSynchronize` does."""
    assert wait(event, time.monotonic() + PATIENCE_S), "the model of a device stands still"


class GpuStream:
    """Implements `DeviceStream`."""

    def __init__(self, cuda: ModelCuda) -> None:
        self.stream = cuda.stream()

    def mark(self, number: int) -> CudaEvent:
        return self.stream.record()

    def follow(self, mark: CudaEvent) -> None:
        self.stream.launch(lambda: reached(mark))

    def wait(self) -> None:
        reached(self.stream.record())


class GpuLane:
    """Implements `DeviceLane`."""

    def __init__(self, cuda: ModelCuda, buffer_bytes: int, pages_max: int) -> None:
        aligned = STAGING_ALIGNMENT_BYTES
        self.buffer_bytes = -(-buffer_bytes // aligned) * aligned
        self._room = cuda.allocate(BUFFERS * self.buffer_bytes + aligned)
        first = -(-self._room // aligned) * aligned
        self.buffers = [first + i * self.buffer_bytes for i in range(BUFFERS)]
        self.table = memoryview(bytearray(pages_max * PAGE_BYTES))
        self._cuda = cuda
        self.kernels, self.copies = GpuStream(cuda), GpuStream(cuda)

    def launch(self, launch: Launch, row: int) -> None:
        rows = self.table[row * PAGE_BYTES :]
        self.kernels.stream.launch(lambda: run_kernel(launch, rows))

    def store(self, copies: Sequence[StagedCopy]) -> None:
        assert all(place.rows == 1 for place, _ in copies)
        self.copies.stream.copy([(p.address, staged, p.row_bytes) for p, staged in copies])

    def fetch(self, copies: Sequence[StagedCopy]) -> None:
        self.copies.stream.copy(
            [
                (staged + row * p.row_bytes, p.address + row * p.pitch_bytes, p.row_bytes)
                for p, staged in copies
                for row in range(p.rows)
            ]
        )

    def close(self) -> None:
        self.kernels.stream.close()
        self.copies.stream.close()
        self._cuda.free(self._room)


class ModelGpu:
    """Implements `Device`, and gives an engine its memory and its stream."""

    def __init__(self, cuda: ModelCuda) -> None:
        kernels()  # here, so that nothing waits for the compiler later
        self.cuda = cuda
        self.compute = cuda.stream()
        """The engine's stream: forwards and what else it launches."""
        self._lanes: list[GpuLane] = []
        self._memory: list[int] = []

    def bytes(self, size_bytes: int) -> Any:
        """Make memory of the device, a numpy array; a host may look, as no real one may."""
        address = self.cuda.allocate(size_bytes)
        self._memory.append(address)
        return np.frombuffer((ctypes.c_uint8 * size_bytes).from_address(address), np.uint8)

    def memory(
        self,
        groups: Sequence[tuple[Any, Any, int]],
        mappings: Callable[[], Any],
        count: Any,
        page_lock_bytes_max: int,
    ) -> KVMemory:
        """Stand in the place of `connector.copiers.cuda.start.device_memory`."""
        layouts = [layout_of(*group) for group in groups]
        staging = max(STAGING_BYTES, *(layout.layer_bytes for layout in layouts))
        pages = max(PAGES_MAX, *(layout.pages_per_payload for layout in layouts))
        self._lanes = [GpuLane(self.cuda, staging, pages) for _ in range(2)]
        copiers = [
            DeviceCopier(layout, self, keep=layers)
            for layout, (layers, _, _) in zip(layouts, groups, strict=True)
        ]
        return KVMemory(list(copiers), lambda: None)

    # `Device`

    @property
    def saving(self) -> GpuLane:
        return self._lanes[0]

    @property
    def loading(self) -> GpuLane:
        return self._lanes[1]

    def constant(self, data: bytes) -> int:
        copy = self.bytes(len(data))
        copy[:] = np.frombuffer(data, np.uint8)
        return int(copy.ctypes.data)

    @contextmanager
    def host_memory(self) -> Iterator[ModelGpu]:
        yield self

    def address(self, view: Any) -> int:
        return address_of(view)

    def apart(self, place: HostPlace) -> Iterator[tuple[int, HostPlace]]:
        yield 0, place

    def mark_ready(self) -> CudaEvent:
        return self.compute.record()

    def wait_ready(self, token: CudaEvent | None) -> None:
        if token is not None:
            reached(token)

    def close(self) -> None:
        """End the device after its engine; nothing may use its memory any more."""
        self.compute.close()
        for lane in self._lanes:
            lane.close()
        for address in self._memory:
            self.cuda.free(address)
