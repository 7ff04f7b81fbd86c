"""Calls of the CUDA driver for the probes, on the first device, and memory to call it with."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from kvstore.cuda.batch import ANY_ORDER, OVERLAP, VARIABLE, batch_copies
from kvstore.cuda.bindings import open_device

MIB, GIB = 1 << 20, 1 << 30
LARGE_BYTES = int(os.environ.get("GPU_PROBE_BYTES", str(256 * MIB)))
"""What is copied where only the bus, or the device's memory, is to be the limit."""
PORTABLE, READ_ONLY = 1, 8
"""Flags of cuMemHostRegister."""
Copies = Sequence[tuple[int, int, int]]
"""(to, from, bytes)."""


class Gpu:
    """Makes calls of the driver in the calling thread, in the context that the product uses."""

    def __init__(self) -> None:
        self.device = open_device(0)
        self.device.enter()
        self.driver, self.call = self.device.driver, self.device.call

    def answer(self, function: Callable[..., Any], *args: Any) -> str:
        """Return what the driver answers, by name."""
        error, *_ = function(*args)
        return str(error.name).removeprefix("CUDA_ERROR_")

    def attribute(self, name: str) -> int | None:
        """Return an attribute of the device; None where these bindings do not know it."""
        known = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        return None if known is None else int(self.call(self.driver.cuDeviceGetAttribute, known, 0))

    def memory(self, size_bytes: int) -> int:
        """Return new memory of the device. The process's end gives it back."""
        return int(self.call(self.driver.cuMemAlloc, size_bytes))

    def stream(self) -> int:
        flags = int(self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return int(self.call(self.driver.cuStreamCreate, flags))

    def event(self, stream: int) -> Any:
        """Return an event for all that is queued on the stream."""
        event = self.call(self.driver.cuEventCreate, 2)  # without times
        self.call(self.driver.cuEventRecord, event, stream)
        return event

    def wait(self, stream: int) -> None:
        event = self.event(stream)
        self.call(self.driver.cuEventSynchronize, event)
        self.call(self.driver.cuEventDestroy, event)

    def copy(self, copies: Copies, stream: int) -> None:
        """Queue copies, by a call each."""
        for to, source, size_bytes in copies:
            self.call(self.driver.cuMemcpyAsync, to, source, size_bytes, stream)

    def lock(self, address: int, size_bytes: int) -> None:
        """Page-lock memory as the product does."""
        self.call(self.driver.cuMemHostRegister, address, size_bytes, PORTABLE)

    def batch(self, order: str = "stream", overlap: bool = False) -> Callable[..., str] | None:
        """Return a call for many copies with these settings, which returns the driver's answer."""
        words = [ANY_ORDER] * (order == "any") + [OVERLAP] * overlap
        os.environ[VARIABLE] = ",".join(words)
        many = batch_copies(self.driver)
        if many is None:
            return None

        def call(copies: Copies, stream: int) -> str:
            answer = self.driver.CUresult(many(copies, stream, complete=True))
            return str(answer.name).removeprefix("CUDA_ERROR_")

        return call


def address_of(memory: Any) -> int:
    """Return the address of a buffer, of a read-only one too."""
    import numpy as np

    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


class Shared:
    """A file in /dev/shm, mapped as a node's segment is: to write, to read, and to write again.
    It is mapped as long as this object is there."""

    def __init__(self, size_bytes: int, *, populated: bool = True) -> None:
        with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="kvstore-probe-") as file:
            if populated:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
            else:
                file.truncate(size_bytes)
            self.mapping, self.twin = (mmap.mmap(file.fileno(), size_bytes) for _ in range(2))
            access = mmap.PROT_READ
            self.read_only = mmap.mmap(file.fileno(), size_bytes, mmap.MAP_SHARED, access)
        self.address = address_of(self.mapping)


def timed(work: Callable[[], object], repetitions: int = 9, warm_up: int = 2) -> float:
    """Return the median of the seconds that `work` takes."""
    took = []
    for turn in range(warm_up + repetitions):
        began = time.perf_counter()
        work()
        if turn >= warm_up:
            took.append(time.perf_counter() - began)
    return median(took)
