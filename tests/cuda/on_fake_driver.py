"""Run by test_bindings.py, in a process whose libcuda.so.1 is tests/support/fake_driver.cpp,
through the real cuda-python. The suites of a real device (tests/gpu) run there too."""

from __future__ import annotations

import threading

import pytest
from contract.cuda import put

from kvstore.cuda.bindings import ALLOCATION_BYTES, open_device
from kvstore.errors import DeviceError


def context_and_mode() -> tuple[int, int]:
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    mode = driver.cuThreadExchangeStreamCaptureMode(relaxed)[1]
    driver.cuThreadExchangeStreamCaptureMode(mode)
    return int(driver.cuCtxGetCurrent()[1]), int(mode)


def test_trap_a_thread_without_a_context_has_none_afterwards() -> None:
    """One of device 0, made on the way, costs each worker of a box memory there."""
    found = []

    def work() -> None:
        device = open_device(1)
        memory = device.allocate(100)
        put(device, memory, b"there")
        with pytest.raises(DeviceError):
            device.unregister_host(4096)
        device.free(memory)
        found.append(context_and_mode())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(0, 0)]


def test_the_uuid_is_whole_whatever_bytes_it_has() -> None:
    assert open_device(1).uuid == bytes([*(i % 5 * 60 for i in range(15)), 1]).hex()


def test_another_visible_device_is_asked_about_and_a_hidden_one_is_not() -> None:
    one, other = open_device(0), open_device(1)
    assert one.reaches(one.uuid)
    assert not one.reaches(other.uuid)
    assert one.reaches("hidden")


def test_an_allocation_shares_no_piece_of_memory_with_another() -> None:
    device = open_device(0)
    memory = device.allocate(1)
    put(device, memory + ALLOCATION_BYTES - 5, b"there")
    device.free(memory)


def test_memory_of_the_same_process_opens_as_itself_whoever_asks() -> None:
    owner, reader = open_device(0), open_device(0)
    memory = owner.allocate(100)
    assert reader.open(owner.export(memory)) == memory
    reader.close(memory)
    owner.free(memory)
