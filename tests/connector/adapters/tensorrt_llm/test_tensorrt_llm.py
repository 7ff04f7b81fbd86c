"""The adapter for TensorRT-LLM in a model of its executor: no wrong token, no promise broken."""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from each_input import each

pytest.importorskip("torch")
from stores import MIB, NodeProcess
from trtllm_engines import PROMPT, Make, alone, maker, request_of
from trtllm_model_engine import (
    BLOCK,
    OPTIONAL,
    SCHEDULER_METHODS,
    WORKER_METHODS,
    ModelEngine,
    arguments,
    install,
)

from connector.limits import CONFIG_BYTES_MAX
from kvstore import UsageError
from kvstore.testing.blockstore import MemoryBlockStore

if TYPE_CHECKING:
    from redis_servers import RedisServer


@pytest.mark.parametrize("moved", [True, False], ids=["connectors", "pyexecutor"])
def test_both_sides_have_every_call_of_the_interface_in_both_its_places(
    monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    install(monkeypatch, moved=moved)
    import connector.adapters.tensorrt_llm as package

    for side, methods in (
        (package.KVStoreScheduler, {**SCHEDULER_METHODS, **OPTIONAL}),
        (package.KVStoreWorker, WORKER_METHODS),
    ):
        assert not side.__abstractmethods__
        for name, parameters in methods.items():
            found = list(inspect.signature(getattr(side, name)).parameters)
            assert found == ["self", *parameters], name


@pytest.mark.covers("full attention", "interface")
def test_what_one_engine_computed_another_one_loads(make: Make) -> None:
    first, second = make(), make()
    wanted = alone(PROMPT)
    assert first.generate([PROMPT])[0].generated == wanted
    (found,) = second.generate([PROMPT])
    assert (found.generated, found.cached) == (wanted, 8 * BLOCK)


def test_calls_come_in_the_engines_order(make: Make) -> None:
    engine = make()
    engine.generate([PROMPT], 1)
    assert engine.calls == [
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "layer 0",
        "layer 1",
        "wait_for_save",
        "request_finished",
    ]


@pytest.mark.covers("tensor parallel 1 and 2, mixed", "interface")
def test_ranks_load_their_own_shards_and_sizes_share_nothing(make: Make) -> None:
    make(ranks=2).generate([PROMPT])
    (found,) = make(ranks=2).generate([PROMPT])
    assert (found.generated, found.cached) == (alone(PROMPT, ranks=2), 8 * BLOCK)
    (other,) = make(ranks=1).generate([PROMPT])
    assert (other.generated, other.cached) == (alone(PROMPT), 0)


@pytest.mark.covers("chunked prefill", "interface")
@pytest.mark.parametrize("grow", [False, True], ids=["all-blocks", "blocks-by-chunk"])
def test_prompts_in_chunks_are_saved_and_loaded(make: Make, grow: bool) -> None:
    make(chunk=6, grow=grow).generate([PROMPT])
    longer = [*PROMPT, *range(2, 20)]
    (found,) = make(chunk=6, grow=grow).generate([longer])
    assert found.generated == alone(longer)
    assert found.cached == 8 * BLOCK


def test_generated_blocks_are_saved_too(make: Make) -> None:
    (first,) = make().generate([PROMPT], 3 * BLOCK)
    turn = [*PROMPT, *first.generated, 5, 6, 7]
    (found,) = make().generate([turn])
    assert found.generated == alone(turn)
    assert found.cached == (len(PROMPT) + 3 * BLOCK - 1) // BLOCK * BLOCK


def test_the_last_token_is_always_computed(make: Make) -> None:
    whole = PROMPT[: 4 * BLOCK]
    make().generate([whole])
    (found,) = make().generate([whole])
    assert (found.generated, found.cached) == (alone(whole), 3 * BLOCK)


@pytest.mark.covers("LoRA", "left out")
@pytest.mark.covers("multimodal input", "left out")
def test_salts_share_nothing_and_what_tokens_do_not_say_is_left_out(
    make: Make, store: MemoryBlockStore
) -> None:
    engine = make()
    engine.generate([PROMPT], cache_salt="a")
    (found,) = make().generate([PROMPT], cache_salt="b")
    assert (found.generated, found.cached) == (alone(PROMPT, cache_salt="b"), 0)
    before = len(store.sealed())
    for more in ({"lora_task_id": 3}, {"multimodal_hashes": [[1]]}):
        (one,) = make().generate([PROMPT], **more)
        assert one.cached == 0
    assert len(store.sealed()) == before


def test_other_weights_and_other_blocks_share_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    make().generate([PROMPT])
    (found,) = make(dtype="bfloat16").generate([PROMPT])
    assert found.cached == 0
    monkeypatch.setenv("KVSTORE_TENSORRT_LLM", json.dumps({"weights_id": "others"}))
    assert make().generate([PROMPT])[0].cached == 0


def test_a_store_that_is_down_is_a_miss(make: Make, store: MemoryBlockStore) -> None:
    store.node_down = True
    (found,) = make().generate([PROMPT])
    assert (found.generated, found.cached) == (alone(PROMPT), 0)


def test_trap_orders_that_stay_bound_are_carried_out_once(
    make: Make, store: MemoryBlockStore
) -> None:
    """A step without requests leaves the last one's metadata bound, and its blocks may be others'
    by then."""
    engine = make()
    engine.generate([PROMPT], 1)
    for key in store.sealed():
        store.evict(key)
    engine.pools[0].fill_(13)
    engine.idle_step()
    assert store.sealed() == []
    reader = make()
    engine.generate([PROMPT], 1)
    reader.generate([PROMPT], 1)
    reader.pools[0].fill_(13)
    reader.idle_step()
    assert bool((reader.pools[0] == 13).all())


@pytest.mark.parametrize("told", [True, False], ids=["told", "not-told"])
def test_trap_a_request_that_starts_again_saves_from_its_new_blocks(make: Make, told: bool) -> None:
    engine = make()
    request = request_of(engine, PROMPT, 10)
    engine.active += [request]
    for _ in range(2):
        engine.step()
    engine.preempt(request, told=told)
    held = [engine.free.pop(0) for _ in range(3)]
    for block in held:
        engine.pools[0][block] = 13
    while engine.active:
        engine.step()
    whole = request.prompt + request.generated
    (found,) = make().generate([[*whole, 3]])
    assert found.generated == alone([*whole, 3])


def test_trap_a_failed_forward_saves_nothing(make: Make, store: MemoryBlockStore) -> None:
    engine = make()

    def broken(*args: Any) -> None:
        raise RuntimeError("out of memory")

    engine.compute = broken  # type: ignore[method-assign]
    engine.generate([PROMPT])
    engine.idle_step()
    assert store.sealed() == []


@each(
    ("changes", "field"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"speculative_config": object()}, "speculative_config"),
        ({"enable_attention_dp": True}, "enable_attention_dp"),
        ({"tensor_parallel_size": 16}, "tensor_parallel_size"),
        ({"kv_cache_config": SimpleNamespace()}, "tokens_per_block"),
        (
            {"kv_cache_config": SimpleNamespace(max_attention_window=[512, 4096])},
            "max_attention_window",
        ),
        (
            {
                "kv_cache_config": SimpleNamespace(max_attention_window=[512]),
                "max_seq_len": 4096,
            },
            "max_attention_window",
        ),
        ({"kv_cache_config": SimpleNamespace(max_attention_window=[512])}, "max_seq_len"),
    ],
)
def test_what_cannot_be_shared_is_refused_at_start_by_name(
    adapter: Any, changes: dict[str, Any], field: str
) -> None:
    import torch

    def start() -> None:
        adapter.KVStoreWorker(arguments(**changes)).register_kv_caches(torch.zeros(4, 2))

    with pytest.raises(UsageError, match=field):
        start()


