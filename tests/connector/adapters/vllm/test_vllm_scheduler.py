"""The vLLM adapter under vLLM's own scheduler, with a model that shows every wrong byte."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from vllm_model_checks import check_answers, check_under_pressure, evict_some, evict_unnoticed
from vllm_model_config import BLOCK, ENGINE_BLOCK
from vllm_model_engine import MakeEngine, ModelEngine, expected_output, prompt

from connector import PromptKeys
from kvstore.spi import Tier
from kvstore.testing.blockstore import MemoryBlockStore

pytestmark = pytest.mark.vllm


@pytest.mark.covers("full attention", "model")
def test_what_one_engine_computed_another_loads(make: MakeEngine) -> None:
    producer, consumer = make(role="kv_producer"), make(role="kv_consumer")
    tokens = prompt(3 * BLOCK + 5)
    check_answers([producer, consumer], tokens)
    assert producer.loaded_tokens == 0
    assert consumer.loaded_tokens == 3 * BLOCK
    assert consumer.computed_tokens == 5 + 3


def test_vllm_is_told_from_where_each_token_came(make: MakeEngine, store: MemoryBlockStore) -> None:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    tokens = prompt(4 * BLOCK + 5)
    producer, consumer = make(role="kv_producer"), make(role="kv_consumer")
    producer.serve("a", tokens)
    device, disk, peer = store.sealed()[:3]
    store.elsewhere = {device: Tier.VRAM, disk: Tier.DISK, peer: Tier.OTHER_HOST}
    connector = consumer.scheduler.connector
    sources: list[dict[CacheHitSource, int]] = []
    ask = connector.get_external_cache_hit_sources

    def asked(request: object, num_external_tokens: int) -> dict[CacheHitSource, int]:
        sources.append(ask(request, num_external_tokens))
        return sources[-1]

    connector.get_external_cache_hit_sources = asked
    consumer.serve("a", tokens)
    assert sources == [
        {
            CacheHitSource.DEVICE: BLOCK,
            CacheHitSource.DISK: BLOCK,
            CacheHitSource.P2P: BLOCK,
            CacheHitSource.HOST: BLOCK,
        }
    ]


def test_a_producer_loads_nothing_and_a_consumer_saves_nothing(
    make: MakeEngine, store: MemoryBlockStore
) -> None:
    tokens = prompt(3 * BLOCK + 5)

    def answer(engine: ModelEngine) -> None:
        engine.serve("a", tokens)
        assert engine.outputs["a"] == expected_output(tokens, 4)

    answer(make(role="kv_consumer"))
    assert store.sealed() == []
    answer(make(role="kv_producer"))
    saved = len(store.sealed())
    assert saved == 3
    other = make(role="kv_producer")
    answer(other)
    assert (other.loaded_tokens, other.computed_tokens) == (0, len(tokens) + 3)
    assert len(store.sealed()) == saved


@pytest.mark.parametrize("salt", [None, "salt"])
def test_a_request_that_asks_is_told_the_keys_it_is_saved_under(
    make: MakeEngine, store: MemoryBlockStore, salt: str | None
) -> None:
    engine = make(role="kv_producer")
    tokens = prompt(2 * BLOCK - 1)  # the first token generated fills the second block
    asking = {PromptKeys.ASKED: True}
    engine.add("asks", tokens, max_tokens=1, cache_salt=salt)
    engine.scheduler.requests["asks"].kv_transfer_params = asking
    engine.serve("does not ask", prompt(BLOCK, seed=1))
    assert list(engine.told) == ["asks"]
    keys, last = PromptKeys.from_answer(engine.told["asks"][PromptKeys.ASKED])
    assert last in store.sealed()
    assert keys.block_tokens == BLOCK
    assert (keys.of(tokens) == [last]) is (salt is None)


def test_trap_two_connectors_that_are_asked_give_one_answer(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM raises in the scheduler when two connectors of a MultiConnector use one name."""
    ours = {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "connector.adapters.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    children = [{**ours, "kv_connector_extra_config": {"weights_id": name}} for name in ("a", "b")]
    multi = {
        **ours,
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": children},
    }
    del multi["kv_connector_module_path"]
    engine = ModelEngine(model, MemoryBlockStore(), monkeypatch, transfer=multi)
    engine.add("a", prompt(BLOCK + 1))
    engine.scheduler.requests["a"].kv_transfer_params = {PromptKeys.ASKED: True}
    engine.run()
    keys, _ = PromptKeys.from_answer(engine.told["a"][PromptKeys.ASKED])
    assert keys.namespace.fields["weights"] == "id a"
    engine.close()


def test_negative_control_a_wrong_byte_in_the_store_changes_the_output(
    make: MakeEngine, store: MemoryBlockStore
) -> None:
    producer, consumer = make(role="kv_producer"), make(role="kv_consumer")
    tokens = prompt(2 * BLOCK + 5)
    producer.serve("a", tokens)
    slot = next(iter(store.slots()))
    slot.payload[17] ^= 1
    consumer.serve("a", tokens)
    assert consumer.loaded_tokens == 2 * BLOCK
    assert consumer.outputs["a"] != expected_output(tokens, 4)


def test_trap_a_whole_prompt_hit_computes_one_token(make: MakeEngine) -> None:
    producer, consumer = make(), make()
    tokens = prompt(2 * BLOCK)
    check_answers([producer, consumer], tokens)
    assert consumer.computed_tokens == 1 + 3


@pytest.mark.covers("chunked prefill", "model")
def test_chunked_prefill_saves_and_loads(make: MakeEngine) -> None:
    producer = make(max_batched_tokens=ENGINE_BLOCK + 3)
    consumer = make(max_batched_tokens=ENGINE_BLOCK + 3)
    tokens = prompt(5 * BLOCK + 7)
    check_answers([producer, consumer], tokens)
    assert consumer.loaded_tokens == 5 * BLOCK


def test_a_local_hit_is_kept_and_only_the_rest_is_loaded(make: MakeEngine) -> None:
    producer, consumer = make(), make()
    tokens = prompt(3 * BLOCK + 5)
    producer.serve("a", tokens)
    # One engine block of the same prefix, not a whole store block, is cached locally.
    consumer.serve("short", tokens[: ENGINE_BLOCK + 1], max_tokens=1)
    consumer.serve("a", tokens)
    assert consumer.outputs["a"] == expected_output(tokens, 4)
    assert consumer.loaded_tokens == 3 * BLOCK - ENGINE_BLOCK


def test_generated_tokens_are_shared_too(make: MakeEngine) -> None:
    producer, consumer = make(), make()
    tokens = prompt(BLOCK + 3)
    producer.serve("a", tokens, max_tokens=BLOCK)
    longer = tokens + producer.outputs["a"]
    consumer.serve("b", longer)
    assert consumer.outputs["b"] == expected_output(longer, 4)
    assert consumer.loaded_tokens == 2 * BLOCK - (2 * BLOCK) % BLOCK


@pytest.mark.parametrize("v2_runner", [False, True], ids=["v1_runner", "v2_runner"])
@pytest.mark.covers("preemption", "model")
@pytest.mark.covers("model runner V2", "model")
def test_trap_preempted_requests_give_the_same_output_with_both_runners(
    make: MakeEngine, v2_runner: bool
) -> None:
    """Blocks are reused while saves of their former owner are in flight."""
    engine = make(blocks=26, v2_runner=v2_runner)
    prompts = {f"r{i}": prompt(4 * ENGINE_BLOCK + 5, seed=i) for i in range(5)}
    for name, tokens in prompts.items():
        engine.add(name, tokens, max_tokens=40)
    engine.run()
    assert engine.preemptions > 0, "the space was meant to be too small"
    for name, tokens in prompts.items():
        assert engine.outputs[name] == expected_output(tokens, 40)
    again = make(blocks=64)
    for name, tokens in prompts.items():
        again.add(name, tokens, max_tokens=40)
    again.run()
    assert again.loaded_tokens >= 5 * 2 * BLOCK
    for name, tokens in prompts.items():
        assert again.outputs[name] == expected_output(tokens, 40)


def saved_in_a_step(engine: ModelEngine) -> list[int]:
    """The blocks that the first step with saves hands over; until a lookup has its answer
    a request is in no step."""
    for _ in range(10_000):
        engine.step()
        saves = engine.metadata[-1].plan.saves
        if saves:
            return [block for job in saves for b in job.blocks for block in b.block_ids]
    raise AssertionError("no step saved anything")


def test_trap_blocks_freed_by_preemption_are_not_reused_while_a_save_reads_them(
    make: MakeEngine, store: MemoryBlockStore
) -> None:
    import threading

    gate = threading.Event()
    store.on_reserve = lambda: gate.wait(10) and None  # saves stay in flight
    engine = make(blocks=64, pinned_fraction=1.0)
    engine.add("a", prompt(2 * BLOCK), max_tokens=1)
    held = saved_in_a_step(engine)
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert len(held) == 2 * BLOCK // ENGINE_BLOCK
    assert [pool.blocks[i].ref_cnt for i in held] == [1] * len(held), "the request is done"
    free = engine.free_blocks
    engine.add("b", prompt(8 * BLOCK, seed=1), max_tokens=1)
    table = set(saved_in_a_step(engine))
    assert table.isdisjoint(held)
    gate.set()
    engine.run()
    assert engine.free_blocks == 63 >= free


def test_trap_an_idle_engine_steps_until_its_saves_are_done(make: MakeEngine) -> None:
    engine = make()
    engine.add("a", prompt(2 * BLOCK), max_tokens=1)
    saved_in_a_step(engine)
    assert engine.scheduler.connector.has_pending_push_work()
    engine.run()
    assert not engine.scheduler.connector.has_pending_push_work()
    assert engine.free_blocks == 127, "all but the null block"


def test_trap_a_bad_first_block_terminates_with_the_right_output(
    make: MakeEngine, store: MemoryBlockStore
) -> None:
    producer, consumer = make(), make(role="kv_consumer")
    tokens = prompt(3 * BLOCK + 5)
    producer.serve("a", tokens)
    evict_unnoticed(store)
    check_answers([consumer], tokens, steps_max=100)


def test_a_bad_later_block_keeps_the_good_prefix(make: MakeEngine, store: MemoryBlockStore) -> None:
    producer, consumer = make(), make(role="kv_consumer")
    tokens = prompt(3 * BLOCK + 5)
    producer.serve("a", tokens)
    store.evict(store.sealed()[1], forget=False)
    consumer.serve("a", tokens)
    assert consumer.outputs["a"] == expected_output(tokens, 4)
    assert consumer.computed_tokens == 2 * BLOCK + 5 + 3


def test_trap_an_abort_during_a_load_frees_the_blocks_and_later_requests_are_right(
    make: MakeEngine, store: MemoryBlockStore
) -> None:
    import threading

    producer, consumer = make(), make(role="kv_consumer")
    tokens = prompt(3 * BLOCK + 5)
    producer.serve("a", tokens)
    gate, reached = threading.Event(), threading.Event()

    def hang() -> None:
        reached.set()
        gate.wait(10)

    store.on_view = hang
    consumer.add("gone", tokens)
    while not reached.is_set():
        consumer.step()
    consumer.abort("gone")
    consumer.run()
    assert consumer.free_blocks == 127
    gate.set()
    store.on_view = lambda: None
    consumer.serve("a", tokens)
    assert consumer.outputs["a"] == expected_output(tokens, 4)


def test_a_dead_store_answers_every_request(make: MakeEngine, store: MemoryBlockStore) -> None:
    store.node_down = store.index_down = True
    engine = make()
    tokens = prompt(3 * BLOCK + 5)
    engine.serve("a", tokens)
    assert engine.outputs["a"] == expected_output(tokens, 4)
    assert engine.free_blocks == 127


def test_trap_a_slow_lookup_does_not_hold_up_other_requests(
    make: MakeEngine, store: MemoryBlockStore
) -> None:
    import threading

    gate = threading.Event()
    store.on_match = lambda: gate.wait(10) and None
    engine = make(lookup_timeout_s=5.0)
    engine.add("long", prompt(2 * BLOCK))
    engine.add("short", prompt(5, seed=1), max_tokens=1)
    engine.step()
    assert engine.outputs == {"long": [], "short": expected_output(prompt(5, seed=1), 1)}
    gate.set()
    engine.run()
    assert engine.outputs["long"] == expected_output(prompt(2 * BLOCK), 4)


def test_trap_reset_clears_what_was_stored(make: MakeEngine, store: MemoryBlockStore) -> None:
    engine = make()
    engine.serve("a", prompt(2 * BLOCK))
    assert store.sealed()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is True
    assert store.sealed() == []
    store.node_down = True
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is True


def test_trap_hits_are_counted_as_coming_from_the_host(make: MakeEngine) -> None:
    producer, consumer = make(), make()
    tokens = prompt(2 * BLOCK + 3)
    producer.serve("a", tokens)
    consumer.serve("a", tokens)
    assert producer.hits == {}
    assert consumer.hits == {"host": 2 * BLOCK}


@pytest.mark.parametrize("seed", range(4))
def test_many_engines_under_pressure_never_give_a_wrong_token(
    make: MakeEngine, store: MemoryBlockStore, seed: int
) -> None:
    rng = random.Random(seed)
    store.capacity_blocks = 12
    engines = [make(blocks=24, max_batched_tokens=50) for _ in range(2)]
    check_under_pressure(engines, rng, between=lambda: evict_some(store, rng))


def test_hints_of_a_request_reach_the_store(make: MakeEngine, store: MemoryBlockStore) -> None:
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    action = KvHintAction("a", "retain", "1", {"ttl_s": 60, "tenant": "t"})
    engine = make()
    engine.serve("a", prompt(2 * BLOCK + 5), kv_hints=KvHintsEnvelope("1", "m", [action]))
    engine.scheduler.connector._s._retainer.close()
    assert set(store.retained.values()) == {(60, "t")}
