"""A worker whose KV is in a device: it batches, and waits for what the engine has started."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from connector_parts import (
    GEOMETRY,
    Worker,
    bits,
    keys,
    kv_tensors,
    load_job,
    loaded,
    save,
    save_job,
    taken,
)
from host_device import HostDevice

from connector import build
from connector.build import EngineShape
from connector.copiers.base import KVMemory
from connector.copiers.cuda.copier import DeviceCopier
from connector.copiers.cuda.kernel_plan import layout_of
from connector.copiers.cuda.page_lock import LockedPool, address_of
from connector.copiers.cuda.start import device_memory
from connector.layout.topology import TpKVTopology
from connector.settings import ConnectorSettings
from connector.worker.layerwise_worker import LayerwiseWorker
from kvstore.spi import BlockSession, DeviceError
from kvstore.testing.blockstore import MemoryBlockStore

if TYPE_CHECKING:
    from stores import NodeProcess

torch = pytest.importorskip("torch")
LAYERS = ("layer0", "layer1")


class Devices:
    """Gives every worker a device of its own."""

    def __init__(self) -> None:
        self.made: list[HostDevice] = []
        self.closed = 0

    def memory(
        self, groups: Any, block_tokens: int, mappings: Any, count: Any, *_: Any
    ) -> KVMemory:
        device = HostDevice(len(self.made))
        self.made.append(device)
        blocks = [
            DeviceCopier(layout_of(list(kv.values()), geometry, block_tokens), device)
            for kv, geometry in groups
        ]
        mappings()
        count(4096, "")
        count(8192, "not_supported")
        return KVMemory(list(blocks), self.close)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    devices = Devices()
    monkeypatch.setattr("connector.worker.worker.kv_memory", devices.memory)
    return devices


@pytest.fixture
def store() -> MemoryBlockStore:
    return MemoryBlockStore()


@pytest.fixture
def workers(devices: Devices, store: MemoryBlockStore) -> Iterator[tuple[Worker, Worker]]:
    both = Worker(store, seed=1), Worker(store, seed=2)
    yield both
    for worker in both:
        worker.core.close()
    assert devices.closed == 2


def test_what_one_worker_saved_another_loads_each_in_one_launch(
    workers: tuple[Worker, Worker], store: MemoryBlockStore, devices: Devices
) -> None:
    one, other = workers
    save(one, save_job(5))
    assert store.sealed() == keys(5)
    assert devices.made[0].launches == 1
    other.core.start_loads([load_job(store, 5)])
    loaded(other)
    assert torch.equal(bits(other.kv)[:, 11:21], bits(one.kv)[:, 1:11])
    assert devices.made[1].launches == 1


def test_trap_a_save_waits_for_the_forward_and_a_load_for_what_used_the_blocks_before(
    workers: tuple[Worker, Worker], store: MemoryBlockStore, devices: Devices
) -> None:
    one, other = workers
    new = torch.randint(-30000, 30000, one.kv["layer0"].shape, dtype=torch.int16)
    devices.made[0].compute.append(lambda: one.kv["layer0"].view(torch.int16).copy_(new))
    save(one, save_job(1))
    # A step that ran on after its request had ended still writes into its former blocks.
    devices.made[1].compute.append(lambda: [layer.zero_() for layer in other.kv.values()])
    other.core.start_loads([load_job(store, 1)])
    loaded(other)
    assert torch.equal(bits(other.kv)[0, 11:13], new[1:3])
    assert torch.equal(bits(other.kv)[1, 11:13], bits(one.kv)[1, 1:3])


def test_a_load_that_is_marked_before_a_forward_does_not_wait_for_it(
    workers: tuple[Worker, Worker], store: MemoryBlockStore, devices: Devices
) -> None:
    """Engines launch the forward first and then start loads for requests that are not in it."""
    one, other = workers
    save(one, save_job(1))
    device = devices.made[1]
    before: list[None] = []
    device.compute.append(lambda: before.append(None))
    ready = other.core.mark_ready()
    device.compute.append(lambda: pytest.fail("a load waited for the forward of its own step"))
    other.core.start_loads([load_job(store, 1)], ready)
    assert not loaded(other).invalid_block_ids
    assert before, "but for what was started before it, which may still use the blocks"
    assert torch.equal(bits(other.kv)[:, 11:13], bits(one.kv)[:, 1:3])
    device.compute.clear()


def test_a_block_that_is_gone_spoils_those_after_it_alone(
    workers: tuple[Worker, Worker], store: MemoryBlockStore
) -> None:
    one, other = workers
    save(one, save_job(3))
    job = load_job(store, 3)
    checks: list[None] = []

    def second_goes() -> None:
        checks.append(None)
        if len(checks) == 1:
            store.evict(keys(3)[1])

    store.on_check = second_goes
    other.core.start_loads([job])
    assert loaded(other).invalid_block_ids == {13, 14, 15, 16}
    assert torch.equal(bits(other.kv)[:, 11:13], bits(one.kv)[:, 1:3])


def test_layer_by_layer_every_layer_is_one_launch(
    devices: Devices, store: MemoryBlockStore
) -> None:
    one, other = (Worker(store, seed=seed, kind=LayerwiseWorker) for seed in (1, 2))
    save(one, save_job(4))
    assert devices.made[0].launches == len(LAYERS)
    other.core.start_loads([load_job(store, 4)])
    for name in LAYERS:
        other.core.wait_layer_load(name)
    assert not other.core.poll().invalid_block_ids
    assert torch.equal(bits(other.kv)[:, 11:19], bits(one.kv)[:, 1:9])
    assert devices.made[1].launches == len(LAYERS)
    for worker in (one, other):
        worker.core.close()


def test_what_is_page_locked_and_what_is_not_is_in_the_stats(
    workers: tuple[Worker, Worker],
) -> None:
    counted = taken(workers[0].core.take_stats)
    assert counted == {"page_locked_bytes": 4096, "unlocked_bytes:not_supported": 8192}


def test_without_the_kernel_torch_copies_and_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from connector.copiers.cuda.nvrtc import NoKernelError

    def none(device: object) -> None:
        raise NoKernelError("NVRTC cannot be loaded: no such library")

    made: list[Any] = []
    monkeypatch.setattr("connector.copiers.cuda.queue.Cuda", none)
    monkeypatch.setattr(
        "connector.copiers.cuda.start.TorchCopier", lambda *group: made.append(group)
    )
    group = ([torch.zeros(1)], None, 4)
    with caplog.at_level(logging.WARNING):
        memory = device_memory([group, group], tuple, lambda size, why: None)
    memory.close()
    assert len(made) == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no such library" in caplog.text


def test_an_operator_says_how_much_of_the_stores_memory_is_page_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def pool(*_: object, bytes_max: int) -> None:
        made.append(bytes_max)
        raise DeviceError("no more is wanted to be known")

    monkeypatch.setattr("connector.copiers.cuda.start.LockedPool", pool)
    monkeypatch.setattr("connector.copiers.cuda.queue.Cuda", str)
    monkeypatch.setattr("connector.copiers.cuda.start.TorchCopier", lambda *_: None)
    monkeypatch.setattr(build, "open_in_vram", lambda *_, **__: MemoryBlockStore())
    shape = EngineShape.of_one_group(GEOMETRY, TpKVTopology.of(), {"model": "m"})
    worker = build.worker_side(ConnectorSettings(page_lock_bytes_max=5), shape, 0)
    worker.register_kv_caches({name: kv.to("meta") for name, kv in kv_tensors(8).items()})
    worker.close()
    assert made == [5]


class Registrar:
    def lock(self, address: int, size_bytes: int, writable: bool) -> str:
        return "" if writable else "not_supported"

    def unlock(self, address: int) -> None:
        pass


def test_trap_through_a_real_node_every_copy_is_of_memory_that_is_locked(
    monkeypatch: pytest.MonkeyPatch, node: NodeProcess
) -> None:
    """Loads too, although they are looked at in a mapping that cannot be locked."""
    reached: list[int] = []
    pools: list[LockedPool] = []

    def memory(groups: Any, block_tokens: int, mappings: Any, count: Any, *_: Any) -> KVMemory:
        ((kv, geometry),) = groups
        device, pool = HostDevice(1), LockedPool(Registrar(), mappings, count)
        pools.append(pool)

        @contextmanager
        def held() -> Iterator[Any]:
            pool.look()
            with pool.held() as table:

                def address(view: memoryview) -> int:
                    at = table.address(view)
                    writable = [m.memory for m in mappings() if m.writable]
                    assert any(0 <= at - address_of(m) < len(m) for m in writable)
                    reached.append(at)
                    return at

                yield SimpleNamespace(address=address, apart=table.apart)

        device.host_memory = held  # type: ignore[assignment, method-assign]
        layout = layout_of(list(kv.values()), geometry, block_tokens)
        return KVMemory([DeviceCopier(layout, device)], pool.close)

    monkeypatch.setattr("connector.worker.worker.kv_memory", memory)
    sessions = [BlockSession(**node.client_options) for _ in range(2)]
    one, other = (Worker(session, seed=seed) for seed, session in enumerate(sessions))
    save(one, save_job(4))
    other.core.start_loads([load_job(sessions[1], 4)])
    assert not loaded(other).invalid_block_ids
    assert torch.equal(bits(other.kv)[:, 11:19], bits(one.kv)[:, 1:9])
    assert len(reached) == 8
    while pools[1].lock_next() is not None:
        pass  # in the background, once it was used
    assert taken(other.core.take_stats)["page_locked_bytes"] > 0
    for worker in (one, other):
        worker.core.close()
