"""A CUDA device through cuda-python's driver bindings, imported when one is first opened.

The driver's API and not the runtime's: the runtime inside cuda-python refuses a driver that
is older than itself, and `cudaSetDevice` back to a device that a thread never used makes a
context there, hundreds of MiB for each worker on the first device of a box. A context that
is pushed is popped again and leaves nothing.

Longer than other files: all that needs cuda-python is in this one, which is imported lazily.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from kvstore.batches import in_batches
from kvstore.cuda.base import (
    SHARED_NAME_BYTES,
    Copy,
    Driver,
    Handle,
    Shared,
)
from kvstore.cuda.batch import LOW_PRIORITY, BatchCopies, batch_copies, wanted
from kvstore.cuda.versions import install_command, misfit, torch_cuda
from kvstore.errors import DeviceError, NoSpaceError, UsageError
from kvstore.limits import CUDA_BATCH_COPIES_MAX

log = logging.getLogger("kvstore.cuda")

UUID_BYTES = 16
BATCH_COPIES_MIN = 4
"""The fewest copies that are queued by one call; fewer are calls of their own."""

_lock = threading.Lock()
_devices: dict[int, BindingsDevice] = {}
"""Devices of this process: a device must recognise its own memory."""


def open_device(ordinal: int = 0, driver: Driver = None) -> BindingsDevice:
    """Return the device of that number among those that this process sees; the same object each
    time.

    It has the device's primary context, which torch uses too, made now where there is none yet.

    Raises `DeviceError` when there is none, or no driver or no cuda-python to reach it with.
    `driver` stands in for `cuda.bindings.driver`.
    """
    if driver is not None:
        return _open(ordinal, driver)
    try:
        driver = import_module("cuda.bindings.driver")
    except ImportError as e:
        raise DeviceError(f"no cuda.bindings ({e}): {install_command(torch_cuda())}") from e
    with _lock:
        if ordinal not in _devices:
            if why := misfit(torch_cuda()):
                log.warning("%s", why)
            _devices[ordinal] = _open(ordinal, driver)
        return _devices[ordinal]


def _open(ordinal: int, driver: Driver) -> BindingsDevice:
    calls = _Calls(driver)
    try:
        calls(driver.cuInit, 0)
    except RuntimeError as e:  # what cuda-python says without libcuda.so.1
        raise DeviceError(f"no CUDA driver: {e}") from e
    count = calls(driver.cuDeviceGetCount)
    if not 0 <= ordinal < count:
        raise DeviceError(f"there is no CUDA device {ordinal}: {count} are visible")
    return BindingsDevice(calls, ordinal, count)


class _Calls:
    """Calls functions of the driver; returns their values, raises `DeviceError` for an error."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def __call__(self, function: Callable[..., Any], *args: object) -> Handle:
        error, *result = function(*args)
        if int(error) != 0:
            self.fail(function.__name__, error)
        return result[0] if result else None

    def fail(self, name: str, error: Handle) -> NoReturn:
        raise DeviceError(f"{name}: {error.name}")


class _Mapped(NamedTuple):
    """Memory that is mapped in this process."""

    size_bytes: int
    name: bytes
    """The name of our own memory; empty for memory that was opened."""


