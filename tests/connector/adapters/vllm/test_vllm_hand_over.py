"""A prompt is computed by one engine and decoded by another, which computes one token of it.

Both are vLLM's own scheduler around a model whose output shows every wrong byte; what the first one
answers is given to the second as a router does, unchanged.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from connector_parts import TO_PREFILL
from vllm_model_config import BLOCK, ENGINE_BLOCK
from vllm_model_engine import MakeEngine, ModelEngine, expected_output, prompt

from kvstore import MissReason
from kvstore.spi import LookupResult
from kvstore.testing.blockstore import MemoryBlockStore

pytestmark = pytest.mark.vllm


def prefill(engine: ModelEngine, tokens: list[int], name: str = "p", **more: Any) -> dict[str, Any]:
    """Have the prompt computed, as a router asks for it; what a router is told."""
    engine.serve(name, tokens, max_tokens=1, params=TO_PREFILL, **more)
    return dict(engine.told[name])


def decode(
    engine: ModelEngine, tokens: list[int], told: dict[str, Any], name: str = "d", **expected: Any
) -> int:
    """Tokens of the prompt that the engine computed; its answer is right."""
    before = engine.computed_tokens
    engine.serve(name, tokens, params=told)
    assert engine.outputs[name] == expected_output(tokens, 4, **expected)
    return engine.computed_tokens - before - 3


@pytest.mark.parametrize("rest", [0, 1, 2, ENGINE_BLOCK, ENGINE_BLOCK + 5, BLOCK - 1])
@pytest.mark.parametrize("full", [0, 1, 3])
def test_decode_computes_one_token(
    make: MakeEngine, token_by_token: None, full: int, rest: int
) -> None:
    tokens = prompt(full * BLOCK + rest, seed=rest)
    if len(tokens) < 2:
        return
    told = prefill(make(role="kv_producer"), tokens)
    assert (told["do_remote_prefill"], told["do_remote_decode"]) == (True, False)
    assert decode(make(role="kv_consumer"), tokens, told) == 1


@pytest.mark.parametrize("kind", [{"window": 24}, {"chunk": 64}])
def test_decode_computes_one_token_of_groups_that_forget(
    make: MakeEngine, token_by_token: None, kind: dict[str, int]
) -> None:
    producer, consumer = make(**kind), make(**kind)
    for i, count in enumerate([2 * BLOCK + 9, 3 * BLOCK, 4 * BLOCK - 1]):
        tokens = prompt(count, seed=count)
        told = prefill(producer, tokens, f"p{i}")
        assert decode(consumer, tokens, told, f"d{i}", **kind) == 1


def test_states_are_handed_over_as_before(make: MakeEngine, token_by_token: None) -> None:
    kind: dict[str, Any] = {"recurrent": True, "block_tokens": ENGINE_BLOCK}
    tokens = prompt(4 * ENGINE_BLOCK + 5)
    told = prefill(make(**kind), tokens)
    assert decode(make(**kind), tokens, told, recurrent=True) == 5


def test_ordinary_requests_save_no_part(make: MakeEngine, store: MemoryBlockStore) -> None:
    engine = make()
    engine.serve("a", prompt(2 * BLOCK + 9), max_tokens=1)
    assert len(store.sealed()) == 2
    told = prefill(engine, prompt(2 * BLOCK + 9))
    assert len(store.sealed()) == 3
    assert told["kvstore_tokens"] == 2 * BLOCK + 9


def test_a_part_is_of_that_prompt_alone(make: MakeEngine, token_by_token: None) -> None:
    """Longer, shorter, with another last token or another salt: what is not its is not loaded."""
    tokens = prompt(BLOCK + 9)
    told = prefill(make(role="kv_producer"), tokens)
    engine = make(role="kv_consumer")
    told["kvstore_tokens"] = 0  # nobody is to wait for what does not come
    assert decode(engine, [*tokens, 7], told, "longer") == 10
    engine.scheduler.reset_prefix_cache()
    assert decode(engine, tokens[:-1], told, "shorter") == 8
    engine.scheduler.reset_prefix_cache()
    other = [*tokens[:-1], (tokens[-1] + 1) % 500]
    assert decode(engine, other, told, "other") == 9
    engine.scheduler.reset_prefix_cache()
    engine.add("salted", tokens, params=told, cache_salt="another tenant")
    before = engine.computed_tokens
    engine.run()
    assert engine.computed_tokens - before == len(tokens) + 3


def test_what_others_left_behind_a_part_is_not_stored(
    make: MakeEngine, store: MemoryBlockStore, token_by_token: None
) -> None:
    engine = make(role="kv_producer")
    for kv in engine.kv:
        kv.fill_(1.0)  # as if all blocks had had other owners
    prefill(engine, prompt(ENGINE_BLOCK + 3))
    (slot,) = store.slots()
    # [layer][head][token][C], of which ENGINE_BLOCK + 3 tokens are the prompt's.
    per_head = len(slot.payload) // 4
    token_bytes = per_head // BLOCK
    for head in range(4):
        rest = slot.payload[head * per_head : (head + 1) * per_head]
        assert any(rest[: (ENGINE_BLOCK + 3) * token_bytes])
        assert not any(rest[(ENGINE_BLOCK + 3) * token_bytes :])


def test_pages_in_one_piece_are_not_stored_beside_what_must_not_be_kept(
    make: MakeEngine, store: MemoryBlockStore
) -> None:
    engine = make(role="kv_producer")
    prefill(engine, prompt(BLOCK + 9), "p0")
    assert len(store.sealed()) == 2
    engine.serve("private", prompt(BLOCK, seed=9), params={"skip_save": True})
    told = prefill(engine, prompt(BLOCK + 9, seed=1), "p1")
    assert (len(store.sealed()), told["kvstore_tokens"]) == (3, BLOCK)


def test_decode_waits_for_saves_in_flight(
    make: MakeEngine, store: MemoryBlockStore, token_by_token: None
) -> None:
    tokens = prompt(2 * BLOCK + 9)
    producer, consumer = make(role="kv_producer"), make(role="kv_consumer")
    consumer.add("d", tokens, params={"do_remote_prefill": True, "kvstore_tokens": len(tokens)})
    for _ in range(50):
        consumer.step()
    assert consumer.computed_tokens == 0
    prefill(producer, tokens)
    consumer.run()
    assert consumer.outputs["d"] == expected_output(tokens, 4)
    assert consumer.computed_tokens == 1 + 3


def test_an_index_that_is_late_once_does_not_end_the_wait(
    make: MakeEngine, store: MemoryBlockStore, token_by_token: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(2 * BLOCK + 9)
    told = prefill(make(role="kv_producer"), tokens)
    lookup, asked = store.lookup, []

    def late(keys: Any, timeout_s: float | None = None) -> LookupResult:
        asked.append(keys)
        if len(asked) > 4:  # this host and the index, twice each
            return lookup(keys, timeout_s)
        nothing = LookupResult([None] * len(keys))
        nothing.short = MissReason.DEADLINE
        return nothing

    consumer = make(role="kv_consumer")
    monkeypatch.setattr(store, "lookup", late)
    assert decode(consumer, tokens, told) == 1
    assert len(asked) > 4


def test_what_never_comes_is_computed_after_the_wait_that_an_operator_sets(
    make: MakeEngine,
) -> None:
    tokens = prompt(2 * BLOCK + 9)
    told = {"do_remote_prefill": True, "kvstore_tokens": len(tokens)}
    began = time.monotonic()
    engine = make(role="kv_consumer", hand_over_wait_s=0.1)
    assert decode(engine, tokens, told) == len(tokens)
    assert time.monotonic() - began >= 0.1


@pytest.mark.parametrize("told", [{"do_remote_prefill": True}, {"do_remote_prefill": "yes"}])
@pytest.mark.parametrize("count", ["many", -3, 10**9, None, True])
def test_what_a_router_makes_up_does_no_harm(
    make: MakeEngine, told: dict[str, Any], count: object
) -> None:
    tokens = prompt(BLOCK + 9)
    engine = make(hand_over_wait_s=0.1)
    assert decode(engine, tokens, {**told, "kvstore_tokens": count}) == len(tokens)


def test_a_part_that_is_lost_on_the_way_is_computed(
    make: MakeEngine, store: MemoryBlockStore, token_by_token: None
) -> None:
    tokens = prompt(2 * BLOCK + 9)
    told = prefill(make(role="kv_producer"), tokens)
    consumer = make(role="kv_consumer")
    store.evict(store.sealed()[-1], forget=False)
    assert decode(consumer, tokens, told) == 9


def test_a_child_of_multi_connector_leaves_the_answer_to_others(make: MakeEngine) -> None:
    child = {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "connector.adapters.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"block_tokens": BLOCK, "lookup_timeout_s": 5.0},
    }
    engine = make(
        transfer={
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [child, child]},
        }
    )
    engine.serve("p", prompt(BLOCK + 9), max_tokens=1, params=TO_PREFILL)
    assert engine.told == {}
