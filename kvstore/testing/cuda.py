"""Models a CUDA device: its memory is files, descriptors stand for it, copies are late.

It is for tests on machines that have no device, between real processes too. What a driver would
punish with wrong bytes or an error it punishes as well: a copy is carried out by another
thread some time after it was queued, in parts; addresses that are no memory of the device,
writes to what was opened to be read, and copies over the border of what was page-locked at
once are refused; memory that is unlocked under a copy breaks the device for good.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import queue
import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvstore.cuda.base import SHARED_NAME_BYTES, Copy, Shared
from kvstore.errors import DeviceError, NoSpaceError, UsageError

log = logging.getLogger(__name__)

LATE_S = 0.002
PART_BYTES = 256 << 10
"""What is copied without a pause in which others may change the source."""
NO_ADDRESS_BELOW = 1 << 16
CAPACITY_BYTES = 4 << 30
STREAMS_END_TIMEOUT_S = 20.0


class _Memory(NamedTuple):
    path: Path
    map: mmap.mmap
    owned: bool
    writable: bool


class ModelCuda:
    """Implements `kvstore.cuda.base.CudaDevice`.

    Processes that are given the same `directory` have the same devices: it holds their memory,
    and descriptors of other files are refused. `uuid` names
    the device, `unreachable` those that it cannot map.
    """

    def __init__(
        self,
        directory: Path,
        ordinal: int = 0,
        *,
        uuid: str = "model-0",
        unreachable: Sequence[str] = (),
        capacity_bytes: int = CAPACITY_BYTES,
        late_s: float = LATE_S,
    ) -> None:
        self.directory = directory
        self.ordinal = ordinal
        self.uuid = uuid
        self.late_s = late_s
        self._unreachable = unreachable
        self.free_bytes = capacity_bytes
        self.maps_read_only = True
        self._lock = threading.Lock()
        self._memory: dict[int, _Memory] = {}
        self.registered: dict[int, int] = {}
        self.hold = threading.Event()
        """Cleared, no copy is carried out: a device that is busy, or hangs."""
        self.hold.set()
        self.broken = False
        """Every copy fails from here on, as after a fault in a kernel."""
        self.loses_reads = False
        """Nothing arrives of what is read from other processes' memory, and nobody says so."""
        self.queued = 0
        """Copies so far."""
        self.pageable = 0
        """Of them, those from or to host memory that was not page-locked when they were made."""
        self.flying: list[Copy] = []
        self.flushes = 0
        self.sees_rdma_late = False
        """What others write to memory that was exported is seen only once it was flushed."""
        self._exported: dict[int, bytearray] = {}
        """What copies find there then."""

    def allocate(self, size_bytes: int) -> int:
        if size_bytes < 1:
            raise UsageError("size_bytes", size_bytes, "must be at least 1")
        with self._lock:
            if size_bytes > self.free_bytes:
                raise NoSpaceError("cuMemAlloc: the device has no room")
            self.free_bytes -= size_bytes
        path = self.directory / secrets.token_hex(SHARED_NAME_BYTES)
        with path.open("xb") as file:
            file.truncate(size_bytes)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return self._map(fd, path, owned=True, writable=True)
        finally:
            os.close(fd)

    def _map(self, fd: int, path: Path, *, owned: bool, writable: bool) -> int:
        mapped = mmap.mmap(fd, 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        with self._lock:
            self._memory[address] = _Memory(path, mapped, owned, writable)
        return address

    def free(self, address: int) -> None:
        memory = self._take(address, owned=True)
        with self._lock:
            self.free_bytes += len(memory.map)
            self._exported.pop(address, None)
        memory.path.unlink(missing_ok=True)

    def _take(self, address: int, *, owned: bool) -> _Memory:
        with self._lock:
            memory = self._memory.get(address)
            if memory is None or memory.owned != owned:
                which = "allocate" if owned else "open"
                raise UsageError("address", hex(address), f"must be what `{which}` returned")
            return self._memory.pop(address)

    def export(self, address: int) -> Shared:
        with self._lock:
            memory = self._memory.get(address)
        if memory is None or not memory.owned:
            raise UsageError("address", hex(address), "must be what `allocate` returned")
        fd = os.open(memory.path, os.O_RDWR | os.O_CLOEXEC)
        if self.sees_rdma_late:
            self._exported[address] = bytearray(len(memory.map))
        return Shared(bytes.fromhex(memory.path.name), len(memory.map), fd)

    def open(self, shared: Shared, *, writable: bool = False) -> int:
        try:
            path = Path(f"/proc/self/fd/{shared.fd}").readlink()
            if path.parent != self.directory.resolve():
                raise DeviceError("cuMemImportFromShareableHandle: CUDA_ERROR_INVALID_VALUE")
            return self._map(shared.fd, path, owned=False, writable=writable)
        except (OSError, ValueError) as e:
            raise DeviceError("cuMemImportFromShareableHandle: CUDA_ERROR_INVALID_VALUE") from e

    def close(self, address: int) -> None:
        self._take(address, owned=False)

    def reaches(self, uuid: str) -> bool:
        return uuid not in self._unreachable

    @property
    def mapped(self) -> int:
        """Return what is open here, each as often as it was opened."""
        with self._lock:
            return sum(not memory.owned for memory in self._memory.values())

    def register_host(self, address: int, size_bytes: int, *, read_only: bool = False) -> None:
        with self._lock:
            for start, length in self.registered.items():
                if start < address + size_bytes and address < start + length:
                    raise DeviceError(
                        "cuMemHostRegister: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
                    )
            self.registered[address] = size_bytes

    def unregister_host(self, address: int) -> None:
        with self._lock:
            size_bytes = self.registered.pop(address, None)
            if size_bytes is None:
                raise DeviceError("cuMemHostUnregister: CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED")
            if any(
                _touch(at, length, address, address + size_bytes)
                for to, source, length in self.flying
                for at in (to, source)
            ):
                self.broken = True  # the DMA goes on, to pages that may be anybody's

    def flush_rdma_writes(self) -> None:
        with self._lock:
            self.flushes += 1
            for address, seen in self._exported.items():
                seen[:] = self._memory[address].map[:]

    def stream(self) -> ModelStream:
        return ModelStream(self)

    # --- for its streams -------------------------------------------------------

    def check(self, copy: Copy) -> list[_Memory]:
        """Return the memory that a copy needs, for as long as it runs. Raises `DeviceError`."""
        to, source, size_bytes = copy
        with self._lock:
            if self.broken:
                raise DeviceError("cuMemcpyAsync: CUDA_ERROR_ILLEGAL_ADDRESS")
            needed = [
                memory
                for start, memory in self._memory.items()
                if _within(to, size_bytes, start, start + len(memory.map))
                or _within(source, size_bytes, start, start + len(memory.map))
            ]
            guarded = any(
                not memory.writable and _within(to, size_bytes, start, start + len(memory.map))
                for start, memory in self._memory.items()
            )
            if not needed or guarded or min(to, source) < NO_ADDRESS_BELOW:
                raise DeviceError("cuMemcpyAsync: CUDA_ERROR_INVALID_VALUE")
            for at in (to, source):
                touched = [
                    (start, length)
                    for start, length in self.registered.items()
                    if _touch(at, size_bytes, start, start + length)
                ]
                if any(not _within(at, size_bytes, s, s + length) for s, length in touched):
                    # No DMA may leave what was registered at once.
                    raise DeviceError("cuMemcpyAsync: CUDA_ERROR_INVALID_VALUE")
                own = any(
                    _touch(at, size_bytes, s, s + len(m.map)) for s, m in self._memory.items()
                )
                self.pageable += not touched and not own
            self.queued += 1
            self.flying.append(copy)
        return needed

    def loses(self, source: int) -> bool:
        """Tell whether a copy from there brings nothing."""
        with self._lock:
            return self.loses_reads and any(
                not memory.owned and start <= source < start + len(memory.map)
                for start, memory in self._memory.items()
            )

    def seen_at(self, source: int) -> int:
        """Return where a copy from there finds its bytes."""
        with self._lock:
            for start, seen in self._exported.items():
                if start <= source < start + len(seen):
                    return source - start + ctypes.addressof(ctypes.c_char.from_buffer(seen))
        return source

    def landed(self, copies: Sequence[Copy]) -> None:
        with self._lock:
            for copy in copies:
                self.flying.remove(copy)


def _touch(address: int, size_bytes: int, start: int, end: int) -> bool:
    return start < address + size_bytes and address < end


def _within(address: int, size_bytes: int, start: int, end: int) -> bool:
    return start <= address and address + size_bytes <= end


class ModelStream:
    """Implements `kvstore.cuda.base.Stream`: a thread carries the copies out."""

    def __init__(self, device: ModelCuda) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="model-cuda-stream", daemon=True)
        self._thread.start()

    def copy(self, batch: Sequence[Copy], *, apart: bool = False) -> None:
        with self._lock:
            self._check()
            queued: list[Copy] = []
            memory: list[_Memory] = []
            try:
                for copy in batch:
                    memory += self._device.check(copy)
                    queued.append(copy)
            finally:  # what comes before a copy that is refused is carried out
                if apart:
                    random.shuffle(queued)
                self._work.put(lambda: self._carry_out(queued, memory))

    def copy_apart(self, batch: Sequence[Copy]) -> None:
        self.copy(batch, apart=True)

    def _carry_out(self, batch: Sequence[Copy], memory: list[_Memory]) -> None:
        time.sleep(self._device.late_s)
        for to, source, size_bytes in batch:
            if self._device.loses(source):
                continue
            for start in range(0, size_bytes, PART_BYTES):
                self._device.hold.wait()
                part_bytes = min(PART_BYTES, size_bytes - start)
                ctypes.memmove(to + start, self._device.seen_at(source + start), part_bytes)
        memory.clear()
        self._device.landed(batch)

    def launch(self, kernel: Callable[[], None]) -> None:
        """Run a kernel in its turn, as late as a copy; one that raises breaks the device."""

        def run() -> None:
            time.sleep(self._device.late_s)
            self._device.hold.wait()
            try:
                kernel()
            except Exception:
                self._device.broken = True
                log.exception("a kernel failed")

        with self._lock:
            self._check()
            self._work.put(run)

    def record(self) -> ModelEvent:
        with self._lock:
            self._check()
            event = ModelEvent(self._device)
            self._work.put(event.reached.set)
            return event

    def _check(self) -> None:
        if self._closed:
            raise DeviceError("the stream is closed")

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            with contextlib.suppress(ValueError):
                work()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._work.put(None)
        self._thread.join(STREAMS_END_TIMEOUT_S)


class ModelEvent:
    """Implements `kvstore.cuda.base.CudaEvent`."""

    def __init__(self, device: ModelCuda) -> None:
        self._device = device
        self.reached = threading.Event()

    def done(self) -> bool:
        if self._device.broken:
            raise DeviceError("cuEventQuery: CUDA_ERROR_ILLEGAL_ADDRESS")
        return self.reached.is_set()
