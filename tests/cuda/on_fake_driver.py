"""Run by test_bindings.py, in a process whose libcuda.so.1 is fake_driver.cpp,
through the real cuda-python. The suites of a real device (tests/gpu) run there too."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
from contract.cuda import get, put

from kvstore.cuda.bindings import open_device
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


def test_a_device_that_maps_nothing_read_only_maps_it_all_the_same(monkeypatch) -> None:
    monkeypatch.setenv("FAKE_NO_READ_ONLY", "yes")
    device = open_device(0)
    memory = device.allocate(1)
    put(device, memory, b"there")
    shared = device.export(memory)
    view = device.open(shared)
    os.close(shared.fd)
    assert get(device, view, 5) == b"there"
    assert not device.maps_read_only
    device.close(view)
    device.free(memory)
    device.maps_read_only = True


def test_trap_memory_of_the_same_process_is_never_imported() -> None:
    """The driver promises it for other processes only; the stand-in refuses it."""
    owner, reader = open_device(0), open_device(0)
    memory = owner.allocate(100)
    shared = owner.export(memory)
    view = reader.open(shared)
    with pytest.raises(DeviceError, match="NOT_PERMITTED"):
        reader.open(shared._replace(name=b"another"))
    os.close(shared.fd)
    put(owner, memory, b"there")
    assert get(reader, view, 5) == b"there"
    reader.close(view)
    owner.free(memory)


def test_nothing_stays_mapped_when_access_is_refused(monkeypatch) -> None:
    device = open_device(0)
    before = len(device._mapped)
    real = device.driver.cuMemSetAccess

    def refused(*args):
        return (device.driver.CUresult.CUDA_ERROR_INVALID_DEVICE,)

    refused.__name__ = "cuMemSetAccess"
    monkeypatch.setattr(device.driver, "cuMemSetAccess", refused)
    with pytest.raises(DeviceError, match="cuMemSetAccess"):
        device.allocate(100)
    assert len(device._mapped) == before
    monkeypatch.setattr(device.driver, "cuMemSetAccess", real)


def test_what_rdma_wrote_is_flushed_where_the_device_does_not_order_it(monkeypatch) -> None:
    flushes, device = ctypes.CDLL("libcuda.so.1").fake_flushes, open_device(0)
    before = flushes()
    device.flush_rdma_writes()
    assert flushes() == before + 1
    monkeypatch.setenv("FAKE_RDMA_FLUSH_OPTIONS", "2")  # on streams alone
    with pytest.raises(DeviceError, match="flush"):
        device.flush_rdma_writes()
    monkeypatch.setenv("FAKE_RDMA_WRITES_ORDERING", "100")
    device.flush_rdma_writes()
    assert flushes() == before + 1
