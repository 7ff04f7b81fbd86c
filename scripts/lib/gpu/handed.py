"""Memory of a device in two processes, one of which ends at a bad moment."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu.driver import LARGE_BYTES, Gpu
from gpu.rows import Say
from kvstore.cuda.base import Shared

PATIENCE_S = 30.0
TURNS = 5
OURS, THEIRS = 0x11, 0xEE
spawn = multiprocessing.get_context("spawn")


@contextlib.contextmanager
def _process(work: Any, *args: Any) -> Iterator[Any]:
    """Run `work` in a process of its own; it is killed at the end."""
    process = spawn.Process(target=work, args=args, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(PATIENCE_S)


def _fill(gpu: Gpu, address: int, byte: int) -> None:
    gpu.call(gpu.driver.cuMemsetD8, address, byte, LARGE_BYTES)
    gpu.call(gpu.driver.cuCtxSynchronize)


def _wrong(gpu: Gpu, address: int, byte: int) -> int:
    """Return how many bytes there are other ones."""
    seen = bytearray(LARGE_BYTES)
    stream, to = gpu.stream(), ctypes.addressof((ctypes.c_char * LARGE_BYTES).from_buffer(seen))
    gpu.copy([(to, address, LARGE_BYTES)], stream)
    gpu.wait(stream)
    return LARGE_BYTES - seen.count(byte)


def _send(folder: str, gpu: Gpu, address: int) -> None:
    """Hand memory to the process that connects."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{folder}/memory")
        listening.listen(1)
        listening.settimeout(PATIENCE_S)
        connection, _ = listening.accept()
    shared = gpu.device.export(address)
    with connection:
        socket.send_fds(connection, [shared.name], [shared.fd])
    os.close(shared.fd)


def _receive(folder: str) -> Shared:
    end_at = time.monotonic() + PATIENCE_S
    while not Path(folder, "memory").exists() and time.monotonic() < end_at:
        time.sleep(0.01)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(f"{folder}/memory")
        name, (fd,), _, _ = socket.recv_fds(connection, 16, 1)
    return Shared(name, LARGE_BYTES, fd)


def _own(folder: str) -> None:
    """Be the owner of memory, which is killed once another process has it."""
    gpu = Gpu()
    address = gpu.device.allocate(LARGE_BYTES)
    _fill(gpu, address, OURS)
    _send(folder, gpu, address)
    time.sleep(PATIENCE_S)


def outlives(say: Say) -> None:
    """Read memory of another process, and once more when that one was killed."""
    gpu = Gpu()
    with tempfile.TemporaryDirectory() as folder, _process(_own, folder) as owner:
        there = gpu.device.open(_receive(folder))
        say("memory of another process is mapped read-only", gpu.device.maps_read_only)
        say("other bytes than its owner wrote", _wrong(gpu, there, OURS), most=0)
        owner.kill()
        owner.join(PATIENCE_S)
        say("the same when its owner was killed", _wrong(gpu, there, OURS), most=0)


def _write(folder: str) -> None:
    """Be a writer: hold a lock as an engine holds its lease, and write without end."""
    gpu = Gpu()
    there = gpu.device.open(_receive(folder), writable=True)
    mine = gpu.device.allocate(LARGE_BYTES)
    _fill(gpu, mine, THEIRS)
    # After the device was opened: the kernel closes a dying process's files in their order.
    with Path(folder, "lease").open("w") as lease:
        fcntl.flock(lease, fcntl.LOCK_EX)
        Path(folder, "writes").touch()
        stream, parent = gpu.stream(), os.getppid()
        while os.getppid() == parent:
            gpu.copy([(there, mine, LARGE_BYTES)] * 100, stream)
            gpu.wait(stream)


def sigkill(say: Say) -> None:
    """A writer is killed amid copies: does any byte of it come after its lock is free?"""
    gpu, late = Gpu(), 0
    memory = gpu.device.allocate(LARGE_BYTES)
    for turn in range(TURNS):
        with tempfile.TemporaryDirectory() as folder, _process(_write, folder) as writer:
            _send(folder, gpu, memory)
            end_at = time.monotonic() + PATIENCE_S
            while not Path(folder, "writes").exists() and time.monotonic() < end_at:
                time.sleep(0.01)
            time.sleep(0.3)
            writer.kill()
            began = time.perf_counter()
            with Path(folder, "lease").open() as lease:
                while time.monotonic() < end_at:
                    with contextlib.suppress(OSError):
                        fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
            free_ms = round(1e3 * (time.perf_counter() - began), 2)
            _fill(gpu, memory, OURS)  # as who is given its slots at once
            time.sleep(0.5)
            wrong = _wrong(gpu, memory, OURS)
            late += wrong > 0
            say(f"turn {turn}: bytes that came late", wrong, lock_free_ms=free_ms)
    say("turns in which a killed writer wrote after its lock was free", late, most=0)
