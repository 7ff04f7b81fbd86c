"""Blocks that go down from VRAM go through page-locked memory, which stays so meanwhile."""

import os
import threading

import pytest
from connector_parts import Worker, save, save_job, wait_for
from host_device import HostDevice
from stores import NodeThread

from connector.copiers.base import KVMemory
from connector.copiers.cuda.copier import DeviceCopier
from connector.copiers.cuda.kernel_plan import layout_of
from connector.copiers.cuda.page_lock import LockedPool
from connector.scheduler.lazy_store import LazyStore
from connector.worker.vram import VramStore
from kvstore.spi import BlockSession, VramPool
from kvstore.testing.cuda import ModelCuda

torch = pytest.importorskip("torch")
MIB = 1 << 20
NAMESPACE = 7


class Registrar:
    """Locks for the model of a device, and remembers what had been copied at each unlock."""

    def __init__(self, device):
        self.device = device
        self.copied_at_unlock = []

    def lock(self, address, size_bytes, writable):
        self.device.register_host(address, size_bytes, read_only=not writable)
        return ""

    def unlock(self, address):
        self.copied_at_unlock.append(self.device.queued)
        self.device.unregister_host(address)


@pytest.fixture
def node(redis_server):
    with NodeThread(redis_server, size_bytes=16 * MIB) as node:
        yield node


def lock_all(pool, mappings):
    pool.look()
    with pool.holding([m.memory for m in mappings if m.writable]):
        pass
    while pool.lock_next() is not None:
        pass


def test_vram_has_drained_before_host_memory_is_unlocked(node, tmp_path, monkeypatch):
    device = ModelCuda(tmp_path)
    registrar = Registrar(device)
    pools = []

    def memory(groups, block_tokens, mappings, count, *_):
        pools.append(LockedPool(registrar, mappings, count))
        blocks = [
            DeviceCopier(layout_of(list(kv.values()), geometry, block_tokens), HostDevice(1))
            for kv, geometry in groups
        ]
        return KVMemory(list(blocks), pools[0].close, 0, pools[0].holding)

    monkeypatch.setattr("connector.worker.worker.kv_memory", memory)
    session = BlockSession(**node.client_options)
    made = []

    def opened():
        made.append(VramStore(session, device, MIB, name="vram", holding=pools[0].holding))
        return made[0]

    monkeypatch.setattr("connector_parts.LazyStore", lambda _: LazyStore(opened))
    worker = Worker(session, seed=1)
    save(worker, save_job(5))
    (unused,) = session.reserve([os.urandom(32)], 1000, NAMESPACE)
    session.abort([unused])
    pools[0].start()
    lock_all(pools[0], session.mappings())
    copied = device.queued
    worker.core.close()
    assert made[0].pool.demoter.counts["demoted"] == 5
    assert registrar.copied_at_unlock
    assert set(registrar.copied_at_unlock) == {device.queued}
    assert device.queued > copied
    assert not device.broken
    assert not device.registered


def test_trap_memory_that_has_gone_stays_locked_under_what_goes_down(node, tmp_path):
    device = ModelCuda(tmp_path)
    session = BlockSession(**node.client_options)
    there = []
    locks = LockedPool(Registrar(device), lambda: there, lambda size, why: None)
    pool = VramPool(session, device, MIB, holding=locks.holding)
    (unused,) = session.reserve([os.urandom(32)], 1000, NAMESPACE)
    session.abort([unused])
    there += [m._replace(memory=m.memory[:]) for m in session.mappings() if m.writable]
    lock_all(locks, session.mappings())
    granted = pool.reserve([os.urandom(32) for _ in range(4)], 100_000, NAMESPACE)
    assert all(pool.commit(granted))
    before = device.pageable
    device.hold.clear()
    stopping = threading.Thread(target=pool.stop)
    stopping.start()
    wait_for(lambda: len(device.flying) > 0, "copies under way")
    there.clear()  # its node has died: it is mapped no more
    locks.look()
    assert device.registered, "a device that finds memory unlocked under its copies is lost"
    device.hold.set()
    stopping.join(60)
    assert not stopping.is_alive()
    locks.look()
    assert not device.registered
    assert not device.broken
    assert device.pageable == before
    session.close()
