"""Layer by layer under vLLM's own scheduler, with a model that shows every wrong byte.

What vLLM 0.32 does when a load of a running step fails is part of what is tested:
it drops that step's tokens and computes again, and nothing of the step is stored.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from each_input import each
from vllm_model_checks import check_answers, check_under_pressure
from vllm_model_config import BLOCK, ENGINE_BLOCK, LAYERS, kv_cache_config, vllm_config
from vllm_model_engine import MakeEngine, expected_output, prompt

from kvstore import UsageError
from kvstore.testing.blockstore import MemoryBlockStore

pytestmark = pytest.mark.vllm


@pytest.fixture
def make(make: MakeEngine) -> MakeEngine:
    return partial(make, layerwise=True)


def fail_in_layer(store: MemoryBlockStore, layer: int, blocks: int, gone: bytes) -> None:
    """Have the block `gone` vanish between the copy of that layer and its check.

    `blocks` are copied in each layer.
    """
    checks: list[None] = []

    def checked() -> None:
        checks.append(None)
        if len(checks) == layer * blocks + 1:
            store.evict(gone)

    store.on_check = checked


@pytest.mark.parametrize("saved_by", [True, False], ids=["saved_by_layers", "saved_whole"])
@pytest.mark.covers("layer by layer", "model")
def test_what_one_engine_computed_another_loads(make: MakeEngine, saved_by: bool) -> None:
    producer, consumer = make(role="kv_producer", layerwise=saved_by), make(role="kv_consumer")
    tokens = prompt(3 * BLOCK + 5)
    check_answers([producer, consumer], tokens)
    assert consumer.loaded_tokens == 3 * BLOCK
    assert consumer.computed_tokens == 5 + 3


def test_negative_control_a_wrong_byte_in_the_store_changes_the_output(
    make: MakeEngine, store: MemoryBlockStore
) -> None:
    producer, consumer = make(), make()
    tokens = prompt(2 * BLOCK + 5)
    producer.serve("a", tokens)
    next(iter(store.slots())).payload[-17] ^= 1  # in the last layer
    consumer.serve("a", tokens)
    assert consumer.loaded_tokens == 2 * BLOCK
    assert consumer.outputs["a"] != expected_output(tokens, 4)


def test_trap_a_whole_prompt_hit_computes_the_last_block(make: MakeEngine) -> None:
    """vLLM asserts that a step with a load has a token to compute."""
    producer, consumer = make(), make()
    tokens = prompt(2 * BLOCK)
    check_answers([producer, consumer], tokens)
    assert consumer.loaded_tokens == 2 * BLOCK - ENGINE_BLOCK
    assert consumer.computed_tokens == ENGINE_BLOCK + 3


def test_a_tail_computed_on_a_load_is_saved_once_the_load_is_known_to_be_good(
    make: MakeEngine, store: MemoryBlockStore
) -> None:
    producer, consumer = make(), make()
    tokens = prompt(5 * BLOCK + 1)
    producer.serve("a", tokens[: 2 * BLOCK + 3], max_tokens=1)
    consumer.add("b", tokens, max_tokens=1)  # ends in the very step of its load
    consumer.run()
    assert consumer.loaded_tokens == 2 * BLOCK
    assert len(store.sealed()) == 5
    third = make()
    third.serve("c", tokens)
    assert third.loaded_tokens == 5 * BLOCK
    assert third.outputs["c"] == expected_output(tokens, 4)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_trap_a_load_that_fails_in_the_middle_is_computed_and_nothing_of_the_step_is_stored(
    make: MakeEngine, store: MemoryBlockStore, layer: int
) -> None:
    producer, consumer = make(), make()
    tokens = prompt(5 * BLOCK + 1)
    producer.serve("a", tokens[: 3 * BLOCK + 3], max_tokens=1)
    fail_in_layer(store, layer, 3, store.sealed()[0])
    consumer.serve("b", tokens)
    store.on_check = lambda: None
    assert consumer.loaded_tokens == 3 * BLOCK, "a load was planned"
    assert consumer.computed_tokens == (2 * BLOCK + 1) + (5 * BLOCK + 1) + 3, "twice"
    assert consumer.outputs["b"] == expected_output(tokens, 4)
    third = make()
    third.serve("c", tokens)
    assert third.loaded_tokens == 5 * BLOCK, "computed again, then saved"
    assert third.outputs["c"] == expected_output(tokens, 4)


def test_what_layers_carried_is_counted_and_said_to_be_stored_when_it_is_right(
    make: MakeEngine, store: MemoryBlockStore
) -> None:
    producer, consumer = make(), make(events=True)
    tokens = prompt(5 * BLOCK + 1)
    producer.serve("a", tokens[: 3 * BLOCK + 3], max_tokens=1)
    fail_in_layer(store, 1, 3, store.sealed()[0])
    consumer.serve("b", tokens, max_tokens=1)
    store.on_check = lambda: None
    ours = [event for event in consumer.events if event.medium == "CPU"]
    assert [type(event).__name__ for event in ours] == ["BlockStored"] * 5
    assert [t for event in ours for t in event.token_ids] == tokens[: 5 * BLOCK], "once, in order"
    counts: dict[str, Any] = {}
    for stats in (s for s in consumer.stats if s):
        for name, value in stats.items():
            counts[name] = counts.get(name, type(value)()) + value
    assert counts["kvstore_failed_loads:load-failed"] == 1
    assert counts["kvstore_saved_blocks"] == 3
    assert counts["kvstore_unsaved_blocks:exists"] == 2
    assert counts["kvstore_save_seconds"]


def test_trap_requests_that_share_a_failed_load_give_the_right_tokens(
    make: MakeEngine, store: MemoryBlockStore
) -> None:
    """The second one hits, in vLLM's own cache, what the first is loading in the same step."""
    producer, consumer = make(), make(max_batched_tokens=100)
    shared = prompt(3 * BLOCK)
    producer.serve("a", [*shared, 1], max_tokens=1)
    fail_in_layer(store, 1, 3, store.sealed()[1])
    wanted = {name: shared + prompt(BLOCK + 2, seed=i) for i, name in enumerate("bcd", 1)}
    for name, tokens in wanted.items():
        consumer.add(name, tokens)
    consumer.run()
    store.on_check = lambda: None
    third = make()
    for name, tokens in wanted.items():
        third.serve(name, tokens)
        assert consumer.outputs[name] == expected_output(tokens, 4)
        assert third.outputs[name] == expected_output(tokens, 4)


