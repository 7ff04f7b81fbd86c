"""Implements `Device` over CUDA: torch for memory, `kvstore.cuda` for streams, kernel and DMA.

torch and cuda.bindings are imported when a device's tensors are registered.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from types import ModuleType
from typing import TYPE_CHECKING

from connector.copiers.base import Ready
from connector.copiers.cuda.copier import DeviceLane, HostMemory, StagedCopy
from connector.copiers.cuda.kernel_plan import (
    KERNELS,
    PAGE_BYTES,
    STAGING_ALIGNMENT_BYTES,
    THREADS,
    Launch,
)
from connector.copiers.cuda.nvrtc import NoKernelError, compiled
from connector.copiers.cuda.page_lock import LockedPool
from connector.limits import DEVICE_STAGING_BUFFERS
from kvstore.spi import DeviceError, cuda_device

if TYPE_CHECKING:
    import torch


class _Shape(ctypes.Structure):
    """Mirrors `Shape` of paged_copy.cu, in the order of `Launch.shape`."""

    _fields_ = [(f"field{i}", ctypes.c_uint32) for i in range(6)]


class Cuda:
    """Owns one device's context, with the kernel loaded, for any thread."""

    def __init__(self, device: torch.device) -> None:
        """`device` is a `torch.device`. Raises `NoKernelError` when it cannot run the kernel."""
        import torch

        code = compiled(torch.cuda.get_device_capability(device))
        self.torch, self.device = torch, device
        torch.empty(1, device=device)  # starts CUDA
        self._opened = cuda_device(device.index)
        self.driver, self.call = self._opened.driver, self._opened.call
        self.scope, self.enter = self._opened.current, self._opened.enter
        self.low_priority = self._opened.low_priority
        try:
            self.kernels = self._loaded(code)
        except DeviceError as e:
            raise NoKernelError(f"the driver does not load the kernel: {e}") from e

    def _loaded(self, code: bytes) -> dict[str, object]:
        """Return all kernels: the driver loads one when it is first asked for it, and may wait for
        all that runs on the device then."""
        get = self.driver.cuModuleGetFunction
        with self.scope():
            module = self.call(self.driver.cuModuleLoadData, code)
            return {name: self.call(get, module, name.encode()) for name in KERNELS}

    def copy(
        self,
        copies: Sequence[tuple[int, int, int]],
        stream: CudaStream,
        *,
        complete: bool = False,
    ) -> None:
        """Queue copies (to, from, bytes), to be carried out in any order; `complete` says that
        nothing writes to their sources any more."""
        self._opened.copy_many(copies, stream.handle, complete=complete)

    # `page_lock.Registrar`

    def lock(self, address: int, size_bytes: int, writable: bool) -> str:
        """Page-lock a range of this process's memory. Return why that failed, else an empty
        text."""
        try:
            self._opened.register_host(address, size_bytes, read_only=not writable)
        except DeviceError as e:
            return str(e).rpartition("CUDA_ERROR_")[2].lower()
        return ""

    def unlock(self, address: int) -> None:
        with suppress(DeviceError):
            self._opened.unregister_host(address)


