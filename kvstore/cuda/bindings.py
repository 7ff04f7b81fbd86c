"""A CUDA device through cuda-python's driver bindings, imported when one is first opened.

The driver's API and not the runtime's: the runtime inside cuda-python refuses a driver that
is older than itself, and `cudaSetDevice` back to a device that a thread never used makes a
context there, hundreds of MiB for each worker on the first device of a box. A context that
is pushed is popped again and leaves nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, NoReturn

from kvstore.cuda.base import IPC_HANDLE_BYTES, Copy
from kvstore.cuda.versions import install_command, misfit, torch_cuda
from kvstore.errors import DeviceError, NoSpaceError, UsageError

log = logging.getLogger("kvstore.cuda")

UUID_BYTES = 16
ALLOCATION_BYTES = 2 << 20
"""What is smaller the driver takes out of a larger piece, and a handle shares that piece."""


_lock = threading.Lock()
_devices: dict[int, BindingsDevice] = {}
"""Of this process: a device has to know what of its memory is its own."""


def open_device(ordinal: int = 0, driver: Any = None) -> BindingsDevice:
    """The device of that number among those this process sees, with its primary context (which
    torch uses too), made now where there is none yet. The same one each time.

    Raises `DeviceError` when there is none, or no driver or no cuda-python to reach it
    with. `driver` stands in for `cuda.bindings.driver`.
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


def _open(ordinal: int, driver: Any) -> BindingsDevice:
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
    """Calls of the driver: the value of each. Raises `DeviceError` for its error."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def __call__(self, function: Any, *args: Any) -> Any:
        error, *result = function(*args)
        if int(error) != 0:
            self.fail(function.__name__, error)
        return result[0] if result else None

    def fail(self, name: str, error: Any) -> NoReturn:
        raise DeviceError(f"{name}: {error.name}")


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
        self._context = calls(self.driver.cuDevicePrimaryCtxRetain, self._device(ordinal))
        self._entered = threading.local()
        self._lock = threading.Lock()
        self._allocated: dict[int, bytes | None] = {}
        """Our own memory, and its handle when it was exported."""

    def _device(self, ordinal: int) -> Any:
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
        """`current` for good, in a thread of our own: made so the first time it is called there."""
        if getattr(self._entered, "done", False):
            return
        self.call(self.driver.cuCtxSetCurrent, self._context)
        self.call(self.driver.cuThreadExchangeStreamCaptureMode, self._relaxed())
        self._entered.done = True

    def _relaxed(self) -> Any:
        return self.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

    def allocate(self, size_bytes: int) -> int:
        if size_bytes < 1:
            raise UsageError("size_bytes", size_bytes, "must be at least 1")
        whole = -(-size_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES
        with self.current():
            error, address = self.driver.cuMemAlloc(whole)
            if error == self.driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                raise NoSpaceError(f"cuMemAlloc: {error.name}: the device has no room")
            if int(error) != 0:
                self.call.fail("cuMemAlloc", error)
        with self._lock:
            self._allocated[int(address)] = None
        return int(address)

    def free(self, address: int) -> None:
        with self._lock:
            if address not in self._allocated:
                raise UsageError("address", hex(address), "must be what `allocate` returned")
            del self._allocated[address]
        with self.current():
            self.call(self.driver.cuMemFree, address)

    def export(self, address: int) -> bytes:
        with self._lock:
            if address not in self._allocated:
                raise UsageError("address", hex(address), EXPORTED_MUST)
            handle = self._allocated[address]
            if handle is None:
                with self.current():
                    raw = self.call(self.driver.cuIpcGetMemHandle, address)
                handle = ctypes.string_at(raw.getPtr(), IPC_HANDLE_BYTES)
                self._allocated[address] = handle
        return handle

    def open(self, handle: bytes) -> int:
        if len(handle) != IPC_HANDLE_BYTES:
            raise UsageError("handle", f"{len(handle)} bytes", f"must be {IPC_HANDLE_BYTES} bytes")
        own = self._own(handle)
        if own is not None:
            return own
        # cuda-python names no field of it in every version.
        raw = self.driver.CUipcMemHandle()
        ctypes.memmove(raw.getPtr(), handle, IPC_HANDLE_BYTES)
        flags = int(self.driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        with self.current():
            return int(self.call(self.driver.cuIpcOpenMemHandle, raw, flags))

    def _own(self, handle: bytes) -> int | None:
        """The driver opens a handle in other processes than the one that exported it only."""
        with self._lock:
            return next((a for a, known in self._allocated.items() if known == handle), None)

    def close(self, address: int) -> None:
        with self._lock:
            if address in self._allocated:
                return
        with self.current():
            self.call(self.driver.cuIpcCloseMemHandle, address)

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

    # --- for its streams and events ------------------------------------------

    def queue(self, batch: Sequence[Copy], stream: Any) -> None:
        with self.current():
            for to, source, size_bytes in batch:
                self.call(self.driver.cuMemcpyAsync, to, source, size_bytes, stream)

    def recorded(self, stream: Any) -> BindingsEvent:
        flags = int(self.driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        with self.current():
            event = BindingsEvent(self, self.call(self.driver.cuEventCreate, flags))
            self.call(self.driver.cuEventRecord, event.handle, stream)
        return event

    def is_done(self, event: Any) -> bool:
        with self.current():
            (error,) = self.driver.cuEventQuery(event)
        if error == self.driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if int(error) != 0:
            self.call.fail("cuEventQuery", error)
        return True

    def forget_event(self, event: Any) -> None:
        with self.current():
            self.driver.cuEventDestroy(event)

    def forget_stream(self, stream: Any) -> None:
        with self.current():
            self.call(self.driver.cuStreamDestroy, stream)


EXPORTED_MUST = (
    "must be what `allocate` returned: only whole allocations of cuMemAlloc have IPC handles; "
    "VMM memory (cuMemCreate, torch's expandable_segments) and fabric handles are not supported"
)


class BindingsStream:
    """Implements `kvstore.cuda.base.Stream`."""

    def __init__(self, device: BindingsDevice, handle: Any) -> None:
        self._device = device
        self._handle = handle
        self._lock = threading.Lock()
        self._closed = False

    def copy(self, batch: Sequence[Copy]) -> None:
        with self._lock:
            self._check()
            self._device.queue(batch, self._handle)

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
    """Implements `kvstore.cuda.base.Event`."""

    def __init__(self, device: BindingsDevice, handle: Any) -> None:
        self._device = device
        self.handle = handle

    def done(self) -> bool:
        return self._device.is_done(self.handle)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter or the driver is shutting down
            self._device.forget_event(self.handle)
