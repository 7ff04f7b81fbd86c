"""KVStoreConnector: our core behind vLLM's calls, and what it refuses at start."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from connector_parts import (
    BLOCK,
    ENGINE_BLOCK,
    GEOMETRY,
    PATIENCE_S,
    FakePins,
    FakeRequest,
    bits,
    kv_tensors,
    wait_for,
)

from connector import build
from connector.build import EngineShape
from connector.layout.topology import TpKVTopology
from connector.stats import CountStats
from connector.transfer.aggregate import KVOutputAggregator, worker_output
from connector.transfer.base import KVConnectorOutput
from connector.transfer.base_v1 import KVConnectorBase_V1, KVConnectorRole
from connector.transfer.config import KVTransferConfig
from connector.transfer.engine import EngineBlocks, EngineInfo, SchedulerSteps
from connector.transfer.factory import KVConnectorFactory
from kvstore import UsageError
from kvstore.testing.blockstore import MemoryBlockStore

pytest.importorskip("torch")

SHAPE = EngineShape.of_one_group(GEOMETRY, TpKVTopology.of(), model={"model": "m"})
TABLE = [3, 4, 5, 6]
PROMPT = list(range(2 * BLOCK))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryBlockStore:
    store = MemoryBlockStore()
    monkeypatch.setattr(build, "open_store", lambda config, **more: store)
    return store


def config(role: Any = "kv_both", **extra: Any) -> KVTransferConfig:
    settings = {"block_tokens": BLOCK, "lookup_timeout_s": PATIENCE_S, **extra}
    return KVTransferConfig(
        kv_connector="KVStoreConnector", kv_role=role, kv_connector_extra_config=settings
    )


def made(role: KVConnectorRole, config: KVTransferConfig, info: EngineInfo) -> KVConnectorBase_V1:
    return KVConnectorFactory.create_connector(config, role, info)


def scheduler_of(config: KVTransferConfig, info: EngineInfo) -> KVConnectorBase_V1:
    return made(KVConnectorRole.SCHEDULER, config, info)


def worker_of(config: KVTransferConfig, info: EngineInfo) -> KVConnectorBase_V1:
    return made(KVConnectorRole.WORKER, config, info)


def beside_another(config: KVTransferConfig) -> KVTransferConfig:
    """Return the config of a MultiConnector over one that has nothing, and `config`'s."""
    other = {"kv_connector": "Fake", "kv_connector_module_path": "fake_connectors"}
    values = {"kv_connector": config.kv_connector, "kv_role": config.kv_role}
    extra = {"kv_connector_extra_config": config.kv_connector_extra_config}
    children = [{"kv_role": config.kv_role, **other}, {**values, **extra}]
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role=config.kv_role,
        kv_connector_extra_config={"connectors": children},
    )


