"""The contract suite over the model."""

import os
import time

import pytest
from contract.cuda import MIB, CudaContract, get, put

from kvstore.cuda.base import address_of, wait
from kvstore.errors import DeviceError
from kvstore.testing.cuda import ModelCuda


class TestModel(CudaContract):
    @pytest.fixture
    def device(self, tmp_path):
        return ModelCuda(tmp_path)

    @pytest.fixture
    def recipe(self, tmp_path):
        return ("model", str(tmp_path))


def test_a_copy_is_not_done_when_it_is_queued(tmp_path):
    device = ModelCuda(tmp_path)
    memory = device.allocate(MIB)
    put(device, memory, b"x" * MIB)
    host = memoryview(bytearray(MIB))
    device.hold.clear()
    stream = device.stream()
    stream.copy([(address_of(host), memory, MIB)])
    event = stream.record()
    assert not wait(event, time.monotonic() + 0.05)
    assert host == bytes(MIB)
    device.hold.set()
    assert wait(event, time.monotonic() + 60)
    assert host == b"x" * MIB
    stream.close()


def test_what_was_freed_stays_for_those_who_have_it_open(tmp_path):
    owner, reader = ModelCuda(tmp_path), ModelCuda(tmp_path)
    memory = owner.allocate(MIB)
    put(owner, memory, b"x" * MIB)
    shared = owner.export(memory)
    theirs = reader.open(shared)
    os.close(shared.fd)
    assert reader.mapped == 1
    owner.free(memory)
    assert get(reader, theirs, MIB) == b"x" * MIB
    with pytest.raises(DeviceError):
        put(reader, theirs, b"y")
    reader.close(theirs)
    assert reader.mapped == 0


def test_memory_of_another_box_is_refused(tmp_path):
    owner, far = ModelCuda(tmp_path), ModelCuda(tmp_path / "other box")
    shared = owner.export(owner.allocate(MIB))
    with pytest.raises(DeviceError):
        far.open(shared)
    os.close(shared.fd)


def test_addresses_that_are_no_memory_of_the_device_are_refused(tmp_path):
    device = ModelCuda(tmp_path)
    memory = device.allocate(MIB)
    host = memoryview(bytearray(MIB))
    stream = device.stream()
    with pytest.raises(DeviceError):
        stream.copy([(memory + 1, memory + MIB, MIB)])
    with pytest.raises(DeviceError):
        stream.copy([(address_of(host), address_of(host), MIB)])
    stream.close()


def test_a_broken_device_says_so(tmp_path):
    device = ModelCuda(tmp_path)
    memory = device.allocate(MIB)
    stream = device.stream()
    event = stream.record()
    device.broken = True
    with pytest.raises(DeviceError):
        event.done()
    with pytest.raises(DeviceError):
        stream.copy([(memory, memory, 1)])
    stream.close()


def test_copies_apart_come_in_any_order_and_all_before_a_refused_one(tmp_path):
    device = ModelCuda(tmp_path)
    memory = device.allocate(64)
    host = memoryview(bytearray(64))
    stream = device.stream()
    copies = [(address_of(host) + i, memory + i, 1) for i in range(32)]
    with pytest.raises(DeviceError):
        stream.copy_apart([*copies, (memory + 1, 8, 1), (address_of(host) + 40, memory, 1)])
    assert device.queued == 32
    # Whoever lets one copy of a batch read what another one writes finds out.
    last, seen = memory + 63, set()
    for _ in range(100):
        put(device, memory, bytes(range(64)))
        chain = [(memory + i + 1, memory + i, 1) for i in range(63)]
        stream.copy_apart(chain)
        assert wait(stream.record(), time.monotonic() + 60)
        seen.add(get(device, last, 1))
    assert len(seen) > 1
    stream.close()