def test_a_window_as_long_as_the_longest_sequence_is_none(make: Make) -> None:
    whole = SimpleNamespace(tokens_per_block=BLOCK, max_attention_window=[64])
    for _ in range(2):
        (found,) = make(kv_cache_config=whole, max_seq_len=64).generate([PROMPT])
    assert (found.generated, found.cached) == (alone(PROMPT), 8 * BLOCK)


def test_trap_blocks_without_a_place_do_not_keep_those_behind_them_from_being_loaded(
    make: Make,
) -> None:
    """The engine counts all that it was offered as computed, whether it has a place or not."""
    make().generate([PROMPT])
    (found,) = make(window=3 * BLOCK).generate([PROMPT])
    assert (found.generated, found.cached) == (alone(PROMPT), 8 * BLOCK)


def layout_of(*groups: tuple[int | None, int, int], pool: Any = None) -> SimpleNamespace:
    """As TensorRT-LLM describes a KV cache: of each layer group its window, and how many regions,
    each rank's own and replicated ones."""
    return SimpleNamespace(
        as_single_pool_tensor=lambda: pool,
        groups=[
            SimpleNamespace(
                window_size=window,
                regions=[None] * own,
                replicated_regions=[None] * replicated,
            )
            for window, own, replicated in groups
        ],
    )


def test_one_layer_group_is_the_pool_that_it_always_was(make: Make) -> None:
    engine = make()
    (worker,), before = engine.workers, engine.workers[0]._pages.namespace
    worker.register_kv_cache_layout(layout_of((None, 1, 0), pool=engine.pools[0]))
    assert worker._pages.namespace.id == before.id


@pytest.mark.parametrize(
    "groups",
    [
        [(None, 1, 0), (512, 1, 0)],  # sliding windows beside full attention
        [(512, 1, 0)],  # no page behind the window
        [(None, 2, 0)],  # layers of two sizes
        [(None, 1, 1)],  # an index that every rank has the same of
        [],
    ],
)
def test_layer_groups_are_refused_at_start_by_name(
    make: Make, groups: list[tuple[int | None, int, int]]
) -> None:
    (worker,) = make().workers
    with pytest.raises(UsageError, match="layer groups of the KV cache"):
        worker.register_kv_cache_layout(layout_of(*groups))


def test_settings_that_are_none_are_named(monkeypatch: pytest.MonkeyPatch, adapter: Any) -> None:
    for text in ("{", "[]", '{"nonsense": 1}', "[" * 10**6, "{}" + " " * CONFIG_BYTES_MAX):
        monkeypatch.setenv("KVSTORE_TENSORRT_LLM", text)
        with pytest.raises(UsageError, match="KVSTORE_TENSORRT_LLM"):
            adapter.KVStoreWorker(arguments())


def test_over_a_real_node(
    adapter: Any, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with NodeProcess(redis_server, size=64 * MIB) as node:
        where = {**node.engine_settings, "weights_id": "w"}
        monkeypatch.setenv("KVSTORE_TENSORRT_LLM", json.dumps(where))
        made: list[ModelEngine] = []
        make = maker(adapter, made)
        try:
            make(ranks=2).generate([PROMPT])
            (found,) = make(ranks=2).generate([PROMPT])
            assert (found.generated, found.cached) == (alone(PROMPT, ranks=2), 8 * BLOCK)
        finally:
            for engine in made:
                engine.close()