class Engine:
    """Both sides, with metadata and outputs going through pickle as between processes."""

    def __init__(
        self,
        role: Any = "kv_both",
        seed: int = 0,
        events: bool = False,
        multi: bool = False,
        **extra: Any,
    ) -> None:
        self.pins = FakePins()
        shape = replace(SHAPE, events=events)
        info = EngineInfo(shape=shape, pins=self.pins, num_blocks=1000)
        configured = config(role, **extra)
        configured = beside_another(configured) if multi else configured
        self.scheduler, self.worker = scheduler_of(configured, info), worker_of(configured, info)
        self.kv = kv_tensors(16, seed=seed)
        self.worker.register_kv_caches(self.kv)
        self.outputs = KVOutputAggregator.from_connector(self.worker, 1)
        self.stats = CountStats()
        self.steps = SchedulerSteps()

    def step(
        self, *scheduled: tuple[FakeRequest, int], finished: tuple[str, ...] = ()
    ) -> KVConnectorOutput:
        step = self.steps.next(scheduled, lambda _: TABLE, finished=finished)
        meta = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(step)))
        self.worker.bind_connector_metadata(meta)
        self.worker.handle_preemptions(meta)
        self.worker.start_load_kv(None)
        for name, layer in self.kv.items() if scheduled else ():
            self.worker.wait_for_layer_load(name)
            self.worker.save_kv_layer(name, layer, None)
        self.worker.wait_for_save()
        output = worker_output(self.worker, set(finished))
        output = self.outputs.aggregate([pickle.loads(pickle.dumps(output))])
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(output)
        if isinstance(output.kv_connector_stats, CountStats):
            self.stats.aggregate(output.kv_connector_stats)
        return output

    def save(self, request: FakeRequest) -> None:
        self.scheduler.on_new_request(request)
        self.step((request, request.num_tokens))
        wait_for(
            lambda: self.step() is not None and not self.scheduler.has_pending_push_work(), "save"
        )

    def match(self, request: FakeRequest) -> tuple[int | None, bool]:
        answers: list[tuple[int | None, bool]] = []

        def asked() -> bool:
            answers.append(self.scheduler.get_num_new_matched_tokens(request, 0))
            self.step()
            return answers[-1][0] is not None

        wait_for(asked, "an answer")
        return answers[-1]

    def load(self, request: FakeRequest, tokens: int) -> KVConnectorOutput:
        self.scheduler.update_state_after_alloc(request, EngineBlocks(TABLE), tokens)
        ended: list[KVConnectorOutput] = []

        def done() -> bool:
            ended.append(self.step())
            return bool(ended[-1].finished_recving)

        wait_for(done, "the load")
        return ended[-1]

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


@pytest.fixture
def engine(store: MemoryBlockStore) -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


def test_saved_blocks_are_loaded_by_another_engine_and_both_are_counted(engine: Engine) -> None:
    engine.save(FakeRequest("a", PROMPT))
    assert engine.pins.references == {}
    other = Engine(seed=1)
    request = FakeRequest("b", PROMPT)
    assert other.match(request) == (len(PROMPT), True)
    output = other.load(request, len(PROMPT))
    assert output.finished_recving == {"b"}
    assert not output.invalid_block_ids
    assert bool((bits(other.kv)[:, TABLE] == bits(engine.kv)[:, TABLE]).all())
    other.close()
    blocks, size = len(PROMPT) // BLOCK, GEOMETRY.token_bytes * len(PROMPT)
    for engine_of, verb in ((other, "load"), (engine, "save")):
        counts = engine_of.stats.counts
        done = "loaded" if verb == "load" else "saved"
        assert counts[f"kvstore_{done}_blocks"] == blocks
        assert counts[f"kvstore_{done}_bytes"] == size
        assert len(counts[f"kvstore_{verb}_seconds"]) == 1