class CudaStream:
    """Implements `DeviceStream`. It stays as long as the process."""

    def __init__(self, cuda: Cuda) -> None:
        driver = cuda.driver
        self._cuda = cuda
        # Not one of torch's streams: it hands out 32 in turn, and this could be the engine's
        # too, even while it captures a graph there. Of the highest priority by default: the few
        # blocks of our kernel do not stand in line behind the many of a forward while the bus has
        # nothing.
        with cuda.scope():
            error, lowest, highest = driver.cuCtxGetStreamPriorityRange()
            if int(error) != 0:
                cuda.call.fail("cuCtxGetStreamPriorityRange", error)
            flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            priority = lowest if cuda.low_priority else highest
            self.handle = cuda.call(driver.cuStreamCreateWithPriority, flags, priority)
            # Blocking: a thread that waits for a millisecond must not spin, it would hold a core.
            self._done = self._event(int(driver.CUevent_flags.CU_EVENT_BLOCKING_SYNC))
        self._marks: dict[int, object] = {}
        self._busy = False

    def _event(self, flags: int = 0) -> object:
        without_times = int(self._cuda.driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        return self._cuda.call(self._cuda.driver.cuEventCreate, flags | without_times)

    def begin(self) -> tuple[Cuda, ModuleType]:
        """Prepare this thread; called before every call that gives the stream something to do."""
        self._cuda.enter()
        self._busy = True
        return self._cuda, self._cuda.driver

    def mark(self, number: int) -> object:
        cuda, driver = self.begin()
        if number not in self._marks:
            self._marks[number] = self._event()
        cuda.call(driver.cuEventRecord, self._marks[number], self.handle)
        return self._marks[number]

    def follow(self, mark: object) -> None:
        cuda, driver = self.begin()
        cuda.call(driver.cuStreamWaitEvent, self.handle, mark, 0)

    def wait(self) -> None:
        if self._busy:
            cuda, driver = self.begin()
            cuda.call(driver.cuEventRecord, self._done, self.handle)
            cuda.call(driver.cuEventSynchronize, self._done)
            self._busy = False


class CudaLane:
    """Implements `DeviceLane`."""

    def __init__(self, cuda: Cuda, buffers: int, buffer_bytes: int, pages_max: int) -> None:
        torch, aligned = cuda.torch, STAGING_ALIGNMENT_BYTES
        self._cuda = cuda
        self.buffer_bytes = -(-buffer_bytes // aligned) * aligned
        room = torch.empty(
            buffers * self.buffer_bytes + aligned, dtype=torch.uint8, device=cuda.device
        )
        self._room = room
        first = -(-room.data_ptr() // aligned) * aligned
        self.buffers: Sequence[int] = [first + i * self.buffer_bytes for i in range(buffers)]
        rows = pages_max * PAGE_BYTES
        self._host_table = torch.empty(rows, dtype=torch.uint8, pin_memory=True)
        self._table = torch.empty(rows, dtype=torch.uint8, device=cuda.device)
        self.table = memoryview(self._host_table.numpy()).cast("B")
        self.kernels, self.copies = CudaStream(cuda), CudaStream(cuda)
        # What was allocated may still be in use by what ran in that memory before.
        torch.cuda.current_stream(cuda.device).synchronize()

    def launch(self, launch: Launch, row: int) -> None:
        cuda, driver = self.kernels.begin()
        at = row * PAGE_BYTES
        cuda.call(
            driver.cuMemcpyHtoDAsync,
            self._table.data_ptr() + at,
            self._host_table.data_ptr() + at,
            launch.pages * PAGE_BYTES,
            self.kernels.handle,
        )
        layers = ctypes.c_uint64(launch.layer_table)
        pages = ctypes.c_uint64(self._table.data_ptr() + at)
        shape = _Shape(*launch.shape)
        arguments = (ctypes.c_void_p * 3)(*map(ctypes.addressof, (layers, pages, shape)))
        cuda.call(
            driver.cuLaunchKernel,
            cuda.kernels[launch.kernel],
            *(launch.blocks, 1, 1),
            *(THREADS, 1, 1),
            0,
            self.kernels.handle,
            ctypes.addressof(arguments),  # read before the call returns
            0,
        )

    def store(self, copies: Sequence[StagedCopy]) -> None:
        assert all(place.rows == 1 for place, _ in copies), "a payload is stored whole, or a layer"
        self.copies.begin()
        self._cuda.copy([(p.address, staged, p.row_bytes) for p, staged in copies], self.copies)

    def fetch(self, copies: Sequence[StagedCopy]) -> None:
        cuda, driver = self.copies.begin()
        whole = [(staged, p.address, p.row_bytes) for p, staged in copies if p.rows == 1]
        # What is loaded was sealed before: unlike a staging buffer, no kernel fills it.
        cuda.copy(whole, self.copies, complete=True)
        for place, staged in copies:
            if place.rows == 1:
                continue
            copy = driver.CUDA_MEMCPY2D()
            if place.on_device:
                copy.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
                copy.srcDevice, copy.srcPitch = place.address, place.pitch_bytes
            else:
                copy.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_HOST
                copy.srcHost, copy.srcPitch = place.address, place.pitch_bytes
            copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
            copy.dstDevice, copy.dstPitch = staged, place.row_bytes
            copy.WidthInBytes, copy.Height = place.row_bytes, place.rows
            cuda.call(driver.cuMemcpy2DAsync, copy, self.copies.handle)


class QueuedDevice:
    """Implements `Device` on a CUDA device: copies are queued on a lane for saves and one for
    loads."""

    def __init__(
        self,
        cuda: Cuda,
        buffer_bytes: int,
        pages_max: int,
        pool: LockedPool,
        *,
        buffers: int = DEVICE_STAGING_BUFFERS,
    ) -> None:
        """Give each lane `buffers` buffers of `buffer_bytes`."""
        self._cuda = cuda
        self._pool = pool
        self.saving: DeviceLane = CudaLane(cuda, buffers, buffer_bytes, pages_max)
        self.loading: DeviceLane = CudaLane(cuda, buffers, buffer_bytes, pages_max)
        self._constants: list[torch.Tensor] = []

    def constant(self, data: bytes) -> int:
        torch = self._cuda.torch
        copy = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._cuda.device)
        torch.cuda.current_stream(self._cuda.device).synchronize()
        self._constants.append(copy)
        return int(copy.data_ptr())

    def host_memory(self) -> AbstractContextManager[HostMemory]:
        return self._pool.held()

    def mark_ready(self) -> torch.cuda.Event:
        event = self._cuda.torch.cuda.Event(blocking=True)
        event.record(self._cuda.torch.cuda.current_stream(self._cuda.device))
        return event

    def wait_ready(self, token: Ready | None) -> None:
        if token is not None:
            self._cuda.enter()
            token.synchronize()

    def close(self) -> None:
        self._pool.close()
