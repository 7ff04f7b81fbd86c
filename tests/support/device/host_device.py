"""A device made of host memory: the kernel's own source, compiled as C++, and memmove.

What a real one does beside the caller is here kept in streams, of which something
is done now and then and the rest when somebody waits: whoever does not wait for
what is needed, or changes what is still to be read, gets wrong bytes.
"""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connector.copiers.cuda.copier import StagedCopy
from connector.copiers.cuda.kernel_plan import (
    PAGE_BYTES,
    STAGING_ALIGNMENT_BYTES,
    THREADS,
    HostPlace,
    Launch,
    apart,
)
from connector.copiers.cuda.nvrtc import SOURCE
from connector.copiers.cuda.page_lock import address_of

COMPILE_TIMEOUT_S = 100


@cache
def kernels() -> Any:
    """Compile the kernel as host code; skips where nothing can.

    An access that is not aligned to its word, which a device does not forgive, ends the
    process: see the compiler's flags.
    """
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tempfile.mkdtemp(prefix="kvstore-kernel-")
    library = Path(folder, "kernel.so")
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
    flags += ["-fsanitize=alignment,integer-divide-by-zero", "-fsanitize-undefined-trap-on-error"]
    source = Path(__file__).with_name("host_kernel.cpp")
    try:
        subprocess.run(
            [compiler, *flags, f'-DPAGED_COPY_CU="{SOURCE}"', "-o", library, source],
            check=True,
            timeout=COMPILE_TIMEOUT_S,
        )
        return ctypes.CDLL(str(library))
    finally:
        shutil.rmtree(folder)


def run_kernel(launch: Launch, table: memoryview) -> None:
    """Carry out `launch` over the rows in `table`."""
    shape = (ctypes.c_uint32 * 6)(*launch.shape)
    pages = ctypes.c_void_p(address_of(table))
    layers = ctypes.c_void_p(launch.layer_table)
    name = launch.kernel.encode()
    assert kernels().run(name, launch.blocks, THREADS, layers, pages, shape) == 0


