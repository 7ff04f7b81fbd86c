"""A store whose saves go to VRAM first, over the model of a device."""

import os
import time

import pytest
from contract.cuda import get, put
from redis_servers import wait_until
from stores import NodeThread

from connector.worker.vram import VramStore
from kvstore import PutStatus
from kvstore.spi import (
    BlockSession,
    BlockStore,
    DeviceRange,
    DeviceReservation,
    NodeUnavailableError,
)
from kvstore.testing.cuda import ModelCuda

MIB = 1 << 20
SIZE = 100_000
NAMESPACE = 7
PATIENCE_S = 60.0


@pytest.fixture
def node(redis_server):
    with NodeThread(redis_server, size_bytes=64 * MIB) as node:
        yield node


@pytest.fixture
def device(tmp_path):
    return ModelCuda(tmp_path)


@pytest.fixture
def store(node, device):
    session = BlockSession(**node.client_options, device=device)
    store: BlockStore = VramStore(session, device, MIB)
    yield store
    store.close()


@pytest.fixture
def reader(node, tmp_path):
    """Another engine's, which keeps nothing in VRAM itself."""
    device = ModelCuda(tmp_path)
    store = VramStore(BlockSession(**node.client_options, device=device), device, 0)
    yield store
    store.close()


def keys(count):
    tag = os.urandom(8)
    return [tag + os.urandom(24) for _ in range(count)]


def fill(device, buffer, payload):
    if isinstance(buffer, DeviceRange):
        put(device, buffer.address, payload)
    else:
        buffer[:] = payload


def bytes_of(device, buffer):
    if isinstance(buffer, DeviceRange):
        return get(device, buffer.address, len(buffer))
    return bytes(buffer)


def save(store, device, payloads):
    """Where each block went: True for VRAM."""
    reservations = store.reserve(list(payloads), SIZE, NAMESPACE)
    for reservation in reservations:
        assert len(reservation.buffer) == SIZE
        fill(device, reservation.buffer, payloads[reservation.key])
    assert all(store.commit(reservations))
    return [isinstance(r.buffer, DeviceRange) for r in reservations]


def payloads_of(count):
    return {key: os.urandom(SIZE) for key in keys(count)}


def test_saves_go_to_vram_and_what_finds_no_slot_there_to_host_memory(store, device, reader):
    payloads = payloads_of(14)
    went = save(store, device, payloads)
    assert any(went)
    assert not all(went)
    assert len(reader.match(list(payloads))) == len(payloads)
    for key, payload in payloads.items():
        # Some go down to host memory meanwhile: then the next lookup finds them.
        wait_until(lambda key=key: read(reader, key) is not None, "it can be read")
        assert read(reader, key) in (None, payload)


def read(store, key):
    """The block, None for a miss."""
    (found,) = store.lookup([key])
    view = None if found is None else store.view(found)
    data = None if view is None else bytes_of(device_of(store), view.buffer)
    return data if view is not None and view.valid() else None


def device_of(store):
    return store._store.remote.vram.transport.device


def test_a_view_of_vram_is_the_block_until_it_goes(store, device, reader):
    payloads = payloads_of(2)
    assert save(store, device, payloads) == [True, True]
    views = list(reader.views(reader.match(list(payloads)), None, PATIENCE_S))
    got = [bytes_of(device_of(reader), view.buffer) for view in views]
    assert got == list(payloads.values())
    assert [view.valid() for view in views] == [True, True]
    assert store.clear(NAMESPACE) == 2
    assert [view.valid() for view in views] == [False, False]
    assert reader.lookup(list(payloads)) == [None, None]


def test_its_own_blocks_are_read_where_they_are(store, device):
    payloads = payloads_of(1)
    save(store, device, payloads)
    (view,) = store.views(store.match(list(payloads)), None, PATIENCE_S)
    assert isinstance(view.buffer, DeviceRange)
    assert [bytes_of(device, view.buffer)] == list(payloads.values())
    assert view.valid()


def test_what_exists_is_not_reserved_again_and_what_is_aborted_can_be(store, device):
    payloads = payloads_of(1)
    save(store, device, payloads)
    (answer,) = store.reserve(list(payloads), SIZE, NAMESPACE)
    assert answer.status is PutStatus.EXISTS
    (key,) = keys(1)
    (first,) = store.reserve([key], SIZE, NAMESPACE)
    (busy,) = store.reserve([key], SIZE, NAMESPACE)
    assert busy.status is PutStatus.IN_PROGRESS
    store.abort([first])
    (second,) = store.reserve([key], SIZE, NAMESPACE)
    assert isinstance(second, DeviceReservation)
    store.abort([second])


def test_without_host_memory_nothing_is_reserved_for_nobody(store, device, node, monkeypatch):
    """Some found a slot in VRAM, the rest raise: all slots are free again."""

    def gone(*args):
        raise NodeUnavailableError("gone")

    monkeypatch.setattr(store._store, "reserve", gone)
    with pytest.raises(NodeUnavailableError):
        store.reserve(keys(14), SIZE, NAMESPACE)
    assert store.pool.stats()["reserved"] == 0


def test_without_room_on_the_device_saves_go_to_host_memory(node, tmp_path, caplog):
    small = ModelCuda(tmp_path, capacity_bytes=MIB)
    store = VramStore(BlockSession(**node.client_options, device=small), small, 64 * MIB)
    assert store.pool is None
    assert "no blocks are kept in VRAM" in caplog.text
    payloads = payloads_of(1)
    assert save(store, small, payloads) == [False]
    store.close()


def test_views_of_vram_that_are_forgotten_let_its_memory_go(store, device, reader):
    payloads = payloads_of(1)
    save(store, device, payloads)
    views = list(reader.views(reader.match(list(payloads)), None, PATIENCE_S))
    assert device_of(reader).mapped == 1
    del views
    store.close()
    reader._store.remote.vram.sweep()
    assert device_of(reader).mapped == 0


def test_it_ends_within_seconds_and_takes_its_blocks_down(node, tmp_path):
    device = ModelCuda(tmp_path)
    store = VramStore(BlockSession(**node.client_options, device=device), device, MIB)
    payloads = payloads_of(3)
    assert save(store, device, payloads) == [True] * 3
    began = time.monotonic()
    store.close()
    assert time.monotonic() - began < PATIENCE_S
    after = BlockSession(**node.client_options)
    views = list(after.views(after.match(list(payloads)), None, PATIENCE_S))
    assert [bytes(view.buffer) for view in views] == list(payloads.values())
    after.close()
