"""A scheduler believes VRAM only once its workers have opened it, and finds host copies instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from connector_parts import (
    BLOCK,
    GEOMETRY,
    FakePins,
    bits,
    kv_tensors,
    prompt,
    save_job,
    wait_for,
)
from host_device import HostDevice
from stores import NodeThread

from connector import build
from connector.build import EngineShape
from connector.copiers.base import KVMemory
from connector.copiers.cuda.copier import DeviceCopier
from connector.copiers.cuda.kernel_plan import layout_of
from connector.layout.topology import TpKVTopology
from connector.messages import WorkerReport
from connector.scheduler.scheduler import SchedulerCore
from connector.scheduler.settings import SchedulerSettings
from connector.settings import ConnectorSettings
from kvstore.client.nodes import known
from kvstore.testing.blockstore import MemoryBlockStore
from kvstore.testing.cuda import ModelCuda

if TYPE_CHECKING:
    from redis_servers import RedisServer

torch = pytest.importorskip("torch")
MIB = 1 << 20
BLOCKS = 5
LOOKUPS = 6


class Engine:
    """Both sides as vLLM has them: told apart by what they say to each other in a step."""

    def __init__(self, config: ConnectorSettings, seed: int) -> None:
        shape = EngineShape.of_one_group(GEOMETRY, TpKVTopology.of(), {"model": "m"})
        self.scheduler = build.scheduler_side(config, shape)
        self.scheduler.bind_pins(FakePins(), 1, 1000)
        self.worker = build.worker_side(config, shape, 0)
        self.kv = kv_tensors(64, seed=seed)
        self.worker.register_kv_caches(self.kv)
        self.table: list[int] = []
        self.failed = 0

    def step(self) -> WorkerReport:
        plan = self.scheduler.plan_step([], [], lambda _: [self.table])
        self.worker.start_loads(plan.loads)
        report = self.worker.poll(0.01)
        self.failed += len(report.invalid_block_ids)
        said = report.for_scheduler()
        if said is not None:
            self.scheduler.report(said)
        self.scheduler.loads_ended(report.finished_loads)
        return report

    def until(self, enough: Callable[[WorkerReport], bool], what: str) -> None:
        wait_for(lambda: enough(self.step()), what)

    def save(self) -> None:
        layout = self.scheduler._layout
        hashes = prompt(BLOCKS).block_hashes
        keys = layout.groups[0].namespaces[0].engine_keys(hashes, layout.hashes_per_key)
        job = save_job(BLOCKS)
        blocks = [b._replace(keys=(k,)) for b, k in zip(job.blocks, keys, strict=True)]
        self.worker.start_saves([job._replace(blocks=tuple(blocks))])
        self.until(lambda report: 0 in report.ended_saves, "the save")

    def load(self, name: str) -> int:
        """Look the prompt up as a new request, and load what is found: how many blocks."""
        request = prompt(BLOCKS)
        request.request_id = name
        answers: list[int | None] = [None]

        def answered() -> bool:
            answers[0] = self.scheduler.match(request, 0)
            self.step()
            return answers[0] is not None

        wait_for(answered, "an answer")
        tokens = answers[0] or 0
        if tokens:
            self.table = list(range(11, 11 + tokens // GEOMETRY.engine_block_tokens))
            self.scheduler.allocated(request, lambda: [self.table], tokens)
            self.until(lambda report: name in report.finished_loads, "the load")
        self.scheduler.finished(name)
        return tokens // BLOCK

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()


@pytest.fixture
def node(redis_server: RedisServer) -> Iterator[NodeThread]:
    with NodeThread(redis_server, size_bytes=128 * MIB) as node:
        yield node


MakeEngine = Callable[[ModelCuda], Engine]


@pytest.fixture
def make(node: NodeThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeEngine]:
    made: list[Engine] = []
    models: list[ModelCuda] = []

    def memory(groups: Any, block_tokens: int, mappings: Any, count: Any, *_: Any) -> KVMemory:
        blocks = [
            DeviceCopier(layout_of(list(kv.values()), geometry, block_tokens), HostDevice(1))
            for kv, geometry in groups
        ]
        assert not mappings(), "asked too early, it would open the store without a device"
        return KVMemory(list(blocks), lambda: None, len(models) - 1)

    monkeypatch.setattr("connector.worker.worker.kv_memory", memory)
    monkeypatch.setattr(build, "cuda_device", lambda ordinal: models[ordinal])
    settings = ConnectorSettings(
        url=str(node.client_options["url"]),
        key_prefix=str(node.client_options["key_prefix"]),
        run_dir=str(node.run_dir),
        block_tokens=BLOCK,
        lookup_timeout_s=10.0,
        vram=True,
        vram_size_bytes=64 * MIB,
    )

    def make(model: ModelCuda) -> Engine:
        models.append(model)
        made.append(Engine(settings, len(made)))
        assert made[-1].worker._store.get() is not None  # as page-locking does
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def sees(engine: Engine, count: int) -> None:
    engine.until(lambda _: len(engine.scheduler.vram_open) == count, f"{count} pools in reach")


def test_what_its_workers_have_opened_is_found_and_loaded(make: MakeEngine, tmp_path: Path) -> None:
    producer, consumer = make(ModelCuda(tmp_path)), make(ModelCuda(tmp_path))
    sees(consumer, 2)  # its own pool too
    producer.save()
    assert consumer.load("r") == BLOCKS
    assert consumer.failed == 0
    assert torch.equal(bits(consumer.kv)[:, 11:21], bits(producer.kv)[:, 1:11])


def test_vram_that_cannot_be_opened_costs_no_load_and_a_host_copy_is_found(
    make: MakeEngine, tmp_path: Path
) -> None:
    """Another GPU without peer access, a driver that refuses: the directory says all is well."""
    producer = make(ModelCuda(tmp_path))
    elsewhere = tmp_path / "of-another-driver"
    elsewhere.mkdir()
    consumer = make(ModelCuda(elsewhere))
    sees(consumer, 1)
    producer.save()
    assert [consumer.load(f"r{i}") for i in range(LOOKUPS)] == [0] * LOOKUPS
    assert consumer.failed == 0
    producer.worker.close()  # its blocks go down, and the index learns of it when it learns of it
    assert consumer.load("below") == BLOCKS
    assert consumer.failed == 0
    assert torch.equal(bits(consumer.kv)[:, 11:21], bits(producer.kv)[:, 1:11])


def test_vram_that_fails_later_is_believed_no_more(
    make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "RETRY_AFTER_S", 600.0)
    monkeypatch.setattr(known, "RETRY_AFTER_MAX_S", 600.0)
    monkeypatch.setattr(known, "VRAM_RETRY_AFTER_MAX_S", 600.0)
    producer, model = make(ModelCuda(tmp_path)), ModelCuda(tmp_path)
    consumer = make(model)
    sees(consumer, 2)
    nodes = consumer.worker._store.opened._store.remote.vram  # type: ignore[union-attr]
    announcement = producer.worker._store.opened.pool.node.dir.announcement()  # type: ignore
    nodes._failed(announcement, "copies on the device fail")
    sees(consumer, 1)
    producer.save()
    assert consumer.load("r") == 0
    assert consumer.failed == 0


def test_a_node_counts_when_every_worker_has_said_that_it_is_open() -> None:
    core = build.SchedulerCore(
        build.LazyStore(MemoryBlockStore),
        EngineShape.of_one_group(GEOMETRY, TpKVTopology.of(2), {"model": "m"}).layout(
            ConnectorSettings(block_tokens=BLOCK)
        ),
        SchedulerSettings(),
    )
    core.bind_pins(FakePins(), 2, 100)
    one, two, three = (1, 10), (2, 20), (3, 30)
    core.report(WorkerReport(vram={0: frozenset({one, two})}))
    assert core.vram_open == frozenset()
    merged = WorkerReport(vram={1: frozenset({two, three})}).merge(
        WorkerReport(vram={0: frozenset({one, two})})
    )
    said = merged.for_scheduler()
    assert said is not None
    core.report(said)
    assert core.vram_open == {two}
    core.report(WorkerReport(vram={1: frozenset()}))
    assert core.vram_open == frozenset()
    assert isinstance(core, SchedulerCore)
    core.close()