def test_trap_a_request_aborted_after_its_load_failed_leaves_no_wrong_block_behind(
    make: MakeEngine, store: MemoryBlockStore
) -> None:
    """vLLM keeps blocks of a failed load in its prefix cache, to be computed again in place.

    When the request is aborted before that, nobody does it.
    """
    producer, consumer = make(), make()
    tokens = prompt(4 * BLOCK + 3)
    producer.serve("a", tokens[: 2 * BLOCK + 1], max_tokens=1)
    fail_in_layer(store, 1, 2, store.sealed()[0])
    consumer.add("b", tokens)
    while consumer.loaded_tokens == 0:
        consumer.step()
    store.on_check = lambda: None
    assert consumer.outputs["b"] == []
    consumer.abort("b")
    store.index_down = True  # only vLLM's own cache is left to hit
    consumer.serve("c", tokens)
    assert consumer.outputs["c"] == expected_output(tokens, 4)
    assert consumer.free_blocks == 127


@pytest.mark.parametrize("seed", range(4))
def test_many_engines_with_failing_loads_never_give_or_store_a_wrong_token(
    make: MakeEngine, store: MemoryBlockStore, seed: int
) -> None:
    """Shared prefixes, preemption, aborts, and blocks that vanish at any check."""
    rng = random.Random(seed)
    faults = random.Random(1000 + seed)  # of the copying threads
    store.capacity_blocks = 14

    def checked() -> None:
        if faults.random() < 0.1 and (sealed := store.sealed()):
            store.evict(faults.choice(sealed), forget=faults.random() < 0.5)

    store.on_check = checked
    engines = [make(blocks=24, max_batched_tokens=50) for _ in range(2)]
    check_under_pressure(engines, rng)


class TestRefusals:
    def check(self, config: Any, model: Path, **changes: Any) -> None:
        from connector.adapters.vllm.shape import engine_shape
        from connector.settings import ConnectorSettings

        for path, value in changes.items():
            part, _, name = path.partition("__")
            if name:
                object.__setattr__(getattr(config, part), name, value)
            else:
                object.__setattr__(config, part, value)
        engine_shape(config, kv_cache_config(8), ConnectorSettings(layerwise=True))

    @each(
        ("setting", "changes"),
        [
            ("async_scheduling", {"scheduler_config__async_scheduling": True}),
            ("long_prefill_token_threshold", {"scheduler_config__long_prefill_token_threshold": 9}),
            ("pipeline_parallel_size", {"parallel_config__pipeline_parallel_size": 2}),
            ("enable_dbo", {"parallel_config__enable_dbo": True}),
            ("speculative_config", {"speculative_config": object()}),
        ],
    )
    def test_what_vllm_does_not_undo_is_refused_by_name(
        self, model: Path, setting: str, changes: dict[str, Any]
    ) -> None:
        with pytest.raises(UsageError, match=setting):
            self.check(vllm_config(model, blocks=8), model, **changes)

    def test_the_second_model_runner_is_refused(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = vllm_config(model, blocks=8)
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        with pytest.raises(UsageError, match="VLLM_USE_V2_MODEL_RUNNER"):
            self.check(config, model)

    def test_a_producer_needs_none_of_what_loads_need(self, model: Path) -> None:
        config = vllm_config(model, "kv_producer", blocks=8)
        self.check(config, model, scheduler_config__async_scheduling=True)

    def test_loads_of_several_groups_are_refused_and_saves_are_not(self, make: MakeEngine) -> None:
        with pytest.raises(UsageError, match="layerwise"):
            make(window=2 * BLOCK)
        producer = make(window=2 * BLOCK, role="kv_producer")
        consumer = make(window=2 * BLOCK, role="kv_consumer", layerwise=False)
        tokens = prompt(4 * BLOCK + 5)
        check_answers([producer, consumer], tokens, window=2 * BLOCK)
        assert consumer.loaded_tokens == 4 * BLOCK

    def test_full_cuda_graphs_are_excluded(self) -> None:
        from connector.adapters.vllm.connector import KVStoreConnector

        assert KVStoreConnector.requires_piecewise_for_cudagraph({"layerwise": True})
        assert not KVStoreConnector.requires_piecewise_for_cudagraph({})
