"""The adapter for TensorRT-LLM in a model of its executor: no wrong token, no promise broken."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

from stores import MIB, NodeProcess
from trtllm_model_engine import (
    BLOCK,
    LAYERS,
    OPTIONAL,
    SCHEDULER_METHODS,
    WORKER_METHODS,
    ModelEngine,
    arguments,
    install,
)

from connector.limits import CONFIG_BYTES_MAX
from kvstore import Tier, UsageError
from kvstore.testing.blockstore import MemoryBlockStore

if TYPE_CHECKING:
    from redis_servers import RedisServer

Make = Callable[..., ModelEngine]
PROMPT = random.Random(1).choices(range(2, 90), k=8 * BLOCK + 1)


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The adapter's package, over the model of the engine's."""
    install(monkeypatch)
    monkeypatch.setenv("KVSTORE_TENSORRT_LLM", json.dumps({"weights_id": "w"}))
    import connector.adapters.tensorrt_llm as package

    return package


def maker(adapter: Any, made: list[ModelEngine], **defaults: Any) -> Make:
    def make(**changes: Any) -> ModelEngine:
        made.append(
            ModelEngine(
                lambda args, rank: adapter.KVStoreWorker(args),
                adapter.KVStoreScheduler,
                **{**defaults, **changes},
            )
        )
        return made[-1]

    return make


