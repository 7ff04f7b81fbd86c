"""Lets what is READ arrive in memory of a device: an arena there, and the way from it.

Bytes of a READ that was given up may still come, as in host memory (reader.py): so the arena is
neither an engine's pages nor a caller's memory, and is given back when the process that
READs into it was reaped. What has come is flushed, copied within the device to where the
caller wants it, and its checksum is computed there, over what came.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

from kvstore.circuit_breaker import Breaker
from kvstore.cuda.base import Copy, CudaDevice, DeviceRange, Shared, Stream, address_of, wait
from kvstore.cuda.checksum import DeviceChecksums
from kvstore.errors import DeviceError, InternalError, NoSpaceError
from kvstore.limits import CUDA_IPC_DRAIN_S, NIXL_REQUEST_BYTES_MAX, NIXL_REQUESTS_MAX
from kvstore.system.on_failure import on_failure

log = logging.getLogger("kvstore.nixl")

ARENA_BYTES = NIXL_REQUESTS_MAX * NIXL_REQUEST_BYTES_MAX
"""Bytes for payload only: headers always come to host memory."""
RETRY_AFTER_S = 60.0
RETRY_AFTER_MAX_S = 3600.0
"""Each try is another process that reads, with a context on the device."""


class VramArena:
    """Memory of a device that a process of ours READs into. Thread-safe."""

    def __init__(self, device: CudaDevice) -> None:
        """Raises `DeviceError`, or `NoSpaceError` when the device has no room."""
        self._device = device
        self.address = device.allocate(ARENA_BYTES)
        with on_failure(device.free, self.address):
            self._shared: Shared | None = device.export(self.address)
        self._lock = threading.Lock()
        self._users = 0
        self._ended = False
        self.tried = False
        """Whether a READ into it was tried."""
        self.proved = False
        """Whether it succeeded, and nothing was wrong since."""

    def part(self, number: int) -> int:
        """Return the address of the part for one request."""
        return self.address + number * NIXL_REQUEST_BYTES_MAX

    @property
    def fd(self) -> int:
        """Return the descriptor that stands for the memory, until `handed_over`."""
        assert self._shared is not None
        return self._shared.fd

    def arguments(self) -> list[str]:
        """Return MEMORY, as child.py takes it."""
        assert self._shared is not None
        name, size_bytes, fd = self._shared[:3]
        return [str(fd), str(size_bytes), str(self._device.ordinal), name.hex()]

    def handed_over(self) -> None:
        """Note that the process that READs has its descriptor, or never will."""
        shared, self._shared = self._shared, None
        if shared is not None:
            os.close(shared.fd)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Keep the memory for copies from it. Raises `DeviceError` when it was given back."""
        with self._lock:
            if self._ended:
                raise DeviceError("the process that read into it has ended")
            self._users += 1
        stays = False
        try:
            yield
        except InternalError:  # a copy from there may still run: the memory stays
            stays = True
            raise
        finally:
            if not stays:
                self._used()

    def _used(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._ended and not self._users
        if last:
            self._free()

    def end(self) -> None:
        """Give the memory back, once no copy from it runs; nobody READs into it any more."""
        with self._lock:
            last = not self._ended and not self._users
            self._ended = True
        if last:
            self._free()

    def _free(self) -> None:
        with contextlib.suppress(DeviceError):
            self._device.free(self.address)


class VramWay:
    """Copies from arenas of one device to memory of callers there. Thread-safe.

    Where it fails, blocks come to host memory until it is tried again: with the same arena, or with
    another process where there was none.
    """

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self._checksums = DeviceChecksums(device)
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._closed = False
        self._last: deque[memoryview] = deque(maxlen=4 * NIXL_REQUESTS_MAX)
        self._tries = Breaker(
            failures_max=1, retry_after_s=RETRY_AFTER_S, retry_after_max_s=RETRY_AFTER_MAX_S
        )
        self.reason = "it has not been tried"
        """Why blocks do not come to the device; empty when they do."""

    def new_arena(self) -> VramArena | None:
        """Return memory to read into, None where there is none or it is too early to try again."""
        if self._closed or not self._tries.allows(time.monotonic()):
            return None
        try:
            return VramArena(self.device)
        except (DeviceError, NoSpaceError, OSError) as e:
            self.failed(str(e))
            return None

    def due(self, arena: VramArena | None) -> bool:
        """Return whether it is time to try an arena again that was of no use."""
        return (
            arena is not None
            and arena.tried
            and not arena.proved
            and not self._closed
            and time.monotonic() >= self._tries.probe_at
        )

    def may_prove(self, arena: VramArena) -> bool:
        """Return whether to READ something into it now, to see that it comes."""
        if arena.proved or (arena.tried and not self._tries.allows(time.monotonic())):
            return False
        arena.tried = True
        return True

    def proved(self, arena: VramArena) -> None:
        """Note that what was READ into it was right."""
        with self._lock:
            self._tries.succeeded()
            self.reason = ""
            arena.proved = True

    def failed(self, reason: str, arena: VramArena | None = None) -> None:
        """Use no arena for a while."""
        with self._lock:
            if arena is not None:
                arena.proved = False
            known, self.reason = self.reason, reason
            self._tries.failed(time.monotonic())
        level = logging.DEBUG if reason == known else logging.WARNING
        log.log(level, "what is read through NIXL goes to host memory, not to VRAM: %s", reason)

    def bring(self, arena: VramArena, copies: Sequence[Copy]) -> None:
        """Copy from an arena what READs that have ended brought there, until it is in place.

        Raises `DeviceError` when the device refuses, and `InternalError` when it hangs: then what
        the copies write to can neither be used nor given back.
        """
        if not copies:
            return
        with arena.used():
            stream = self._begun()
            self.device.flush_rdma_writes()
            try:
                stream.copy_apart(copies)
            finally:  # some may be queued
                if not wait(stream.record(), time.monotonic() + CUDA_IPC_DRAIN_S):
                    with self._lock:
                        self._closed = True
                    raise InternalError(f"copies on the device hang for {CUDA_IPC_DRAIN_S} s")

    def clear(self, arena: VramArena, address: int, size_bytes: int) -> None:
        """Overwrite what was READ there before. Raises as `bring`."""
        self.bring(arena, [(address, address_of(self._kept(bytearray(size_bytes))), size_bytes)])

    def bytes_at(self, arena: VramArena, address: int, size_bytes: int) -> bytes:
        """Return what was READ there, in host memory. Raises as `bring`."""
        memory = self._kept(bytearray(size_bytes))
        self.bring(arena, [(address_of(memory), address, size_bytes)])
        return bytes(memory)

    def _kept(self, memory: bytearray) -> memoryview:
        """Keep host memory for a few copies at least, should a copy from or to it hang."""
        self._last.append(memoryview(memory))
        return self._last[-1]

    def checksums(self, payloads: Sequence[DeviceRange]) -> list[int]:
        """Return the checksum of each payload. Raises `DeviceError`."""
        return self._checksums.of([[(one.address, one.size_bytes)] for one in payloads])

    def _begun(self) -> Stream:
        with self._lock:
            if self._closed:
                raise DeviceError("this client is closed, or its device hangs")
            if self._stream is None:
                self._stream = self.device.stream()
            return self._stream

    def close(self) -> None:
        """Copy nothing any more. Safe to call twice."""
        with self._lock:
            hangs, self._closed = self._closed, True
            stream, self._stream = self._stream, None
        if stream is not None and not hangs:
            with contextlib.suppress(DeviceError):
                stream.close()
        self._checksums.close()