class BindingsDevice:
    """Implements `kvstore.cuda.base.CudaDevice`."""

    def __init__(self, calls: _Calls, ordinal: int, visible: int) -> None:
        self.call = calls
        self.driver = calls.driver
        """`cuda.bindings.driver`, for calls that are not here: through `call`, in `current`."""
        self._visible = visible
        self.ordinal = ordinal
        self.uuid = self._uuid_of(ordinal)
        # Never released: it is the engine's, or ends with the process.
        self._number = self._device(ordinal)
        self._context = calls(self.driver.cuDevicePrimaryCtxRetain, self._number)
        self._entered = threading.local()
        self._lock = threading.Lock()
        self._mapped: dict[int, _Mapped] = {}
        self.maps_read_only = True
        self._said_refused = False
        self.low_priority = LOW_PRIORITY in wanted()
        """Whether streams for the engine's copies yield to the engine's own."""

    @cached_property
    def batch(self) -> BatchCopies | None:
        """Return what queues many copies by one call; None where driver or device cannot."""
        return batch_copies(self.driver, self._number)

    def _device(self, ordinal: int) -> Handle:
        return self.call(self.driver.cuDeviceGet, ordinal)

    def _uuid_of(self, ordinal: int) -> str:
        # In cuda-python 13 the first is what the second is in 12.
        ask = getattr(self.driver, "cuDeviceGetUuid_v2", self.driver.cuDeviceGetUuid)
        raw = self.call(ask, self._device(ordinal))
        return ctypes.string_at(raw.getPtr(), UUID_BYTES).hex()

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make calls on this device, and say that they have nothing to do with a CUDA graph
        that another thread captures: else they fail, and end the capture with them.

        Both belong to the thread and to whoever works in it: they are put back.
        """
        call, driver = self.call, self.driver
        mode = call(driver.cuThreadExchangeStreamCaptureMode, self._relaxed())
        try:
            call(driver.cuCtxPushCurrent, self._context)
            try:
                yield
            finally:
                call(driver.cuCtxPopCurrent)
        finally:
            call(driver.cuThreadExchangeStreamCaptureMode, mode)

    def enter(self) -> None:
        """Make this device's context current for good, in a thread of our own; later calls in that
        thread do nothing."""
        if getattr(self._entered, "done", False):
            return
        self.call(self.driver.cuCtxSetCurrent, self._context)
        self.call(self.driver.cuThreadExchangeStreamCaptureMode, self._relaxed())
        self._entered.done = True

    def _relaxed(self) -> Handle:
        return self.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

    def allocate(self, size_bytes: int) -> int:
        if size_bytes < 1:
            raise UsageError("size_bytes", size_bytes, "must be at least 1")
        driver, call = self.driver, self.call
        attributes = driver.CUdevice_attribute
        if not self._has(
            attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        ):
            raise DeviceError("this device has no memory that processes share by descriptor")
        wanted = driver.CUmemAllocationProp()
        wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location = self._location()
        if self._has(attributes.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED):
            wanted.allocFlags.gpuDirectRDMACapable = 1
        wanted.requestedHandleTypes = self._by_descriptor
        granules = driver.CUmemAllocationGranularity_flags
        with self.current():
            granule = call(
                driver.cuMemGetAllocationGranularity,
                wanted,
                granules.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
            whole = -(-size_bytes // granule) * granule
            error, memory = driver.cuMemCreate(whole, wanted, 0)
            if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                raise NoSpaceError(f"cuMemCreate: {error.name}: the device has no room")
            if int(error) != 0:
                call.fail("cuMemCreate", error)
            mapped = _Mapped(whole, os.urandom(SHARED_NAME_BYTES))
            return self._map(memory, mapped, writable=True)

    def free(self, address: int) -> None:
        self._own(address)
        self._unmap(address)

    def export(self, address: int) -> Shared:
        size_bytes, name = self._own(address)
        with self.current():
            memory = self.call(self.driver.cuMemRetainAllocationHandle, address)
            try:
                export = self.driver.cuMemExportToShareableHandle
                fd = int(self.call(export, memory, self._by_descriptor, 0))
            finally:
                self.call(self.driver.cuMemRelease, memory)
        os.set_inheritable(fd, False)
        return Shared(name, size_bytes, fd)

    def open(self, shared: Shared, *, writable: bool = False) -> int:
        with self.current():
            memory = self._retained(shared.name)
            if memory is None:
                take = self.driver.cuMemImportFromShareableHandle
                memory = self.call(take, shared.fd, self._by_descriptor)
            return self._map(memory, _Mapped(shared.size_bytes, b""), writable=writable)

    def close(self, address: int) -> None:
        with self._lock:
            mapped = self._mapped.get(address)
        if mapped is None or mapped.name:
            raise UsageError("address", hex(address), "must be what `open` returned")
        self._unmap(address)

    def _retained(self, name: bytes) -> Handle:
        """Return a handle to our own memory of that name, None if there is none. It exists because
        no document promises that a process may import what it has exported."""
        with self._lock:
            own = next((a for a, mapped in self._mapped.items() if mapped.name == name), None)
            if own is None:
                return None
            return self.call(self.driver.cuMemRetainAllocationHandle, own)

    def _own(self, address: int) -> _Mapped:
        with self._lock:
            mapped = self._mapped.get(address)
        if mapped is None or not mapped.name:
            raise UsageError("address", hex(address), OWN_MUST)
        return mapped

    def _map(self, memory: Handle, mapped: _Mapped, *, writable: bool) -> int:
        """Map `memory`, and release its handle: from here on the mapping alone keeps it."""
        call, driver, size_bytes = self.call, self.driver, mapped.size_bytes
        with contextlib.ExitStack() as undo:
            with contextlib.ExitStack() as release:
                release.callback(call, driver.cuMemRelease, memory)
                address = int(call(driver.cuMemAddressReserve, size_bytes, 0, 0, 0))
                undo.callback(call, driver.cuMemAddressFree, address, size_bytes)
                call(driver.cuMemMap, address, size_bytes, 0, memory, 0)
                undo.callback(call, driver.cuMemUnmap, address, size_bytes)
            self._let_in(address, size_bytes, writable=writable)
            undo.pop_all()
        with self._lock:
            self._mapped[address] = mapped
        return address

    def _let_in(self, address: int, size_bytes: int, *, writable: bool) -> None:
        """Give this device access to mapped memory: read-only unless `writable`, where the driver
        can do that."""
        flags, results = self.driver.CUmemAccess_flags, self.driver.CUresult
        access = self.driver.CUmemAccessDesc()
        access.location = self._location()
        if not writable and self.maps_read_only:
            access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READ
            (error,) = self.driver.cuMemSetAccess(address, size_bytes, [access], 1)
            if int(error) == 0:
                return
            if error not in (
                results.CUDA_ERROR_NOT_SUPPORTED,
                results.CUDA_ERROR_INVALID_VALUE,
            ):
                self.call.fail("cuMemSetAccess", error)
            self.maps_read_only = False
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.call(self.driver.cuMemSetAccess, address, size_bytes, [access], 1)

    def _unmap(self, address: int) -> None:
        with self._lock:
            mapped = self._mapped.pop(address)
        with self.current():
            self.call(self.driver.cuMemUnmap, address, mapped.size_bytes)
            self.call(self.driver.cuMemAddressFree, address, mapped.size_bytes)

    def _has(self, attribute: Handle) -> bool:
        return bool(self._attribute(attribute))

    def _attribute(self, attribute: Handle) -> int:
        return int(self.call(self.driver.cuDeviceGetAttribute, attribute, self._number))

    def _location(self) -> Handle:
        location = self.driver.CUmemLocation()
        location.type = self.driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = int(self._number)
        return location

    @property
    def _by_descriptor(self) -> Handle:
        return self.driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def reaches(self, uuid: str) -> bool:
        for other in range(self._visible):
            if other != self.ordinal and self._uuid_of(other) == uuid:
                ask = self.driver.cuDeviceCanAccessPeer
                return bool(self.call(ask, self._device(self.ordinal), self._device(other)))
        return True

    def register_host(self, address: int, size_bytes: int, *, read_only: bool = False) -> None:
        flags = int(self.driver.CU_MEMHOSTREGISTER_PORTABLE)
        if read_only:
            flags |= int(self.driver.CU_MEMHOSTREGISTER_READ_ONLY)
        with self.current():
            self.call(self.driver.cuMemHostRegister, address, size_bytes, flags)

    def unregister_host(self, address: int) -> None:
        with self.current():
            self.call(self.driver.cuMemHostUnregister, address)

    def stream(self) -> BindingsStream:
        flags = int(self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        with self.current():
            return BindingsStream(self, self.call(self.driver.cuStreamCreate, flags))

    def flush_rdma_writes(self) -> None:
        driver = self.driver
        attributes, orders = driver.CUdevice_attribute, driver.CUGPUDirectRDMAWritesOrdering
        flushes = driver.CUflushGPUDirectRDMAWritesOptions
        order = self._attribute(attributes.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)
        if order >= int(orders.CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER):
            return
        can = self._attribute(attributes.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)
        if not can & int(flushes.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST):
            raise DeviceError("this device neither orders what RDMA writes nor lets us flush it")
        targets = driver.CUflushGPUDirectRDMAWritesTarget
        scopes = driver.CUflushGPUDirectRDMAWritesScope
        with self.current():
            self.call(
                driver.cuFlushGPUDirectRDMAWrites,
                targets.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                scopes.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER,
            )

    # --- for its streams and events ------------------------------------------

    def queue(self, batch: Sequence[Copy], stream: Handle) -> None:
        with self.current():
            for to, source, size_bytes in batch:
                self.call(self.driver.cuMemcpyAsync, to, source, size_bytes, stream)

    def copy_many(self, copies: Sequence[Copy], stream: Handle, *, complete: bool = False) -> None:
        """Queue copies that may be carried out in any order; the thread is in the device's context.
        `complete` says that nothing writes to their sources any more.

        Raises `DeviceError`: then some of them may be queued.
        """
        for some in in_batches(copies, CUDA_BATCH_COPIES_MAX):
            if len(some) == 1 or not self._copied_together(some, stream, complete):
                for to, source, size_bytes in some:
                    self.call(self.driver.cuMemcpyAsync, to, source, size_bytes, stream)

    def _copied_together(self, copies: Sequence[Copy], stream: Handle, complete: bool) -> bool:
        """Queue the copies by one call; False when each must be queued by itself. Then those that
        were queued already are copied twice, with the same bytes."""
        if self.batch is None:
            return False
        error = self.driver.CUresult(self.batch(copies, int(stream), complete=complete))
        if int(error) == 0:
            return True
        results = self.driver.CUresult
        if error not in (results.CUDA_ERROR_INVALID_VALUE, results.CUDA_ERROR_NOT_SUPPORTED):
            self.call.fail("cuMemcpyBatchAsync", error)
        if not self._said_refused:
            self._said_refused = True
            log.warning("the driver refuses %d copies at once: %s", len(copies), error.name)
        return False

    def recorded(self, stream: Handle) -> BindingsEvent:
        flags = int(self.driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        with self.current():
            event = BindingsEvent(self, self.call(self.driver.cuEventCreate, flags))
            self.call(self.driver.cuEventRecord, event.handle, stream)
        return event

    def is_done(self, event: Handle) -> bool:
        with self.current():
            (error,) = self.driver.cuEventQuery(event)
        if error == self.driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if int(error) != 0:
            self.call.fail("cuEventQuery", error)
        return True

    def forget_event(self, event: Handle) -> None:
        with self.current():
            self.driver.cuEventDestroy(event)

    def forget_stream(self, stream: Handle) -> None:
        with self.current():
            self.call(self.driver.cuStreamDestroy, stream)


OWN_MUST = (
    "must be what `allocate` returned: parts of it, and memory of others (torch's, an engine's), "
    "are not shared"
)


class BindingsStream:
    """Implements `kvstore.cuda.base.Stream`."""

    def __init__(self, device: BindingsDevice, handle: Handle) -> None:
        self._device = device
        self._handle = handle
        self._lock = threading.Lock()
        self._closed = False

    def copy(self, batch: Sequence[Copy]) -> None:
        with self._lock:
            self._check()
            self._device.queue(batch, self._handle)

    def copy_apart(self, batch: Sequence[Copy]) -> None:
        if len(batch) < BATCH_COPIES_MIN:
            self.copy(batch)
            return
        with self._lock:
            self._check()
            with self._device.current():
                self._device.copy_many(batch, self._handle)

    def record(self) -> BindingsEvent:
        with self._lock:
            self._check()
            return self._device.recorded(self._handle)

    def _check(self) -> None:
        if self._closed:
            raise DeviceError("the stream is closed")

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._device.forget_stream(self._handle)


class BindingsEvent:
    """Implements `kvstore.cuda.base.CudaEvent`."""

    def __init__(self, device: BindingsDevice, handle: Handle) -> None:
        self._device = device
        self.handle = handle

    def done(self) -> bool:
        return self._device.is_done(self.handle)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter or the driver is shutting down
            self._device.forget_event(self.handle)