@pytest.mark.parametrize("layerwise", [False, True])
def test_beside_another_connector_it_saves_and_loads_the_same(
    store: MemoryBlockStore, layerwise: bool
) -> None:
    engine, other = (Engine(seed=i, multi=True, layerwise=layerwise) for i in range(2))
    engine.save(FakeRequest("a", PROMPT))
    again = FakeRequest("b", PROMPT)
    offered, between_steps = other.match(again)
    assert (offered, between_steps) == (len(PROMPT) - ENGINE_BLOCK * layerwise, not layerwise)
    other.scheduler.update_state_after_alloc(again, EngineBlocks(TABLE), offered)
    again.num_computed_tokens = offered
    if layerwise:
        assert not other.step((again, ENGINE_BLOCK)).invalid_block_ids
    else:
        wait_for(lambda: bool(other.step().finished_recving), "the load")
    loaded = TABLE[: offered // ENGINE_BLOCK]
    assert bool((bits(other.kv)[:, loaded] == bits(engine.kv)[:, loaded]).all())
    engine.close()
    other.close()


def test_what_cannot_be_loaded_comes_back_as_invalid_blocks_and_is_not_offered_again(
    engine: Engine, store: MemoryBlockStore
) -> None:
    request = FakeRequest("a", PROMPT)
    engine.save(request)
    other = Engine(seed=1)
    assert other.match(FakeRequest("b", PROMPT)) == (len(PROMPT), True)
    assert engine.scheduler.reset_cache()
    output = other.load(FakeRequest("b", PROMPT), len(PROMPT))
    assert output.invalid_block_ids == set(TABLE)
    assert other.match(FakeRequest("b", PROMPT)) == (0, False)
    other.close()
    assert other.stats.counts["kvstore_failed_loads:load-failed"] == 1


def test_layer_by_layer_a_load_is_part_of_the_step_that_computes_the_rest(
    store: MemoryBlockStore,
) -> None:
    engine, other = Engine(layerwise=True), Engine(seed=1, layerwise=True)
    request = FakeRequest("a", PROMPT)
    engine.save(request)
    again = FakeRequest("b", PROMPT)
    loaded = len(PROMPT) - ENGINE_BLOCK
    assert other.match(again) == (loaded, False), "the last block is computed"
    other.scheduler.update_state_after_alloc(again, EngineBlocks(TABLE), loaded)
    again.num_computed_tokens = loaded
    output = other.step((again, ENGINE_BLOCK))
    assert not output.finished_recving, "that is for loads between steps"
    assert not output.invalid_block_ids
    assert bool((bits(other.kv)[:, TABLE[:-1]] == bits(engine.kv)[:, TABLE[:-1]]).all())
    engine.close()
    other.close()
    assert other.stats.counts["kvstore_loaded_blocks"] == 2, "of the second one its head"
    assert len(other.stats.counts["kvstore_load_seconds"]) == 1


def test_layer_by_layer_invalid_blocks_come_with_the_same_step(store: MemoryBlockStore) -> None:
    engine, other = Engine(layerwise=True), Engine(seed=1, layerwise=True)
    engine.save(FakeRequest("a", PROMPT))
    again = FakeRequest("b", PROMPT)
    loaded, _ = other.match(again)
    assert engine.scheduler.reset_cache()
    other.scheduler.update_state_after_alloc(again, EngineBlocks(TABLE), loaded or 0)
    again.num_computed_tokens = len(PROMPT) - ENGINE_BLOCK
    assert other.step((again, ENGINE_BLOCK)).invalid_block_ids == set(TABLE[:-1])
    again.num_computed_tokens = 0
    other.save(again)
    assert len(store.sealed()) == 2, "computed again, then saved"
    assert other.pins.references == {}
    engine.close()
    other.close()


def test_offer_that_the_engine_does_not_take_up_loads_nothing(engine: Engine) -> None:
    request = FakeRequest("a", PROMPT)
    engine.save(request)
    again = FakeRequest("b", PROMPT)
    assert engine.match(again)[0] == len(PROMPT)
    engine.scheduler.update_state_after_alloc(again, EngineBlocks(TABLE), 0)
    step = SchedulerSteps().next((), lambda _: TABLE)
    assert not engine.scheduler.build_connector_meta(step).loads


def test_finished_request_never_keeps_its_blocks(engine: Engine) -> None:
    request = FakeRequest("a", PROMPT)
    engine.scheduler.on_new_request(request)
    engine.step((request, request.num_tokens))
    assert engine.scheduler.request_finished(request, TABLE) == (False, None)
    assert list(engine.scheduler.take_events()) == []
    assert not engine.scheduler.requires_kv_delivery, "nor is anybody told that it must"


def test_steps_of_running_requests_copy_none_of_their_tokens(engine: Engine) -> None:
    """The engine's thread comes by in every step; only connectors of vLLM's kind read them."""

    class Unread(FakeRequest):
        @property
        def all_token_ids(self) -> list[int]:
            raise AssertionError("somebody reads all tokens")

    request = Unread("a", PROMPT)
    engine.scheduler.on_new_request(request)
    for _ in range(2):
        engine.step((request, 1))


def test_request_that_it_never_heard_of_is_named_with_what_to_call(engine: Engine) -> None:
    request = FakeRequest("a", PROMPT)
    with pytest.raises(UsageError, match=r"num_scheduled_tokens=\['a'\].*on_new_request"):
        engine.step((request, 4))
    engine.scheduler.on_new_request(request)
    engine.scheduler.request_finished(request, TABLE)
    with pytest.raises(UsageError, match="on_new_request"):
        engine.step((request, 4))


@pytest.mark.parametrize("layerwise", [False, True])
def test_engine_that_wants_events_is_told_what_was_stored_and_both_sides_count(
    store: MemoryBlockStore, layerwise: bool
) -> None:
    engine = Engine(events=True, layerwise=layerwise)
    request = FakeRequest("a", PROMPT)
    assert engine.match(request) == (0, False)
    engine.save(request)
    events = list(engine.scheduler.take_events())
    assert [(event.stored, event.request, event.block) for event in events] == [
        (True, request, 0),
        (True, request, 1),
    ]
    asked = engine.scheduler.get_kv_connector_stats()
    assert asked is not None
    assert asked.to_dict()["kvstore_lookup_blocks"] == len(PROMPT) // BLOCK
    assert engine.stats.counts["kvstore_saved_blocks"] == len(PROMPT) // BLOCK
    engine.close()


def test_consumer_saves_nothing_and_needs_no_pins(store: MemoryBlockStore) -> None:
    scheduler = scheduler_of(config("kv_consumer"), EngineInfo(shape=SHAPE))
    request = FakeRequest("a", PROMPT)
    scheduler.on_new_request(request)
    step = SchedulerSteps().next([(request, request.num_tokens)], lambda _: TABLE)
    assert not scheduler.build_connector_meta(step).saves
    scheduler.shutdown()


@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
@pytest.mark.parametrize(
    "lacking", [{"pins": None, "num_blocks": 9}, {"pins": FakePins(), "num_blocks": 0}]
)
def test_engine_that_saves_must_say_how_to_pin(role: Any, lacking: Any) -> None:
    with pytest.raises(UsageError, match="pins, engine"):
        scheduler_of(config(role), EngineInfo(shape=SHAPE, **lacking))


@pytest.mark.parametrize("rank", [-1, 1])
def test_rank_beyond_the_topology_is_refused(rank: int) -> None:
    with pytest.raises(UsageError, match="rank="):
        worker_of(config(), EngineInfo(shape=SHAPE, rank=rank))


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"block_tokens": ENGINE_BLOCK + 1}, "block_tokens"),
        ({"no_such_setting": 1}, "kv_connector_extra_config"),
    ],
)
def test_wrong_settings_are_said_at_start(extra: dict[str, Any], field: str) -> None:
    for make in (scheduler_of, worker_of):
        with pytest.raises(UsageError) as caught:
            make(config("kv_consumer", **extra), EngineInfo(shape=SHAPE))
        assert caught.value.field == field


def test_engine_without_a_shape_or_with_several_groups_is_refused() -> None:
    with pytest.raises(UsageError, match="must be an EngineShape"):
        worker_of(config(), EngineInfo())
    with pytest.raises(UsageError, match=r"engine\.shape\.groups=2"):
        worker_of(config(), EngineInfo(shape=replace(SHAPE, groups=SHAPE.groups * 2)))


def test_step_without_metadata_is_refused_and_binding_is_visible(engine: Engine) -> None:
    assert not engine.worker.has_connector_metadata()
    with pytest.raises(UsageError, match="bind_connector_metadata"):
        engine.worker.start_load_kv(None)
    with pytest.raises(UsageError, match="this connector's own"):
        engine.worker.bind_connector_metadata({"plan": 1})
    step = SchedulerSteps().next((), lambda _: None)
    engine.worker.bind_connector_metadata(engine.scheduler.build_connector_meta(step))
    assert engine.worker.has_connector_metadata()
