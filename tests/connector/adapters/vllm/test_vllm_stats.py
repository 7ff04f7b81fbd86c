"""Statistics and events of the vLLM adapter, through vLLM's own scheduler and loggers."""

from __future__ import annotations

import itertools
import logging
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm_model_config import BLOCK, ENGINE_BLOCK, vllm_config
from vllm_model_engine import MakeEngine, ModelEngine, expected_output, prompt

from connector.metrics import METRICS
from kvstore.testing.blockstore import MemoryBlockStore

pytestmark = pytest.mark.vllm
LABELS = {"model_name": "m", "engine": "0"}


@pytest.fixture
def prometheus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A registry of this test's own, as vLLM's front end has one per process."""
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    for name in ("Counter", "Gauge", "Histogram"):
        kind = getattr(prometheus_client, name)
        monkeypatch.setattr(
            f"vllm.distributed.kv_transfer.kv_connector.v1.metrics.KVConnectorProm._{name.lower()}_cls",
            partial(kind, registry=registry),
        )
    return registry


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    ours = {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "connector.adapters.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"block_tokens": BLOCK, "lookup_timeout_s": 5.0},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours, *children]},
    }


def front_end(config: Any) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm

    return KVConnectorProm(config, list(LABELS), {0: list(LABELS.values())})


class TestStats:
    def test_counts_reach_vllms_metrics_and_its_log_line(
        self, make: MakeEngine, prometheus: Any
    ) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

        engine = make()
        seen, log = front_end(engine.config), KVConnectorLogging(engine.config.kv_transfer_config)
        engine.serve("a", prompt(3 * BLOCK + 5))
        for stats in engine.stats:
            seen.observe(pickle.loads(pickle.dumps(stats)))
            log.observe(stats)
        assert prometheus.get_sample_value("vllm:kvstore_saved_blocks_total", LABELS) == 3
        assert prometheus.get_sample_value("vllm:kvstore_save_seconds_count", LABELS) >= 1
        lines: list[str] = []
        log.log(lambda text, *args: lines.append(text % args))
        assert len(lines) == 1
        assert "kvstore_saved_blocks=3" in lines[0]
        assert "kvstore_save_seconds_mean=" in lines[0]

    def test_all_metrics_are_there_before_anything_happens(
        self, model: Path, prometheus: Any
    ) -> None:
        front_end(vllm_config(model, blocks=8))
        found = {metric.name for metric in prometheus.collect()}
        assert found == {f"vllm:{metric.name}" for metric in METRICS}
        for metric in METRICS:
            name = f"vllm:{metric.name}{'_count' if metric.buckets else '_total'}"
            for value in metric.values if metric.label else ("",):
                labels = {**LABELS, metric.label: value} if metric.label else LABELS
                assert prometheus.get_sample_value(name, labels) == 0, (name, value)

    def test_reasons_are_a_label(self, make: MakeEngine, prometheus: Any) -> None:
        from connector_parts import wait_for

        engine = make()
        seen, numbers = front_end(engine.config), itertools.count()

        def never_stored() -> float | None:
            """Reasons are found out beside the engine and told with a later step. On a busy
            machine the request may have stored its block before anybody asks why it was not
            there, so each time another prompt is tried."""
            seed = next(numbers)
            engine.serve(f"a{seed}", prompt(BLOCK + 5, seed=seed), max_tokens=1)
            while engine.stats:
                seen.observe(engine.stats.pop(0))
            labels = {**LABELS, "reason": "never-stored"}
            return prometheus.get_sample_value("vllm:kvstore_missed_requests_total", labels)

        wait_for(lambda: (never_stored() or 0) >= 1, "the request's reason")

    def test_of_several_workers_counts_are_added_by_vllms_aggregator(self) -> None:
        from connector.adapters.vllm.stats import KVStoreStats

        one, two = KVStoreStats({"n": 1, "s": [1.0]}), KVStoreStats({"n": 2, "s": [2.0]})
        assert one.aggregate(two) is one
        assert one.to_dict() == {"n": 3, "s": [1.0, 2.0]}
        assert one.reduce()["s_mean"] == 1.5
        assert not one.is_empty()
        one.reset()
        assert one.is_empty()

    def test_trap_under_multi_connector_stats_are_found_by_class_name(
        self, make: MakeEngine, prometheus: Any
    ) -> None:
        """The child is named by its module, so that nothing but its import registers it."""
        from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

        engine = make(transfer=multi(multi_child_without_stats()))
        engine.serve("a", prompt(3 * BLOCK + 5))
        seen, log = front_end(engine.config), KVConnectorLogging(engine.config.kv_transfer_config)
        for stats in engine.stats:
            assert set(stats) == {"KVStoreConnector"}
            seen.observe(pickle.loads(pickle.dumps(stats)))
            log.observe(pickle.loads(pickle.dumps(stats)))
        assert prometheus.get_sample_value("vllm:kvstore_lookup_blocks_total", LABELS) == 3
        lines: list[str] = []
        log.log(lambda text, *args: lines.append(text % args))
        assert "'kvstore_lookup_blocks': 3" in lines[0]


def multi_child_without_stats() -> dict[str, Any]:
    """vLLM's own connector that fills in dummy KV, as part of the step."""
    return {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_producer"}


def test_trap_what_another_connector_fills_in_within_the_step_is_not_saved(
    make: MakeEngine, store: MemoryBlockStore
) -> None:
    engine = make(transfer=multi(multi_child_without_stats()))
    engine.serve("a", prompt(3 * BLOCK + 5))
    assert store.sealed() == []
    alone = make(transfer=multi())
    alone.serve("a", prompt(3 * BLOCK + 5))
    assert len(store.sealed()) == 3


@pytest.mark.covers("MultiConnector", "model")
def test_hits_under_multi_connector_are_counted_as_the_childs(make: MakeEngine) -> None:
    tokens = prompt(2 * BLOCK + 3)
    for _ in range(2):
        engine = make(transfer=multi())
        engine.serve("a", tokens)
        assert engine.outputs["a"] == expected_output(tokens, 4)
    assert engine.hits == {"host": 2 * BLOCK}


class TestEvents:
    @pytest.mark.covers("KV events", "model")
    def test_blocks_that_were_saved_have_the_hashes_of_vllms_own_events(
        self, make: MakeEngine
    ) -> None:
        engine = make(events=True)
        tokens = prompt(3 * BLOCK + 5)
        engine.serve("a", tokens, max_tokens=1)
        device = [e for e in engine.events if e.medium == "GPU"]
        ours = [e for e in engine.events if e.medium == "CPU"]
        assert [type(e).__name__ for e in ours] == ["BlockStored"] * 3
        assert [h for e in ours for h in e.block_hashes] == [
            h for e in device for h in e.block_hashes
        ]
        assert [t for e in ours for t in e.token_ids] == tokens[: 3 * BLOCK]
        assert [e.parent_block_hash for e in ours] == [
            None,
            *(e.block_hashes[-1] for e in ours[:2]),
        ]
        for event in ours:
            assert event.block_size == ENGINE_BLOCK
            assert len(event.block_hashes) == len(event.extra_keys) == BLOCK // ENGINE_BLOCK
            assert (event.group_idx, event.kv_cache_spec_kind) == (0, device[0].kv_cache_spec_kind)
            assert (event.locality, event.ownership) == ("LOCAL", None)

    def test_what_else_shapes_the_kv_is_in_the_event_as_in_vllms_own(
        self, make: MakeEngine
    ) -> None:
        from vllm.lora.request import LoRARequest

        engine = make(events=True)
        lora = LoRARequest("a", 7, "a/path")
        engine.serve("a", prompt(BLOCK + 5), max_tokens=1, lora_request=lora, cache_salt="salt")
        (device,) = [e for e in engine.events if e.medium == "GPU"]
        (ours,) = [e for e in engine.events if e.medium == "CPU"]
        for name in ("lora_id", "lora_name", "extra_keys", "block_hashes", "token_ids"):
            assert getattr(ours, name) == getattr(device, name), name
        assert "salt" in ours.extra_keys[0]

    def test_a_block_that_is_gone_is_said_to_be_removed(
        self, make: MakeEngine, store: MemoryBlockStore
    ) -> None:
        engine = make(events=True)
        tokens = prompt(2 * BLOCK + 5)
        engine.serve("a", tokens)
        engine.scheduler.reset_prefix_cache()
        for key in store.sealed():
            store.evict(key)
        stored = [e for e in engine.events if e.medium == "CPU"]
        engine.events.clear()
        engine.serve("again", tokens)
        assert engine.outputs["again"] == expected_output(tokens, 4)
        said = [e for e in engine.events if getattr(e, "medium", None) == "CPU"]
        assert [type(e).__name__ for e in said] == ["BlockRemoved", *["BlockStored"] * 2]
        assert said[0].block_hashes == stored[0].block_hashes

    @pytest.mark.parametrize("blocks", [7, 8, 15])
    def test_hashes_of_an_event_count_as_whole_store_blocks_whose_size_is_published(
        self, make: MakeEngine, blocks: int
    ) -> None:
        """A router knows each engine block again; of those before the last whole one it may say
        that they can be loaded."""
        size = 8 * ENGINE_BLOCK
        producer = make(events=True, block_tokens=size)
        tokens = prompt(2 * size + 5)
        producer.serve("a", tokens, max_tokens=1)
        ours = [e for e in producer.events if e.medium == "CPU"]
        assert [len(e.block_hashes) * e.block_size for e in ours] == [size] * 2
        told = [stats.get("kvstore_block_tokens") for stats in producer.stats]
        assert [value for value in told if value] == [size], "once: a counter that stays"
        consumer = make(block_tokens=size)
        shared = blocks * ENGINE_BLOCK
        consumer.serve("b", tokens[:shared] + prompt(20, seed=9))
        assert consumer.loaded_tokens == shared // size * size

    def test_trap_nothing_is_said_of_a_save_that_did_not_happen(
        self, make: MakeEngine, store: MemoryBlockStore
    ) -> None:
        store.node_down = True
        engine = make(events=True)
        engine.serve("a", prompt(2 * BLOCK + 5))
        assert [e for e in engine.events if e.medium == "CPU"] == []
        assert [e for e in engine.events if e.medium == "GPU"] != []

    def test_each_group_says_its_own(self, make: MakeEngine) -> None:
        engine = make(events=True, window=24)
        engine.serve("a", prompt(2 * BLOCK + 5), max_tokens=1)
        ours = [e for e in engine.events if e.medium == "CPU"]
        assert sorted((e.group_idx, e.kv_cache_spec_sliding_window) for e in ours) == [
            (0, None),
            (0, None),
            (1, 24),
            (1, 24),
        ]

    def test_trap_events_reach_the_publisher_under_multi_connector(self, make: MakeEngine) -> None:
        """vLLM's MultiConnector forwards no worker's events, but all worker metadata."""
        engine = make(events=True, transfer=multi())
        engine.serve("a", prompt(2 * BLOCK + 5), max_tokens=1)
        ours = [e for e in engine.events if e.medium == "CPU"]
        assert [len(e.token_ids) for e in ours] == [BLOCK] * 2

    def test_nothing_is_said_when_vllm_publishes_nothing(self, make: MakeEngine) -> None:
        engine = make()
        engine.serve("a", prompt(2 * BLOCK + 5))
        assert engine.events == []

    def test_a_request_that_has_other_tokens_by_then_is_left_out(self, make: MakeEngine) -> None:
        from connector.messages import BlockEvent

        engine = make(events=True)
        connector = engine.scheduler.connector
        engine.add("a", prompt(2 * BLOCK + 5))
        engine.step()
        hashed = connector._requests["a"]
        good = BlockEvent(True, hashed, 0, 0, hashed.block_hashes[0])
        bad = good._replace(block_hash=b"another")
        late = good._replace(block=7)
        told = list(connector._events.of([bad, good, late]))
        assert [event.token_ids for event in told] == [prompt(2 * BLOCK + 5)[:BLOCK]]


def test_trap_the_policy_that_counts_is_that_of_the_top_level(
    model: Path, store: MemoryBlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MultiConnector gives each child a policy of its own, which vLLM never reads."""
    from vllm.config import set_current_vllm_config

    from connector.adapters.vllm import connector as adapter

    said: list[int] = []
    monkeypatch.setattr(adapter.logger, "error", lambda *_: said.append(logging.ERROR))
    for policy, times in (("recompute", 0), ("fail", 1)):
        transfer = {**multi(), "kv_load_failure_policy": policy}
        config = vllm_config(model, blocks=8, transfer=transfer)
        with set_current_vllm_config(config):  # as vLLM's workers do around making a connector
            engine = ModelEngine(model, store, monkeypatch, transfer=transfer)
        engine.close()
        assert len(said) == times, policy