class _Memory:
    """Bytes at an aligned address, full of what nobody wrote."""

    def __init__(self, size_bytes: int) -> None:
        self._raw = np.full(size_bytes + STAGING_ALIGNMENT_BYTES, 0xA5, np.uint8)
        start = self._raw.ctypes.data
        self.address = -(-start // STAGING_ALIGNMENT_BYTES) * STAGING_ALIGNMENT_BYTES


class Mark:
    """Whether a stream has come as far as when it was asked for."""

    reached = False

    def reach(self) -> None:
        self.reached = True


class HostStream:
    """Implements `DeviceStream`."""

    def __init__(self, device: HostDevice, eagerness: float) -> None:
        """`eagerness` is how likely it goes on while it is given more."""
        self._device = device
        self.eagerness = eagerness
        self.pending: deque[Callable[[], None] | Mark] = deque()
        """What is to be done; a mark of another stream is to be reached first."""

    def start(self, operation: Callable[[], None]) -> None:
        self._device.before_start()
        self.pending.append(operation)
        self._device.go_on()

    def mark(self, number: int) -> Mark:
        mark = Mark()
        self.start(mark.reach)
        return mark

    def follow(self, mark: Mark) -> None:
        self._device.before_start()
        self.pending.append(mark)

    def wait(self) -> None:
        while self.pending:
            self._device.do_some()

    def do_one(self) -> bool:
        """Do what is first; False when nothing can be done."""
        with self._device.lock:  # another thread may be at it
            while self.pending and isinstance(first := self.pending[0], Mark) and first.reached:
                self.pending.popleft()
            if not self.pending or isinstance(self.pending[0], Mark):
                return False
            operation = self.pending.popleft()
            assert not isinstance(operation, Mark)
            operation()
        return True


class HostLane:
    """Implements `DeviceLane`."""

    def __init__(self, device: HostDevice, buffers: int, buffer_bytes: int, pages_max: int) -> None:
        self._device = device
        self._memory = [_Memory(buffer_bytes) for _ in range(buffers)]
        self.buffers, self.buffer_bytes = [m.address for m in self._memory], buffer_bytes
        self.table = memoryview(bytearray(pages_max * PAGE_BYTES))
        self.kernels, self.copies = (HostStream(device, device.eagerness()) for _ in range(2))

    def launch(self, launch: Launch, row: int) -> None:
        self._device.launches += 1
        self.kernels.start(lambda: run_kernel(launch, self.table[row * PAGE_BYTES :]))

    def store(self, copies: Sequence[StagedCopy]) -> None:
        for place, staged in self._device.shuffled(copies):
            assert place.rows == 1
            self.copies.start(partial(_move, place.address, staged, place.row_bytes))

    def fetch(self, copies: Sequence[StagedCopy]) -> None:
        def copy(place: HostPlace, staged: int) -> None:
            for row in range(place.rows):
                source = place.address + row * place.pitch_bytes
                _move(staged + row * place.row_bytes, source, place.row_bytes)

        for place, staged in self._device.shuffled(copies):
            self.copies.start(partial(copy, place, staged))


def _move(target: int, source: int, size_bytes: int) -> None:
    ctypes.memmove(target, source, size_bytes)


class HostDevice:
    """Implements `Device`. The order in which its streams go on follows from `seed`."""

    def __init__(
        self,
        seed: int = 0,
        *,
        staging_bytes: int = 1 << 20,
        pages_max: int = 1 << 10,
        buffers: int = 3,
    ) -> None:
        kernels()
        self._random = random.Random(seed)
        self.saving = HostLane(self, buffers, staging_bytes, pages_max)
        self.loading = HostLane(self, buffers, staging_bytes, pages_max)
        self.compute: deque[Callable[[], None]] = deque()
        """What the engine has started."""
        self._computed = 0
        self._constants: list[_Memory] = []
        self.launches = 0
        self.before_start: Callable[[], None] = lambda: None
        self.distance = 0
        """From where host memory is to where the device reaches it."""
        self._users = 0
        self.lock = threading.RLock()

    @property
    def streams(self) -> list[HostStream]:
        return [stream for x in (self.saving, self.loading) for stream in (x.kernels, x.copies)]

    @property
    def busy(self) -> bool:
        return any(stream.pending for stream in self.streams)

    def go_on(self) -> None:
        """Have a stream do some of what it has, now and then."""
        for stream in self.streams:
            while self._random.random() < stream.eagerness and stream.do_one():
                pass

    def eagerness(self) -> float:
        return self._random.choice([0.01, 0.3, 0.7])

    def do_some(self) -> None:
        """Have some stream do what it has next."""
        with self.lock:
            streams = self._random.sample(self.streams, len(self.streams))
            done = any(stream.do_one() for stream in streams)
            assert done or not self.busy, "streams wait for each other"

    def shuffled(self, copies: Sequence[StagedCopy]) -> list[StagedCopy]:
        """Have what is given at once done in any order."""
        return self._random.sample(copies, len(copies))

    def constant(self, data: bytes) -> int:
        memory = _Memory(len(data))
        _move(memory.address, address_of(memoryview(data)), len(data))
        self._constants.append(memory)
        return memory.address

    @contextmanager
    def host_memory(self) -> Iterator[HostDevice]:
        with self.lock:
            self._users += 1
        try:
            yield self
        finally:
            with self.lock:
                self._users -= 1
                if not self._users:
                    assert not self.busy, "host memory was let go with copies under way"

    def address(self, view: memoryview) -> int:
        return address_of(view) + self.distance

    def apart(self, place: HostPlace) -> Iterator[tuple[int, HostPlace]]:
        """Split a place as if memory were locked in parts of a few KiB."""
        return apart(place, self._random.randrange(4096), self._random.randint(100, 5000))

    def mark_ready(self) -> int:
        return self._computed + len(self.compute)

    def wait_ready(self, token: int | None) -> None:
        while token is not None and self._computed < token:
            self.compute.popleft()()
            self._computed += 1
