"""What every `CudaDevice` promises. Subclasses give a `device` and a `recipe` for the same one in
another process."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from each_input import each

from kvstore.cuda.base import SHARED_NAME_BYTES, CudaDevice, Shared, address_of, wait
from kvstore.cuda.handover import hand_over, take_over
from kvstore.errors import DeviceError, UsageError

MIB = 1 << 20
PATIENCE_S = 60.0
"""A process that starts CUDA takes seconds."""
Recipe = tuple[str, Any]
spawn = multiprocessing.get_context("spawn")


def make(recipe: Recipe) -> CudaDevice:
    """The device of a recipe, in this process."""
    which, detail = recipe
    if which == "model":
        from kvstore.testing.cuda import ModelCuda

        return ModelCuda(Path(detail))
    from kvstore.cuda.bindings import open_device

    return open_device(int(detail))


def run(stream, *copies, timeout_s: float = PATIENCE_S) -> None:
    stream.copy(copies)
    assert wait(stream.record(), time.monotonic() + timeout_s)


def put(device: CudaDevice, address: int, data: bytes) -> None:
    host = memoryview(bytearray(data))
    stream = device.stream()
    run(stream, (address, address_of(host), len(data)))
    stream.close()


def get(device: CudaDevice, address: int, size_bytes: int) -> bytes:
    host = memoryview(bytearray(size_bytes))
    stream = device.stream()
    run(stream, (address_of(host), address, size_bytes))
    stream.close()
    return bytes(host)


def pull(recipe: Recipe, path: str, size_bytes: int, answers) -> None:
    """In another process: open, copy into memory of its own on the device, and send the bytes."""
    try:
        device = make(recipe)
        shared = take_over(Path(path), os.geteuid(), PATIENCE_S)
        theirs = device.open(shared)
        os.close(shared.fd)
        mine = device.allocate(size_bytes)
        stream = device.stream()
        run(stream, (mine, theirs, size_bytes))
        stream.close()
        answers.put((device.uuid, get(device, mine, size_bytes)))
        answers.put(("writes", not device.maps_read_only or _writes(device, theirs)))
        device.close(theirs)
        device.free(mine)
    except BaseException as e:
        answers.put(("failed", repr(e)))
        raise


def _writes(device: CudaDevice, address: int) -> bool:
    """Whether a write there is taken."""
    try:
        put(device, address, b"changed")
    except DeviceError:
        return False
    return True


@contextmanager
def handed_over(device: CudaDevice, address: int, path: Path) -> Iterator[None]:
    """Whoever connects to `path` meanwhile, once, gets that memory."""
    shared = device.export(address)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                hand_over(connection, shared)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        thread.join(PATIENCE_S)
    os.close(shared.fd)


class CudaContract:
    @pytest.fixture
    def device(self) -> Iterator[CudaDevice]:
        raise NotImplementedError

    @pytest.fixture
    def recipe(self) -> Recipe:
        raise NotImplementedError

    @pytest.fixture
    def memory(self, device: CudaDevice) -> Iterator[int]:
        address = device.allocate(4 * MIB)
        yield address
        device.free(address)

    @each("size", [1, 4097, MIB + 3, 4 * MIB])
    def test_bytes_go_to_the_device_and_come_back(self, device, memory, size: int) -> None:
        data = os.urandom(size)
        put(device, memory, data)
        assert get(device, memory, size) == data

    def test_a_batch_is_copied_in_order(self, device, memory) -> None:
        put(device, memory, b"a" * MIB + b"b" * MIB)
        stream = device.stream()
        run(stream, (memory + 2 * MIB, memory, MIB), (memory, memory + MIB, MIB))
        stream.close()
        assert get(device, memory, 3 * MIB) == b"b" * MIB + b"b" * MIB + b"a" * MIB

    def test_an_event_is_done_only_after_what_was_queued_before_it(self, device, memory) -> None:
        data = os.urandom(4 * MIB)
        put(device, memory, data)
        host = memoryview(bytearray(4 * MIB))
        stream = device.stream()
        stream.copy([(address_of(host), memory, 4 * MIB)])
        event = stream.record()
        give_up_at = time.monotonic() + PATIENCE_S
        while not event.done():
            assert time.monotonic() < give_up_at
        assert host == data
        stream.close()

    def test_an_event_of_an_empty_stream_is_done(self, device) -> None:
        stream = device.stream()
        assert wait(stream.record(), time.monotonic() + PATIENCE_S)
        stream.close()
        stream.close()

    def test_a_closed_stream_takes_nothing(self, device, memory) -> None:
        stream = device.stream()
        stream.close()
        with pytest.raises(DeviceError):
            stream.copy([(memory, memory, 1)])
        with pytest.raises(DeviceError):
            stream.record()

    def test_another_process_reads_exported_memory_and_cannot_change_it(
        self, device, memory, recipe, tmp_path
    ) -> None:
        data = os.urandom(3 * MIB + 17)
        put(device, memory, data)
        answers = spawn.Queue()
        path = tmp_path / "vram.sock"
        with handed_over(device, memory, path):
            arguments = (recipe, str(path), len(data), answers)
            child = spawn.Process(target=pull, args=arguments, daemon=True)
            child.start()
            try:
                uuid, got = answers.get(timeout=PATIENCE_S)
                assert uuid == device.uuid, got
                assert got == data
                assert answers.get(timeout=PATIENCE_S) == ("writes", False)
                child.join(PATIENCE_S)
                assert child.exitcode == 0
            finally:
                child.kill()
        assert get(device, memory, len(data)) == data

    def test_what_is_exported_says_how_large_it_is_and_whose(self, device, memory) -> None:
        first, again = device.export(memory), device.export(memory)
        assert len(first.name) == SHARED_NAME_BYTES
        assert first[:2] == again[:2]
        assert first.size_bytes >= 4 * MIB
        assert not os.get_inheritable(first.fd)
        for shared in (first, again):
            os.close(shared.fd)

    def test_ones_own_memory_is_opened_elsewhere_and_stays_when_it_is_freed(self, device) -> None:
        memory = device.allocate(MIB)
        put(device, memory, b"there")
        shared = device.export(memory)
        views = [device.open(shared), device.open(shared, writable=True)]
        os.close(shared.fd)
        assert len({memory, *views}) == 3
        put(device, views[1], b"THERE")
        assert get(device, memory, 5) == b"THERE"
        device.free(memory)
        assert [get(device, view, 5) for view in views] == [b"THERE"] * 2
        for view in views:
            device.close(view)

    def test_what_was_closed_or_freed_is_known_no_more(self, device) -> None:
        memory = device.allocate(MIB)
        shared = device.export(memory)
        view = device.open(shared)
        os.close(shared.fd)
        for undo, address in ((device.free, view), (device.close, memory)):
            with pytest.raises(UsageError, match=r"^address="):
                undo(address)
        for undo, address in ((device.close, view), (device.free, memory)):
            undo(address)
            with pytest.raises(UsageError, match=r"^address="):
                undo(address)

    def test_only_whole_allocations_of_its_own_are_exported(self, device, memory) -> None:
        host = memoryview(bytearray(100))
        for address in (memory + 512, address_of(host), 0):
            with pytest.raises(UsageError, match=r"^address="):
                device.export(address)
            with pytest.raises(UsageError, match=r"^address="):
                device.free(address)

    def test_a_descriptor_of_anything_else_is_refused(self, device, tmp_path) -> None:
        other = os.open(tmp_path, os.O_RDONLY)
        for fd in (other, 1 << 20):
            with pytest.raises(DeviceError):
                device.open(Shared(b"n" * SHARED_NAME_BYTES, 4 * MIB, fd))
        os.close(other)

    def test_a_device_reaches_itself(self, device) -> None:
        assert device.reaches(device.uuid)

    def test_registered_host_memory_is_copied_from_and_to(self, device, memory) -> None:
        data = os.urandom(2 * MIB)
        host = memoryview(bytearray(2 * MIB + 4096))
        start = -address_of(host) % 4096
        aligned = host[start : start + 2 * MIB]
        aligned[:] = data
        address = address_of(aligned)
        device.register_host(address, 2 * MIB)
        with pytest.raises(DeviceError):
            device.register_host(address, 2 * MIB)
        stream = device.stream()
        run(stream, (memory, address, 2 * MIB))
        ctypes.memset(address, 0, 2 * MIB)
        run(stream, (address, memory, 2 * MIB))
        stream.close()
        device.unregister_host(address)
        with pytest.raises(DeviceError):
            device.unregister_host(address)
        assert aligned == data

    def test_nothing_and_too_much_cannot_be_allocated(self, device) -> None:
        from kvstore.errors import NoSpaceError

        with pytest.raises(UsageError, match=r"^size_bytes="):
            device.allocate(0)
        with pytest.raises(NoSpaceError):
            device.allocate(1 << 45)
