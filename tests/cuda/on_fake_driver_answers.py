"""Run by test_bindings.py, in a process whose libcuda.so.1 is fake_driver.cpp: it takes and refuses
what a driver does, so that a mistake in what is called shows without a device."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator

import pytest
from contract.cuda import get, put
from own_python import printed

from kvstore.cuda.base import address_of, wait
from kvstore.cuda.batch import ANY_ORDER, OVERLAP, VARIABLE, batch_copies
from kvstore.cuda.bindings import BindingsDevice, open_device
from kvstore.errors import DeviceError

PAGE = mmap.PAGESIZE
PATIENCE_S = 60.0


@pytest.fixture
def device() -> BindingsDevice:
    return open_device(0)


@pytest.fixture
def memory(device: BindingsDevice) -> Iterator[int]:
    address = device.allocate(1 << 21)
    yield address
    device.free(address)


def mapped(access: int = mmap.PROT_READ | mmap.PROT_WRITE) -> tuple[mmap.mmap, int]:
    """Two pages of memory, and their address."""
    fd = os.memfd_create("pages")
    os.truncate(fd, 2 * PAGE)
    pages = mmap.mmap(fd, 2 * PAGE, mmap.MAP_SHARED, access)
    os.close(fd)
    import numpy as np

    return pages, int(np.frombuffer(pages, np.uint8).__array_interface__["data"][0])


class TestLocking:
    def test_a_read_only_mapping_is_locked_as_such_or_not_at_all(
        self, device: BindingsDevice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pages, address = mapped(mmap.PROT_READ)
        with pytest.raises(DeviceError, match="INVALID_VALUE"):
            device.register_host(address, len(pages))
        with pytest.raises(DeviceError, match="NOT_SUPPORTED"):
            device.register_host(address, len(pages), read_only=True)
        monkeypatch.setenv("FAKE_LOCKS_READ_ONLY", "1")
        device.register_host(address, len(pages), read_only=True)
        device.unregister_host(address)

    def test_what_is_not_mapped_cannot_be_locked(self, device: BindingsDevice) -> None:
        pages, address = mapped()
        with pytest.raises(DeviceError, match="INVALID_VALUE"):
            device.register_host(PAGE, PAGE)
        device.register_host(address, len(pages))
        device.unregister_host(address)


@pytest.mark.parametrize("words", ["", ANY_ORDER, OVERLAP, f"{ANY_ORDER},{OVERLAP}"])
def test_batches_are_taken_with_every_attribute_that_the_settings_give(
    device: BindingsDevice, memory: int, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setenv(VARIABLE, words)
    batch = batch_copies(device.driver)
    assert batch is not None
    put(device, memory, bytes(range(256)) * 16)
    stream = device.stream()
    with device.current():
        copies = [(memory + 4096 + i * 64, memory + i * 64, 64) for i in range(64)]
        assert batch(copies, int(stream._handle), complete=True) == 0
    assert wait(stream.record(), time.monotonic() + PATIENCE_S)
    assert get(device, memory + 4096, 4096) == bytes(range(256)) * 16
    stream.close()


def batches() -> tuple[int, int]:
    """Calls of cuMemcpyBatchAsync so far, and their copies."""
    found = ctypes.c_int(), ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").fake_batches(*map(ctypes.byref, found))
    return found[0].value, found[1].value


def test_blocks_of_another_process_are_pulled_by_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from benchmarks import gpu_ipc

    monkeypatch.setattr(gpu_ipc, "SHAPES", ((16, 64 << 10),))
    monkeypatch.setattr(gpu_ipc, "REPETITIONS", 1)
    monkeypatch.setattr(gpu_ipc, "WARM_UP", 1)
    before = batches()
    (pull,) = gpu_ipc.run()
    assert pull.blocks == 16
    calls, copies = (now - then for now, then in zip(batches(), before, strict=True))
    # Two reads; neighbours that are neighbours in the destination, too, are one copy.
    assert calls == 2
    assert 2 * 12 < copies <= 2 * 16


@pytest.mark.parametrize(("copies", "together"), [(1, False), (3, False), (4, True), (2000, True)])
def test_many_copies_apart_are_few_calls(
    device: BindingsDevice, memory: int, copies: int, together: bool
) -> None:
    data = os.urandom(copies * 64)
    put(device, memory, data)
    (before, _), stream = batches(), device.stream()
    there = memory + (1 << 20)
    stream.copy_apart([(there + i * 64, memory + i * 64, 64) for i in range(copies)])
    assert wait(stream.record(), time.monotonic() + PATIENCE_S)
    assert get(device, there, len(data)) == data
    assert batches()[0] - before == (-(-copies // 1024) if together else 0)
    stream.close()


def in_a_process(body: str, **variables: str) -> str:
    """What a process prints whose device may be lost at the end of it."""
    code = (
        "import ctypes, mmap\n"
        "from kvstore.cuda.base import address_of\n"
        "from kvstore.cuda.batch import batch_copies\n"
        "from kvstore.cuda.bindings import open_device\n"
        "from kvstore.errors import DeviceError\n"
        "device, fake = open_device(0), ctypes.CDLL('libcuda.so.1')\n"
        "there, pages = device.allocate(1 << 21), mmap.mmap(-1, 1 << 16)\n"
        "at, stream = address_of(memoryview(pages)), device.stream()\n"
        "copies = [(there + i * 512, at + i * 512, 512) for i in range(8)]\n"
        "def tried(call, *args):\n"
        "    try:\n"
        "        return call(*args) or 'well'\n"
        "    except DeviceError as e:\n"
        "        return str(e).rpartition('CUDA_ERROR_')[2]\n"
        "def batched():\n"
        "    with device.current():\n"
        "        device.copy_many(copies, stream._handle)\n" + body
    )
    return printed(code, env=os.environ | variables)


LOST = "well ILLEGAL_ADDRESS ILLEGAL_ADDRESS\n"
ENDED = (
    "event, first = stream.record(), tried(batched)\n"
    "then = tried(lambda: [tried(stream.record().done) for _ in range(40)][-1])\n"
    "print(first, then, tried(device.allocate, 1 << 21))\n"
)


def test_after_a_fault_every_call_of_the_process_fails() -> None:
    body = "fake.fake_fault()\nprint(*(tried(device.stream) for _ in range(2)))\n"
    assert in_a_process(body) == "ILLEGAL_ADDRESS ILLEGAL_ADDRESS\n"


def test_a_driver_may_fault_where_memory_of_a_batch_is_not_locked() -> None:
    assert in_a_process(ENDED, FAKE_UNLOCKED_BATCHES="fault") == LOST


def test_a_batch_faults_where_the_device_takes_no_addresses_of_locked_memory() -> None:
    locked = "device.register_host(at, 1 << 16)\n"
    # The device as the product sees it has no call for many there; here it is forced upon it.
    forced = "import os\ndevice.batch\nos.environ['FAKE_HOST_POINTERS'] = '0'\n"
    assert in_a_process(locked + forced + ENDED) == LOST
    assert not in_a_process(locked + ENDED, FAKE_HOST_POINTERS="0").startswith(LOST[:9])


def test_memory_that_is_unlocked_under_a_copy_may_lose_the_device() -> None:
    body = (
        "device.register_host(at, 1 << 16)\nbatched()\n"
        "gone = tried(device.unregister_host, at)\n"
        "then = tried(lambda: [tried(stream.record().done) for _ in range(40)][-1])\n"
        "print(gone, then)\n"
    )
    assert in_a_process(body, FAKE_UNLOCK_WAITS="0") == "well ILLEGAL_ADDRESS\n"
    assert in_a_process(body) == "well well\n"


def test_memory_without_rdma_is_made_too(
    device: BindingsDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, real = device.driver, device._has
    without = driver.CUdevice_attribute
    without = without.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
    monkeypatch.setattr(device, "_has", lambda one: one != without and real(one))
    device.free(device.allocate(100))


def test_a_copy_apart_to_memory_of_the_host_has_its_bytes(
    device: BindingsDevice, memory: int
) -> None:
    data, host = os.urandom(8 * 512), memoryview(bytearray(8 * 512))
    put(device, memory, data)
    stream = device.stream()
    stream.copy_apart([(address_of(host) + i * 512, memory + i * 512, 512) for i in range(8)])
    assert wait(stream.record(), time.monotonic() + PATIENCE_S)
    assert host == data
    stream.close()
