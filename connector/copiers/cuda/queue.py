"""Implements `Device` over CUDA: torch for memory, `kvstore.cuda` for streams, kernel and DMA.

torch and cuda.bindings are imported when a device's tensors are registered.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

from connector.copiers.cuda.copier import DeviceQueue, HostMemory
from connector.copiers.cuda.kernel_plan import (
    KERNELS,
    PAGE_BYTES,
    STAGING_ALIGNMENT_BYTES,
    THREADS,
    HostPlace,
    Launch,
)
from connector.copiers.cuda.nvrtc import NoKernelError, compiled
from connector.copiers.cuda.page_lock import LockedPool
from kvstore import DeviceError, cuda_device


class _Shape(ctypes.Structure):
    """`Shape` of paged_copy.cu, in the order of `Launch.shape`."""

    _fields_ = [(f"field{i}", ctypes.c_uint32) for i in range(6)]


class Cuda:
    """One device's context, with the kernel loaded, for any thread."""

    def __init__(self, device: Any) -> None:
        """`device` is a `torch.device`. Raises `NoKernelError` when it cannot run the kernel."""
        import torch as untyped_torch

        torch: Any = untyped_torch
        code = compiled(torch.cuda.get_device_capability(device))
        self.torch, self.device = torch, device
        torch.empty(1, device=device)  # starts CUDA
        self._opened = cuda_device(device.index)
        self.driver, self.call = self._opened.driver, self._opened.call
        self.scope, self.enter = self._opened.current, self._opened.enter
        try:
            self.kernels = self._loaded(code)
        except DeviceError as e:
            raise NoKernelError(f"the driver does not load the kernel: {e}") from e

    def _loaded(self, code: bytes) -> dict[str, Any]:
        """All kernels: the driver loads one when it is first asked for it, and may wait for all
        that runs on the device then."""
        get = self.driver.cuModuleGetFunction
        with self.scope():
            module = self.call(self.driver.cuModuleLoadData, code)
            return {name: self.call(get, module, name.encode()) for name in KERNELS}

    # `page_lock.Registrar`

    def lock(self, address: int, size_bytes: int, writable: bool) -> str:
        """Page-lock a range of this process's memory; why it cannot be, empty when it is."""
        try:
            self._opened.register_host(address, size_bytes, read_only=not writable)
        except DeviceError as e:
            return str(e).rpartition("CUDA_ERROR_")[2].lower()
        return ""

    def unlock(self, address: int) -> None:
        with suppress(DeviceError):
            self._opened.unregister_host(address)


