"""A CUDA device through cuda-python's runtime bindings, imported when one is first opened.

The runtime's current device and capture mode belong to each thread and to whoever works in
it: every call here puts back what it found.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, NoReturn

from kvstore.cuda.base import IPC_HANDLE_BYTES, Copy
from kvstore.errors import DeviceError, NoSpaceError, UsageError

INSTALL = "pip install 'kvstore[cuda]'"


def open_device(ordinal: int = 0, runtime: Any = None) -> BindingsDevice:
    """The device of that number among those this process sees.

    Raises `DeviceError` when there is none, or no driver or no cuda-python to reach it
    with. `runtime` stands in for `cuda.bindings.runtime`.
    """
    if runtime is None:
        try:
            runtime = import_module("cuda.bindings.runtime")
        except ImportError as e:
            raise DeviceError(f"no cuda.bindings ({e}): {INSTALL}") from e
    calls = _Calls(runtime)
    count = calls(runtime.cudaGetDeviceCount)
    if not 0 <= ordinal < count:
        raise DeviceError(f"there is no CUDA device {ordinal}: {count} are visible")
    return BindingsDevice(calls, ordinal, count)


class _Calls:
    """Calls of the runtime whose return codes are checked."""

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime

    def __call__(self, function: Any, *args: Any) -> Any:
        error, *result = function(*args)
        if int(error) != 0:
            self.fail(getattr(function, "__name__", str(function)), error)
        return result[0] if result else None

    def fail(self, name: str, error: Any) -> NoReturn:
        # Or the next to ask for the last error takes ours for its own.
        self.runtime.cudaGetLastError()
        said = f"{name}: {error.name}"
        if error == self.runtime.cudaError_t.cudaErrorMemoryAllocation:
            raise NoSpaceError(f"{said}: the device has no room")
        raise DeviceError(said)


class BindingsDevice:
    """Implements `kvstore.cuda.base.CudaDevice`."""

    def __init__(self, calls: _Calls, ordinal: int, visible: int) -> None:
        self._calls = calls
        self._runtime = calls.runtime
        self._visible = visible
        self.ordinal = ordinal
        self.uuid = self._uuid_of(ordinal)
        self._lock = threading.Lock()
        self._allocated: dict[int, bytes | None] = {}
        """Our own memory, and its handle when it was exported."""

    def _uuid_of(self, ordinal: int) -> str:
        properties = self._calls(self._runtime.cudaGetDeviceProperties, ordinal)
        return bytes(properties.uuid.bytes).hex()

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Make calls on this device, and say that they have nothing to do with a CUDA graph
        that another thread captures: else they fail, and end the capture with them."""
        calls, runtime = self._calls, self._runtime
        relaxed = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        mode = calls(runtime.cudaThreadExchangeStreamCaptureMode, relaxed)
        before = calls(runtime.cudaGetDevice)
        try:
            if before != self.ordinal:
                calls(runtime.cudaSetDevice, self.ordinal)
            yield
        finally:
            if before != self.ordinal:
                calls(runtime.cudaSetDevice, before)
            calls(runtime.cudaThreadExchangeStreamCaptureMode, mode)

    def allocate(self, size_bytes: int) -> int:
        if size_bytes < 1:
            raise UsageError("size_bytes", size_bytes, "must be at least 1")
        with self._current():
            address = int(self._calls(self._runtime.cudaMalloc, size_bytes))
        with self._lock:
            self._allocated[address] = None
        return address

    def free(self, address: int) -> None:
        with self._lock:
            if address not in self._allocated:
                raise UsageError("address", hex(address), "must be what `allocate` returned")
            del self._allocated[address]
        with self._current():
            self._calls(self._runtime.cudaFree, address)

    def export(self, address: int) -> bytes:
        with self._lock:
            if address not in self._allocated:
                raise UsageError("address", hex(address), EXPORTED_MUST)
            handle = self._allocated[address]
            if handle is None:
                with self._current():
                    raw = self._calls(self._runtime.cudaIpcGetMemHandle, address)
                handle = self._allocated[address] = bytes(raw.reserved)
        return handle

    def open(self, handle: bytes) -> int:
        if len(handle) != IPC_HANDLE_BYTES:
            raise UsageError("handle", f"{len(handle)} bytes", f"must be {IPC_HANDLE_BYTES} bytes")
        own = self._own(handle)
        if own is not None:
            return own
        raw = self._runtime.cudaIpcMemHandle_t()
        raw.reserved = handle
        with self._current():
            flags = self._runtime.cudaIpcMemLazyEnablePeerAccess
            return int(self._calls(self._runtime.cudaIpcOpenMemHandle, raw, flags))

    def _own(self, handle: bytes) -> int | None:
        """The driver opens a handle in other processes than the one that exported it only."""
        with self._lock:
            return next((a for a, known in self._allocated.items() if known == handle), None)

    def close(self, address: int) -> None:
        with self._lock:
            if address in self._allocated:
                return
        with self._current():
            self._calls(self._runtime.cudaIpcCloseMemHandle, address)

    def reaches(self, uuid: str) -> bool:
        if uuid == self.uuid:
            return True
        with self._current():
            for other in range(self._visible):
                if other != self.ordinal and self._uuid_of(other) == uuid:
                    ask = self._runtime.cudaDeviceCanAccessPeer
                    return bool(self._calls(ask, self.ordinal, other))
        return True

    def register_host(self, address: int, size_bytes: int, *, read_only: bool = False) -> None:
        flags = self._runtime.cudaHostRegisterPortable
        if read_only:
            flags |= self._runtime.cudaHostRegisterReadOnly
        with self._current():
            self._calls(self._runtime.cudaHostRegister, address, size_bytes, flags)

    def unregister_host(self, address: int) -> None:
        with self._current():
            self._calls(self._runtime.cudaHostUnregister, address)

    def stream(self) -> BindingsStream:
        with self._current():
            flags = self._runtime.cudaStreamNonBlocking
            handle = self._calls(self._runtime.cudaStreamCreateWithFlags, flags)
        return BindingsStream(self, handle)

    # --- for its streams and events ------------------------------------------

    def queue(self, batch: Sequence[Copy], stream: Any) -> None:
        runtime = self._runtime
        copy, kind = runtime.cudaMemcpyAsync, runtime.cudaMemcpyKind.cudaMemcpyDefault
        with self._current():
            for to, source, size_bytes in batch:
                self._calls(copy, to, source, size_bytes, kind, stream)

    def recorded(self, stream: Any) -> Any:
        runtime = self._runtime
        with self._current():
            flags = runtime.cudaEventDisableTiming
            event = self._calls(runtime.cudaEventCreateWithFlags, flags)
            self._calls(runtime.cudaEventRecord, event, stream)
        return event

    def is_done(self, event: Any) -> bool:
        with self._current():
            error, *_ = self._runtime.cudaEventQuery(event)
        if error == self._runtime.cudaError_t.cudaErrorNotReady:
            return False
        if int(error) != 0:
            self._calls.fail("cudaEventQuery", error)
        return True

    def forget_event(self, event: Any) -> None:
        self._runtime.cudaEventDestroy(event)

    def forget_stream(self, stream: Any) -> None:
        with self._current():
            self._calls(self._runtime.cudaStreamDestroy, stream)


EXPORTED_MUST = (
    "must be what `allocate` returned: only whole allocations of cudaMalloc have IPC handles; "
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
            return BindingsEvent(self._device, self._device.recorded(self._handle))

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
        self._handle = handle

    def done(self) -> bool:
        return self._device.is_done(self._handle)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter or the driver is shutting down
            self._device.forget_event(self._handle)
