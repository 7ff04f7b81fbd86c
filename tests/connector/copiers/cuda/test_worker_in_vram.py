"""Workers that keep blocks in VRAM and read each other's there, over models of the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from connector_parts import Worker, bits, keys, load_job, loaded, save, save_job
from host_device import HostDevice
from redis_servers import RedisServer, wait_until
from stores import NodeThread

from connector import build
from connector.copiers.base import KVMemory
from connector.copiers.cuda.copier import DeviceCopier
from connector.copiers.cuda.kernel_plan import layout_of
from connector.settings import ConnectorSettings
from connector.worker.layerwise_worker import LayerwiseWorker
from connector.worker.vram import VramStore
from connector.worker.worker import WorkerCore
from kvstore.spi import BlockSession, DeviceError, DeviceRange
from kvstore.testing.cuda import ModelCuda

torch = pytest.importorskip("torch")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(groups: Any, block_tokens: int, mappings: Any, count: Any, *_: Any) -> KVMemory:
        device = HostDevice(1)
        blocks = [
            DeviceCopier(layout_of(list(kv.values()), geometry, block_tokens), device)
            for kv, geometry in groups
        ]
        return KVMemory(list(blocks), lambda: None, 0)

    monkeypatch.setattr("connector.worker.worker.kv_memory", memory)


@pytest.fixture
def node(redis_server: RedisServer) -> Iterator[NodeThread]:
    with NodeThread(redis_server, size_bytes=16 * MIB) as node:
        yield node


def store_of(node: NodeThread, directory: Path, size_bytes: int) -> VramStore:
    """As another process has it: with the device as that process sees it."""
    device = ModelCuda(directory)
    session = BlockSession(**node.client_options, device=device)
    return VramStore(session, device, size_bytes, name="vram")


@pytest.mark.parametrize("kind", [WorkerCore, LayerwiseWorker])
def test_what_one_worker_keeps_in_vram_another_loads_from_there(
    node: NodeThread, tmp_path: Path, kind: Any
) -> None:
    producer, consumer = store_of(node, tmp_path, MIB), store_of(node, tmp_path, 0)
    one, other = Worker(producer, seed=1, kind=kind), Worker(consumer, seed=2, kind=kind)
    save(one, save_job(5))
    assert producer.pool is not None
    assert producer.pool.stats()["blocks"] == 5
    run = consumer.match(keys(5))
    assert [isinstance(v.buffer, DeviceRange) for v in consumer.views(run, None) if v] == [True] * 5
    other.core.start_loads([load_job(consumer, 5)])
    if kind is LayerwiseWorker:
        for name in ("layer0", "layer1"):
            other.core.wait_layer_load(name)
        assert not other.core.poll().invalid_block_ids
    else:
        assert not loaded(other).invalid_block_ids
    assert torch.equal(bits(other.kv)[:, 11:21], bits(one.kv)[:, 1:11])
    for worker in (other, one):
        worker.core.close()


def test_a_block_that_left_vram_before_the_load_is_computed_again(
    node: NodeThread, tmp_path: Path
) -> None:
    producer, consumer = store_of(node, tmp_path, MIB), store_of(node, tmp_path, 0)
    one, other = Worker(producer, seed=1), Worker(consumer, seed=2)
    save(one, save_job(3))
    job = load_job(consumer, 3)
    one.core.close()  # its blocks go down to host memory
    other.core.start_loads([job])
    assert loaded(other).invalid_block_ids == {11, 12, 13, 14, 15, 16}
    wait_until(lambda: len(consumer.match(keys(3))) == 3, "they are found below")
    other.core.start_loads([load_job(consumer, 3)])
    assert not loaded(other).invalid_block_ids
    assert torch.equal(bits(other.kv)[:, 11:17], bits(one.kv)[:, 1:7])
    other.core.close()


def test_only_a_worker_whose_copiers_take_a_devices_memory_uses_vram(
    node: NodeThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    settings = ConnectorSettings(
        url=str(node.client_options["url"]),
        key_prefix=str(node.client_options["key_prefix"]),
        run_dir=str(node.run_dir),
        vram=True,
        vram_size_bytes=64 * MIB,
    )
    monkeypatch.setattr(build, "cuda_device", lambda ordinal: ModelCuda(tmp_path, ordinal))
    for saves in (True, False):
        store = build.open_in_vram(settings, 0, saves=saves)
        assert isinstance(store, VramStore)
        # Who only loads keeps nothing there, and reads what others keep.
        kept = store.pool.node.config.size_bytes if store.pool is not None else 0
        assert kept == (64 * MIB if saves else 0)
        store.close()
    for ordinal, config in ((None, settings), (0, ConnectorSettings(run_dir=str(node.run_dir)))):
        plain = build.open_in_vram(config, ordinal, saves=True)
        assert isinstance(plain, BlockSession)
        plain.close()

    def none(ordinal: int) -> None:
        raise DeviceError("no cuda.bindings")

    monkeypatch.setattr(build, "cuda_device", none)
    plain = build.open_in_vram(settings, 0, saves=True)
    assert isinstance(plain, BlockSession)
    assert "no cuda.bindings" in caplog.text
    plain.close()
