"""A device made of host memory: the kernel's own source, compiled as C++, and memmove.

What a real one does beside the caller is here kept in queues, of which something
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
    """The kernel as host code; skips where nothing can compile it.

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


class _Memory:
    """Bytes at an aligned address, full of what nobody wrote."""

    def __init__(self, size_bytes: int) -> None:
        self._raw = np.full(size_bytes + STAGING_ALIGNMENT_BYTES, 0xA5, np.uint8)
        start = self._raw.ctypes.data
        self.address = -(-start // STAGING_ALIGNMENT_BYTES) * STAGING_ALIGNMENT_BYTES


class HostQueue:
    """Implements `DeviceQueue`."""

    def __init__(self, device: HostDevice, staging_bytes: int, pages_max: int) -> None:
        self._device = device
        self._memory = _Memory(staging_bytes)
        self.staging, self.staging_bytes = self._memory.address, staging_bytes
        self.table = memoryview(bytearray(pages_max * PAGE_BYTES))
        self.pending: deque[Callable[[], None]] = deque()

    def launch(self, launch: Launch) -> None:
        def run() -> None:
            shape = (ctypes.c_uint32 * 6)(*launch.shape)
            pages = ctypes.c_void_p(address_of(self.table))
            layers = ctypes.c_void_p(launch.layer_table)
            name = launch.kernel.encode()
            assert kernels().run(name, launch.blocks, THREADS, layers, pages, shape) == 0

        self._device.launches += 1
        self._start(run)

    def store(self, target: HostPlace, source: int) -> None:
        assert target.rows == 1
        self._start(lambda: _move(target.address, source, target.row_bytes))

    def fetch(self, target: int, source: HostPlace) -> None:
        def copy() -> None:
            for row in range(source.rows):
                place = source.address + row * source.pitch_bytes
                _move(target + row * source.row_bytes, place, source.row_bytes)

        self._start(copy)

    def _start(self, operation: Callable[[], None]) -> None:
        self._device.before_start()
        self.pending.append(operation)
        self._device.go_on()

    def wait(self) -> None:
        while self.do_one():
            pass

    def do_one(self) -> bool:
        """Do what is first in the queue; False when nothing is."""
        with self._device.lock:  # another thread may be at it
            if self.pending:
                self.pending.popleft()()
                return True
        return False


def _move(target: int, source: int, size_bytes: int) -> None:
    ctypes.memmove(target, source, size_bytes)


class HostDevice:
    """Implements `Device`. The order in which its queues go on follows from `seed`."""

    def __init__(
        self, seed: int = 0, *, staging_bytes: int = 1 << 20, pages_max: int = 1 << 10
    ) -> None:
        kernels()
        self._random = random.Random(seed)
        self.saving = [HostQueue(self, staging_bytes, pages_max) for _ in range(2)]
        self.loading = [HostQueue(self, staging_bytes, pages_max) for _ in range(2)]
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
    def busy(self) -> bool:
        return any(queue.pending for queue in (*self.saving, *self.loading))

    def go_on(self) -> None:
        """Now and then a queue does some of what it has."""
        for queue in (*self.saving, *self.loading):
            while self._random.random() < 0.3 and queue.do_one():
                pass

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
        """As if memory were locked in parts of a few KiB."""
        return apart(place, self._random.randrange(4096), self._random.randint(100, 5000))

    def mark_ready(self) -> int:
        return self._computed + len(self.compute)

    def wait_ready(self, token: int | None) -> None:
        while token is not None and self._computed < token:
            self.compute.popleft()()
            self._computed += 1