class CudaQueue:
    """Implements `DeviceQueue` as one stream."""

    def __init__(self, cuda: Cuda, staging_bytes: int, pages_max: int) -> None:
        torch = cuda.torch
        self._cuda = cuda
        room = torch.empty(
            staging_bytes + STAGING_ALIGNMENT_BYTES, dtype=torch.uint8, device=cuda.device
        )
        self._room = room
        self.staging = -(-room.data_ptr() // STAGING_ALIGNMENT_BYTES) * STAGING_ALIGNMENT_BYTES
        self.staging_bytes = staging_bytes
        rows = pages_max * PAGE_BYTES
        self._host_table = torch.empty(rows, dtype=torch.uint8, pin_memory=True)
        self._table = torch.empty(rows, dtype=torch.uint8, device=cuda.device)
        self.table = memoryview(self._host_table.numpy()).cast("B")
        driver = cuda.driver
        flags = driver.CUevent_flags
        # Not one of torch's streams: it hands out 32 in turn, and this could be the engine's
        # too, even while it captures a graph there. Both stay as long as the process.
        with cuda.scope():
            self._stream = cuda.call(
                driver.cuStreamCreate, int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            )
            # Blocking: a thread that waits for a millisecond must not spin, it would hold a core.
            self._done = cuda.call(
                driver.cuEventCreate,
                int(flags.CU_EVENT_BLOCKING_SYNC) | int(flags.CU_EVENT_DISABLE_TIMING),
            )
        self._busy = False
        # What was allocated may still be in use by what ran in that memory before.
        torch.cuda.current_stream(cuda.device).synchronize()

    def launch(self, launch: Launch) -> None:
        cuda, driver = self._begin()
        cuda.call(
            driver.cuMemcpyHtoDAsync,
            self._table.data_ptr(),
            self._host_table.data_ptr(),
            launch.pages * PAGE_BYTES,
            self._stream,
        )
        layers = ctypes.c_uint64(launch.layer_table)
        pages = ctypes.c_uint64(self._table.data_ptr())
        shape = _Shape(*launch.shape)
        arguments = (ctypes.c_void_p * 3)(*map(ctypes.addressof, (layers, pages, shape)))
        cuda.call(
            driver.cuLaunchKernel,
            cuda.kernels[launch.kernel],
            *(launch.blocks, 1, 1),
            *(THREADS, 1, 1),
            0,
            self._stream,
            ctypes.addressof(arguments),  # read before the call returns
            0,
        )

    def store(self, target: HostPlace, source: int) -> None:
        cuda, driver = self._begin()
        assert target.rows == 1, "a payload is stored whole, or one layer of it"
        copy = driver.cuMemcpyDtoDAsync if target.on_device else driver.cuMemcpyDtoHAsync
        cuda.call(copy, target.address, source, target.size_bytes, self._stream)

    def fetch(self, target: int, source: HostPlace) -> None:
        cuda, driver = self._begin()
        if source.rows == 1:
            move = driver.cuMemcpyDtoDAsync if source.on_device else driver.cuMemcpyHtoDAsync
            cuda.call(move, target, source.address, source.row_bytes, self._stream)
            return
        copy = driver.CUDA_MEMCPY2D()
        if source.on_device:
            copy.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
            copy.srcDevice, copy.srcPitch = source.address, source.pitch_bytes
        else:
            copy.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_HOST
            copy.srcHost, copy.srcPitch = source.address, source.pitch_bytes
        copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.dstDevice, copy.dstPitch = target, source.row_bytes
        copy.WidthInBytes, copy.Height = source.row_bytes, source.rows
        cuda.call(driver.cuMemcpy2DAsync, copy, self._stream)

    def _begin(self) -> tuple[Cuda, Any]:
        self._cuda.enter()
        self._busy = True
        return self._cuda, self._cuda.driver

    def wait(self) -> None:
        if self._busy:
            cuda, driver = self._begin()
            cuda.call(driver.cuEventRecord, self._done, self._stream)
            cuda.call(driver.cuEventSynchronize, self._done)
            self._busy = False


class CudaDevice:
    """Implements `Device`."""

    def __init__(self, cuda: Cuda, staging_bytes: int, pages_max: int, pool: LockedPool) -> None:
        self._cuda = cuda
        self._pool = pool
        self.saving: Sequence[DeviceQueue] = [
            CudaQueue(cuda, staging_bytes, pages_max) for _ in range(2)
        ]
        self.loading: Sequence[DeviceQueue] = [
            CudaQueue(cuda, staging_bytes, pages_max) for _ in range(2)
        ]
        self._constants: list[Any] = []

    def constant(self, data: bytes) -> int:
        torch = self._cuda.torch
        copy = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._cuda.device)
        torch.cuda.current_stream(self._cuda.device).synchronize()
        self._constants.append(copy)
        return int(copy.data_ptr())

    def host_memory(self) -> AbstractContextManager[HostMemory]:
        return self._pool.held()

    def mark_ready(self) -> Any:
        event = self._cuda.torch.cuda.Event(blocking=True)
        event.record(self._cuda.torch.cuda.current_stream(self._cuda.device))
        return event

    def wait_ready(self, token: Any) -> None:
        if token is not None:
            self._cuda.enter()
            token.synchronize()

    def close(self) -> None:
        self._pool.close()