@pytest.fixture
def make(adapter: Any, store: MemoryBlockStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes engines that share `store`."""
    monkeypatch.setattr(
        "connector.adapters.tensorrt_llm.worker.open_store", lambda config: _Shared(store)
    )
    made: list[ModelEngine] = []
    yield maker(adapter, made)
    for engine in made:
        engine.close()


class _Shared:
    """The store, which an engine does not close."""

    def __init__(self, store: MemoryBlockStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def close(self) -> None:
        return None


def alone(prompt: list[int], max_tokens: int = 3, **more: Any) -> list[int]:
    """What an engine without a connector answers."""

    class Nothing:
        def __getattr__(self, name: str) -> Any:
            answers: dict[str, Any] = {
                "get_num_new_matched_tokens": (0, False),
                "get_finished": ([], []),
                "request_finished": False,
            }
            return lambda *args: answers.get(name)

    ranks = more.pop("ranks", 1)
    engine = ModelEngine(lambda args, rank: Nothing(), lambda args: Nothing(), ranks=ranks)
    return engine.generate([prompt], max_tokens, **more)[0].generated


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


def test_trap_what_was_promised_is_not_evicted_before_it_is_loaded(
    make: Make, store: MemoryBlockStore
) -> None:
    make().generate([PROMPT])
    second = make()
    evicted: list[bool] = []

    def evict() -> None:
        evicted.extend(store.evict(key) for key in store.sealed())

    second.lose_after_promise = evict
    (found,) = second.generate([PROMPT], 1)
    assert (found.generated, found.cached, found.error) == (alone(PROMPT, 1), 8 * BLOCK, "")
    assert not any(evicted[:8])


def test_promises_end_with_the_step_and_with_the_request(
    make: Make, store: MemoryBlockStore
) -> None:
    make().generate([PROMPT])
    second = make()
    second.active += [_request(second, PROMPT, 20)]
    second.step()
    assert store.pins() == 8
    for _ in range(3):
        second.step()
    assert store.pins() == 0
    while second.active:
        second.step()
    second.generate([PROMPT], 1)
    assert store.pins() == 8, "a rank may still be loading"
    second.generate([PROMPT[:3]], 3)
    assert store.pins() == 0


@pytest.mark.parametrize("how", ["preempted", "cancelled", "offer taken back", "asked again"])
def test_trap_what_ranks_were_told_to_load_stays_pinned_until_they_have(
    make: Make, store: MemoryBlockStore, how: str
) -> None:
    """Ranks are processes of their own: the slowest may not have begun with the orders that the
    scheduler gave for this step when it hears that their request is over."""
    make().generate([PROMPT])
    second = make(ranks=1)
    request = _request(second, PROMPT, 20)
    evicted: list[bool] = []
    load = second.workers[0].start_load_kv

    def late(stream: object) -> None:
        if how == "preempted":
            second.scheduler.request_reset(request)
        elif how == "cancelled":
            second.scheduler.request_finished(request, request.blocks)
        elif how == "offer taken back":
            second.scheduler.cancel_load(request, 0, len(PROMPT))
        else:
            second.scheduler.get_num_new_matched_tokens(request, 0)
        evicted.extend(store.evict(key) for key in store.sealed())
        load(stream)

    second.workers[0].start_load_kv = late
    second.active += [request]
    second.step()
    assert not any(evicted[:8])
    assert request.generated == alone(PROMPT, 1)
    second.workers[0].start_load_kv = load
    second.scheduler.request_finished(request, request.blocks)
    second.active.clear()
    second.generate([PROMPT[:3]], 4)
    assert store.pins() == 0


def test_a_promise_that_was_never_taken_ends_with_its_request(
    make: Make, store: MemoryBlockStore
) -> None:
    make().generate([PROMPT])
    second = make()
    request = _request(second, PROMPT, 20)
    second.scheduler.get_num_new_matched_tokens(request, 0)
    assert store.pins() == 8
    second.scheduler.request_finished(request, [])
    assert store.pins() == 0


def test_a_promise_outlives_the_time_of_the_one_before_it(
    make: Make, store: MemoryBlockStore
) -> None:
    """A request that starts again has a new one: ranks may be about to load what it holds."""
    make().generate([PROMPT])
    second = make()
    request = _request(second, PROMPT, 20)
    second.active += [request]
    second.step()
    second.preempt(request)
    held = []
    for _ in range(4):
        second.step()
        held.append(store.pins())
    assert held == [8, 8, 8, 0]


def test_a_broken_promise_ends_the_step_and_no_token_is_wrong(
    make: Make, store: MemoryBlockStore
) -> None:
    make().generate([PROMPT])
    second = make()

    def lose() -> None:
        store.node_down = True

    second.lose_after_promise = lose
    (found,) = second.generate([PROMPT])
    assert found.generated == []
    assert "cannot be read" in found.error
    second.lose_after_promise = lambda: None
    (after,) = second.generate([PROMPT])
    assert (after.generated, after.cached, after.error) == (alone(PROMPT), 0, "")


def test_a_store_that_is_down_is_a_miss(make: Make, store: MemoryBlockStore) -> None:
    store.node_down = True
    (found,) = make().generate([PROMPT])
    assert (found.generated, found.cached) == (alone(PROMPT), 0)


def test_a_block_missing_in_one_rank_ends_the_offer_before_it(
    make: Make, store: MemoryBlockStore
) -> None:
    first = make(ranks=2)
    first.generate([PROMPT])
    names = first.scheduler._names([], PROMPT, None)
    store.evict(first.workers[1]._pages.keys(names)[5])
    second = make(ranks=2)
    (found,) = second.generate([PROMPT])
    assert (found.generated, found.cached) == (alone(PROMPT, ranks=2), 5 * BLOCK)
    second.generate([PROMPT[:3]], 1)
    assert store.pins() == 0


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
    request = _request(engine, PROMPT, 10)
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

    engine._compute = broken  # type: ignore[method-assign]
    engine.generate([PROMPT])
    engine.idle_step()
    assert store.sealed() == []


def test_an_offer_that_is_taken_in_part_is_computed_beyond(make: Make) -> None:
    make().generate([PROMPT])
    engine = make(chunk=2 * BLOCK)
    add = engine._add

    def part(request: Any) -> int:
        add(request)
        request.position = request.cached = request.py_num_connector_matched_tokens = 3 * BLOCK
        return 3 * BLOCK

    engine._add = part  # type: ignore[method-assign]
    (found,) = engine.generate([PROMPT])
    assert found.generated == alone(PROMPT)


@pytest.mark.parametrize(
    ("taken_back", "loaded"),
    [
        ([(0, 2)], range(2, 8)),
        ([(0, 2), (6, 9)], range(2, 6)),
        ([(6, 9), (0, 2)], range(2, 6)),
        ([(3, 3)], range(8)),
        ([(0, 9)], range(0)),
    ],
)
def test_trap_what_is_left_of_an_offer_is_loaded_whichever_end_is_taken_back(
    make: Make, taken_back: list[tuple[int, int]], loaded: range
) -> None:
    """Its beginning is when another request has computed it meanwhile, its end when there is no
    room: the engine counts what is left as loaded."""
    make().generate([PROMPT])
    engine = make()
    add, allocate = engine._add, engine._allocate

    def offer(request: Any) -> int:
        add(request)
        for begin, end in taken_back:
            engine.scheduler.cancel_load(request, begin * BLOCK, end * BLOCK)
        request.position = loaded.stop * BLOCK
        request.py_num_connector_matched_tokens = len(loaded) * BLOCK
        return len(loaded) * BLOCK

    def place(request: Any) -> None:
        allocate(request)
        if request.generated:
            return
        position, request.position, engine.chunk = request.position, 0, loaded.start * BLOCK
        for layer in range(LAYERS):
            engine._compute(request, 0, layer)
        request.position, engine.chunk = position, len(PROMPT)

    engine._add, engine._allocate = offer, place  # type: ignore[method-assign]
    (found,) = engine.generate([PROMPT])
    assert found.generated == alone(PROMPT)


def test_blocks_of_other_hosts_are_brought_here_for_whoever_asks_next(
    make: Make, store: MemoryBlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from connector.adapters.tensorrt_llm.promises import Promises
    from connector.pages.pages import Pages
    from kvstore import Namespace

    pages = Pages(store, Namespace({"m": "n"}))
    names = [bytes([i]) * 32 for i in range(3)]
    pages.save(names, [[memoryview(bytearray(64))] for _ in names])
    for key in pages.keys(names):
        store.elsewhere[key] = Tier.OTHER_HOST
    brought: list[int] = []
    monkeypatch.setattr(
        "connector.adapters.tensorrt_llm.promises.bring",
        lambda wanted, store, results: brought.append(len(wanted)),
    )
    monkeypatch.setattr(store, "mappings", lambda: [object()])
    promises = Promises(store, [pages])
    promises._fetch(names)
    assert brought == [3]
    promises.close()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"speculative_config": object()}, "speculative_config"),
        ({"enable_attention_dp": True}, "enable_attention_dp"),
        ({"tensor_parallel_size": 16}, "tensor_parallel_size"),
        ({"kv_cache_config": SimpleNamespace()}, "tokens_per_block"),
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


def _request(engine: ModelEngine, prompt: list[int], max_tokens: int) -> Any:
    from trtllm_model_engine import Request

    return Request(next(engine.ids), list(prompt), max_tokens)
