"""Computes the checksums of payloads that lie in a device's memory: the bytes are copied to the
host and hashed there, so that it is the same number as for a block in host memory.

Copies go to page-locked memory of its own, in two halves: one is hashed while the other fills.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import xxhash

from kvstore.cuda.base import CudaDevice, CudaEvent, Stream, address_of, wait
from kvstore.errors import DeviceError
from kvstore.limits import CUDA_IPC_DRAIN_S

HALF_BYTES = 4 << 20
HALVES = 2

_hanging: list[memoryview] = []
"""Memory that a copy may still write to; it is kept forever."""

Extent = tuple[int, int]
"""(address on the device, bytes)"""


class _Part(NamedTuple):
    payload: int
    """The number of the payload that it belongs to."""
    address: int
    size_bytes: int


class DeviceChecksums:
    """Computes checksums of a device's memory. Thread-safe; one computation at a time."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._staging = memoryview(b"")
        self._locked = False
        self._hangs = False
        self._closed = False

    def of(self, payloads: Sequence[Sequence[Extent]]) -> list[int]:
        """Return the xxh3-64 of each payload, whose bytes are those of its extents one after the
        other.

        What wrote them is done, not only queued. Raises `DeviceError` when the device refuses, has
        not copied a part within `CUDA_IPC_DRAIN_S`, or did not before.
        """
        if not self._lock.acquire(timeout=CUDA_IPC_DRAIN_S):
            raise DeviceError("copies to be checked hang")
        try:
            return self._of(payloads)
        finally:
            self._lock.release()

    def _of(self, payloads: Sequence[Sequence[Extent]]) -> list[int]:
        stream = self._begun()
        digests = [xxhash.xxh3_64() for _ in payloads]
        flying: deque[tuple[memoryview, list[_Part], CudaEvent]] = deque()
        try:
            for number, parts in enumerate(_windows(payloads)):
                if len(flying) == HALVES:
                    self._hash(digests, *flying.popleft())
                at = number % HALVES * HALF_BYTES
                half = self._staging[at : at + HALF_BYTES]
                to, copies = address_of(half), []
                for part in parts:
                    copies.append((to, part.address, part.size_bytes))
                    to += part.size_bytes
                flying.append((half, parts, self._queued(stream, copies)))
            while flying:
                self._hash(digests, *flying.popleft())
        finally:
            # Nothing may be copied here, or from there, once this has returned.
            while flying and not self._hangs:
                with contextlib.suppress(DeviceError):
                    self._wait(flying.popleft()[2])
        return [digest.intdigest() for digest in digests]

    def _queued(self, stream: Stream, copies: Sequence[tuple[int, int, int]]) -> CudaEvent:
        try:
            stream.copy(copies)
        except DeviceError:
            self._wait(stream.record())  # some may be queued
            raise
        return stream.record()

    def _hash(
        self,
        digests: Sequence[xxhash.xxh3_64],
        half: memoryview,
        parts: list[_Part],
        event: CudaEvent,
    ) -> None:
        self._wait(event)
        at = 0
        for part in parts:
            digests[part.payload].update(half[at : at + part.size_bytes])
            at += part.size_bytes

    def _wait(self, event: CudaEvent) -> None:
        if not wait(event, time.monotonic() + CUDA_IPC_DRAIN_S):
            self._hangs = True
            _hanging.append(self._staging)
            raise DeviceError(f"copies to be checked hang for {CUDA_IPC_DRAIN_S} s")

    def _begun(self) -> Stream:
        if self._hangs or self._closed:
            raise DeviceError("nothing is checked any more: closed, or a copy hangs")
        if self._stream is None:
            self._stream = self._device.stream()
            self._staging = memoryview(mmap.mmap(-1, HALVES * HALF_BYTES))
            with contextlib.suppress(DeviceError):  # then copies are slower
                self._device.register_host(address_of(self._staging), len(self._staging))
                self._locked = True
        return self._stream

    def close(self) -> None:
        """Compute nothing any more. Safe to call twice."""
        with self._lock:
            self._closed = True
            stream, self._stream = self._stream, None
            if stream is None or self._hangs:
                return
            with contextlib.suppress(DeviceError):
                stream.close()
            if self._locked:
                with contextlib.suppress(DeviceError):
                    self._device.unregister_host(address_of(self._staging))


def _windows(payloads: Sequence[Sequence[Extent]]) -> Iterator[list[_Part]]:
    """Yield all ranges in order, cut so that each list has at most `HALF_BYTES`."""
    parts: list[_Part] = []
    room = HALF_BYTES
    for number, extents in enumerate(payloads):
        for address, length in extents:
            at, left = address, length
            while left:
                size_bytes = min(left, room)
                parts.append(_Part(number, at, size_bytes))
                at, left, room = at + size_bytes, left - size_bytes, room - size_bytes
                if not room:
                    yield parts
                    parts, room = [], HALF_BYTES
    if parts:
        yield parts
