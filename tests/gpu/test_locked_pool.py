"""The store's memory, page-locked for a real device or on it, and blocks that go through it."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from connector_parts import Worker, bits, keys, load_job, loaded, save, save_job, wait_for
from kv_cases import Case, Shape

from connector.copiers.base import Gather, Scatter
from connector.copiers.cuda.copier import DeviceCopier
from connector.copiers.cuda.kernel_plan import layout_of
from connector.copiers.cuda.page_lock import LockedPool
from connector.worker.vram import VramStore
from kvstore import UsageError
from kvstore.index.embedded_redis.server import find_server
from kvstore.spi import BlockSession, DeviceRange, PoolMapping, cuda_device

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu
PART = 4 << 20
SHM = Path("/dev/shm")


def mappings(tmp_name: str, parts: int = 4) -> tuple[PoolMapping, PoolMapping]:
    """The same new memory, to write and to read only."""
    path = SHM / f"kvstore-test-{tmp_name}"
    with path.open("w+b") as file:
        path.unlink()
        file.truncate(parts * PART)
        both = [
            mmap.mmap(file.fileno(), parts * PART, mmap.MAP_SHARED, access)
            for access in (mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ)
        ]
    written, read = (
        PoolMapping(memoryview(m), PART, m is both[0], node_id=1, epoch=1) for m in both
    )
    return written, read


def lock(pool: LockedPool, memory: memoryview) -> None:
    """As after copies that used all of it."""
    pool.look()
    with pool.holding([memory]):
        pass
    while pool.lock_next() is not None:
        pass


def is_locked(memory: memoryview) -> bool:
    return bool(torch.frombuffer(memory, dtype=torch.uint8).is_pinned())


def test_shared_memory_is_locked_and_let_go(cuda: Any) -> None:
    written, _ = mappings("lock")
    there, counted = [written], []
    pool = LockedPool(cuda, lambda: there, lambda size, why: counted.append((size, why)))
    assert not is_locked(written.memory)
    lock(pool, written.memory)
    assert counted == [(PART, "")] * 4
    assert is_locked(written.memory)
    assert is_locked(written.memory[3 * PART :])
    there.clear()
    keep = written.memory[:]
    pool.look()
    assert not is_locked(keep)


def test_memory_that_may_only_be_read_is_locked_or_says_why_not(cuda: Any) -> None:
    _, read = mappings("read")
    counted: list[tuple[int, str]] = []
    pool = LockedPool(cuda, lambda: [read], lambda size, why: counted.append((size, why)))
    lock(pool, read.memory)
    print(f"read-only memory: {counted}")
    refused = len(counted) == 1 and counted[0][0] == PART and counted[0][1]
    assert refused or counted == [(PART, "")] * 4
    pool.close()


@pytest.mark.parametrize("locked", [True, False])
def test_blocks_go_through_shared_memory_locked_or_not(cuda: Any, locked: bool) -> None:
    from connector.copiers.cuda.queue import QueuedDevice

    shape = Shape(8, 4, 256, 2, 16, 1, 8, 32, (0, 1, 3, 2))
    written, read = mappings(f"copy-{locked}")
    pool = LockedPool(cuda, lambda: [written, read], lambda size, why: None)
    if locked:
        lock(pool, written.memory)
    device = QueuedDevice(cuda, 16 << 20, 1 << 12, pool)
    case = Case(shape, 1)
    layers = [torch.from_numpy(layer.array.view(np.int16).copy()).cuda() for layer in case.layers]
    blocks = DeviceCopier(layout_of(layers, shape.geometry, shape.block_tokens), device)
    size = case.payload(list(range(8))).size
    tables = [list(range(i, i + 8)) for i in (0, 8, 16)]
    places = [slice(i * PART + 4096, i * PART + 4096 + size) for i in range(3)]
    blocks.gather_many([Gather(t, written.memory[p]) for t, p in zip(tables, places, strict=True)])
    for table, place in zip(tables, places, strict=True):
        assert bytes(read.memory[place]) == case.payload(table).tobytes()
    for layer in layers:
        layer.zero_()
    torch.cuda.synchronize()
    blocks.scatter_many(
        [Scatter(read.memory[p], 0, t) for t, p in zip(tables, places, strict=True)]
    )
    for layer, its in zip(case.layers, layers, strict=True):
        assert np.array_equal(its.cpu().numpy()[:24], layer.array.view(np.int16)[:24])
    device.close()


@pytest.fixture
def real_node(request: pytest.FixtureRequest) -> Any:
    try:
        find_server()
    except UsageError as e:
        pytest.skip(f"no redis-server: {e}")
    return request.getfixturevalue("node")


def test_two_workers_share_kv_of_a_device_through_a_real_node(real_node: Any) -> None:
    """What is saved from one cache is loaded into the other; the node's memory is locked."""
    sessions = [BlockSession(**real_node.client_options) for _ in range(2)]
    one, other = (
        Worker(session, seed=seed, device="cuda") for seed, session in enumerate(sessions)
    )
    stats: dict[str, float] = {}
    save(one, save_job(6))

    def used_is_locked() -> bool:
        counted = one.core.take_stats()
        for name, value in (counted.to_dict() if counted is not None else {}).items():
            stats[name] = stats.get(name, 0) + value
        return stats.get("kvstore_page_locked_bytes", 0) > 0

    wait_for(used_is_locked, "what was saved to to be page-locked")
    assert not any(name.startswith("kvstore_unlocked") for name in stats)
    other.core.start_loads([load_job(sessions[1], 6)])
    loaded(other)
    assert torch.equal(bits(other.kv)[:, 11:23].cpu(), bits(one.kv)[:, 1:13].cpu())
    for worker in (one, other):
        worker.core.close()


def test_what_one_worker_keeps_in_vram_another_loads_from_there(real_node: Any) -> None:
    """Both in this process, where a handle opens as the memory itself."""
    sessions = [BlockSession(**real_node.client_options, device=cuda_device(0)) for _ in range(2)]
    producer = VramStore(sessions[0], cuda_device(0), PART, name="vram")
    consumer = VramStore(sessions[1], cuda_device(0), 0)
    one, other = (Worker(s, seed=n, device="cuda") for n, s in enumerate((producer, consumer)))
    save(one, save_job(5))
    assert producer.pool is not None
    assert producer.pool.stats()["blocks"] == 5
    run = consumer.match(keys(5))
    assert [isinstance(v.buffer, DeviceRange) for v in consumer.views(run, None) if v] == [True] * 5
    other.core.start_loads([load_job(consumer, 5)])
    assert not loaded(other).invalid_block_ids
    assert torch.equal(bits(other.kv)[:, 11:21].cpu(), bits(one.kv)[:, 1:11].cpu())
    for worker in (other, one):
        worker.core.close()
