"""Blocks that were offered to TensorRT-LLM stay until they are loaded, or the offer is over."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
from trtllm_engines import PROMPT, Make, alone, request_of
from trtllm_model_engine import BLOCK, LAYERS, ModelEngine

from kvstore.spi import Tier
from kvstore.testing.blockstore import MemoryBlockStore


@pytest.fixture
def second(make: Make) -> ModelEngine:
    """An engine beside one that has saved the prompt."""
    make().generate([PROMPT])
    return make()


def test_trap_what_was_promised_is_not_evicted_before_it_is_loaded(
    second: ModelEngine, store: MemoryBlockStore
) -> None:
    evicted: list[bool] = []

    def evict() -> None:
        evicted.extend(store.evict(key) for key in store.sealed())

    second.lose_after_promise = evict
    (found,) = second.generate([PROMPT], 1)
    assert (found.generated, found.cached, found.error) == (alone(PROMPT, 1), 8 * BLOCK, "")
    assert not any(evicted[:8])


def test_promises_end_with_the_step_and_with_the_request(
    second: ModelEngine, store: MemoryBlockStore
) -> None:
    second.active += [request_of(second, PROMPT, 20)]
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
    request = request_of(second, PROMPT, 20)
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
    second: ModelEngine, store: MemoryBlockStore
) -> None:
    request = request_of(second, PROMPT, 20)
    second.scheduler.get_num_new_matched_tokens(request, 0)
    assert store.pins() == 8
    second.scheduler.request_finished(request, [])
    assert store.pins() == 0


def test_a_promise_outlives_the_time_of_the_one_before_it(
    second: ModelEngine, store: MemoryBlockStore
) -> None:
    """A request that starts again has a new one: ranks may be about to load what it holds."""
    request = request_of(second, PROMPT, 20)
    second.active += [request]
    second.step()
    second.preempt(request)
    held = []
    for _ in range(4):
        second.step()
        held.append(store.pins())
    assert held == [8, 8, 8, 0]


def test_a_broken_promise_ends_the_step_and_no_token_is_wrong(
    second: ModelEngine, store: MemoryBlockStore
) -> None:

    def lose() -> None:
        store.node_down = True

    second.lose_after_promise = lose
    (found,) = second.generate([PROMPT])
    assert found.generated == []
    assert "cannot be read" in found.error
    second.lose_after_promise = lambda: None
    (after,) = second.generate([PROMPT])
    assert (after.generated, after.cached, after.error) == (alone(PROMPT), 0, "")


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


@pytest.mark.parametrize("back", [False, True], ids=["unsaid", "taken-back"])
@pytest.mark.parametrize("taken", [3 * BLOCK, 2 * BLOCK + 1], ids=["whole-blocks", "within-one"])
def test_an_offer_that_is_taken_in_part_is_computed_beyond(
    make: Make, taken: int, back: bool
) -> None:
    make().generate([PROMPT])
    engine = make(chunk=2 * BLOCK)
    add = engine.add

    def part(request: Any) -> int:
        add(request)
        if back:
            engine.scheduler.cancel_load(request, taken, len(PROMPT))
        request.position = request.cached = request.py_num_connector_matched_tokens = taken
        return taken

    engine.add = part  # type: ignore[method-assign]
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
    add, allocate = engine.add, engine.allocate

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
            engine.compute(request, 0, layer)
        request.position, engine.chunk = position, len(PROMPT)

    engine.add, engine.allocate = offer, place  # type: ignore[method-assign]
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
