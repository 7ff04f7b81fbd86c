"""The vLLM adapter with two steps in flight, copies and forwards late: what may go wrong there."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from vllm_gpu_traps import (
    BLOCKS,
    PATIENCE_S,
    MakeGpuEngine,
    aborted_while_loading,
    answer,
    block_is_gone,
    loaded_late,
    preempted_while_saving,
    saved,
    step_freed_while_a_step_writes,
    two_first_blocks_are_gone,
    used_again_while_saving,
    written_over_two_steps,
)
from vllm_model_config import BLOCK
from vllm_model_engine import expected_output, prompt

from kvstore.testing.blockstore import MemoryBlockStore

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("roles", [("kv_producer", "kv_consumer"), ("kv_both", "kv_both")])
def test_what_one_engine_computed_another_loads(
    make_gpu: MakeGpuEngine, roles: tuple[str, str], workers: int
) -> None:
    producer, consumer = (make_gpu(role=role, workers=workers) for role in roles)
    tokens = prompt(3 * BLOCK + 5)
    for engine in (producer, consumer):
        answer(engine, "a", tokens, 8)
        assert engine.in_flight == 2, "no step was launched before the output of the one before"
        assert engine.free_blocks == BLOCKS - 1
    assert producer.loaded_tokens == 0
    assert consumer.loaded_tokens == 3 * BLOCK


def test_layer_by_layer_is_refused(make_gpu: MakeGpuEngine) -> None:
    with pytest.raises(Exception, match=r"async_scheduling.*layerwise"):
        make_gpu(layerwise=True)


def test_negative_control_a_wrong_byte_in_the_store_changes_the_output(
    make_gpu: MakeGpuEngine, store: MemoryBlockStore
) -> None:
    tokens = prompt(2 * BLOCK + 5)
    answer(make_gpu(role="kv_producer"), "a", tokens)
    next(iter(store.slots())).payload[17] ^= 1
    consumer = make_gpu(role="kv_consumer")
    consumer.add("a", tokens)
    consumer.run()
    assert consumer.loaded_tokens == 2 * BLOCK
    assert consumer.outputs["a"] != expected_output(tokens, 4)


def test_trap_a_whole_prompt_hit_computes_one_token(make_gpu: MakeGpuEngine) -> None:
    tokens = prompt(2 * BLOCK)
    answer(make_gpu(), "a", tokens)
    consumer = make_gpu()
    answer(consumer, "a", tokens)
    assert consumer.computed_tokens == 1 + 3


def test_trap_a_load_does_not_wait_for_the_forward_of_its_own_step(
    make_gpu: MakeGpuEngine, store: MemoryBlockStore
) -> None:
    """vLLM launches that forward before it starts the loads, and it has nothing to do with them."""
    tokens = saved(store, make_gpu(role="kv_producer"), prompt(3 * BLOCK + 5))
    consumer = make_gpu(role="kv_consumer")
    loaded, go = threading.Event(), threading.Event()
    store.on_check = loaded.set

    def held(output: Any) -> None:
        assert not output.kv_connector_metadata.plan.loads or go.wait(PATIENCE_S)

    consumer.workers[0].on_forward = held
    consumer.add("other", prompt(5, seed=1), max_tokens=200)
    consumer.add("a", tokens)
    while not consumer.loaded_tokens:
        consumer.step()
    assert loaded.wait(PATIENCE_S), "it waits for a forward that has nothing to do with it"
    go.set()
    consumer.run()
    assert consumer.outputs["a"] == expected_output(tokens, 4)


def test_trap_the_steps_of_a_request_that_has_ended_spoil_no_load(
    make_gpu: MakeGpuEngine, store: MemoryBlockStore
) -> None:
    step_freed_while_a_step_writes(make_gpu, store)


@pytest.mark.parametrize("workers", [1, 2])
def test_trap_preemption_with_saves_in_flight(
    make_gpu: MakeGpuEngine, store: MemoryBlockStore, workers: int
) -> None:
    preempted_while_saving(make_gpu, store, workers)


def test_trap_blocks_are_not_used_again_while_a_save_reads_them(
    make_gpu: MakeGpuEngine, store: MemoryBlockStore
) -> None:
    used_again_while_saving(make_gpu, store)


def test_trap_a_load_that_is_late_goes_on_until_its_copy_is_done(
    make_gpu: MakeGpuEngine, store: MemoryBlockStore
) -> None:
    loaded_late(make_gpu, store)


@pytest.mark.parametrize("amid_step", [False, True])
def test_trap_an_abort_during_a_load_frees_its_blocks_after_the_copy(
    make_gpu: MakeGpuEngine, store: MemoryBlockStore, amid_step: bool
) -> None:
    aborted_while_loading(make_gpu, store, amid_step)


def test_trap_a_block_that_two_steps_in_flight_write_is_saved_after_both(
    make_gpu: MakeGpuEngine, store: MemoryBlockStore
) -> None:
    written_over_two_steps(make_gpu, store)


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("workers", [1, 2])
def test_trap_a_block_that_went_between_lookup_and_load_is_computed(
    make_gpu: MakeGpuEngine, store: MemoryBlockStore, gone: int, workers: int
) -> None:
    block_is_gone(make_gpu, store, gone, workers)


def test_trap_a_block_that_goes_while_it_is_copied_is_computed(
    make_gpu: MakeGpuEngine, store: MemoryBlockStore
) -> None:
    tokens = saved(store, make_gpu(role="kv_producer"), prompt(3 * BLOCK + 5))

    def second_goes() -> None:
        store.on_check = lambda: None
        store.evict(store.sealed()[1])

    store.on_check = second_goes
    consumer = make_gpu(role="kv_consumer")
    answer(consumer, "a", tokens)
    assert consumer.computed_tokens >= BLOCK + 5


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_trap_requests_of_one_step_share_their_prefix(
    make_gpu: MakeGpuEngine, store: MemoryBlockStore, role: str
) -> None:
    """Of what is loaded for both in one step, and of what one computes and the other hits."""
    engine = make_gpu(role=role)
    tokens = prompt(3 * BLOCK + 5)
    if role == "kv_consumer":
        saved(store, make_gpu(role="kv_producer"), tokens)
    longer = tokens + prompt(7, seed=3)
    for name, its in (("a", tokens), ("b", longer), ("c", tokens)):
        engine.add(name, its)
    engine.run()
    for name, its in (("a", tokens), ("b", longer), ("c", tokens)):
        assert engine.outputs[name] == expected_output(its, 4), name
    assert engine.free_blocks == BLOCKS - 1
    if role != "kv_producer":
        return
    assert len(store.sealed()) == len(set(store.sealed())) == 3
    answer(make_gpu(role="kv_consumer"), "a", longer)


def test_trap_the_engines_cache_can_be_emptied_with_saves_in_flight(
    make_gpu: MakeGpuEngine, store: MemoryBlockStore
) -> None:
    gate = threading.Event()
    store.on_reserve = lambda: gate.wait(PATIENCE_S) and None
    engine = make_gpu(blocks=12, pinned_fraction=1.0)
    engine.add("a", prompt(2 * BLOCK), max_tokens=1)
    while not engine.outputs["a"]:
        engine.step()
    assert engine.free_blocks < 11, "no save was in flight"
    assert engine.reset()
    assert engine.free_blocks == 11
    gate.set()
    tokens = prompt(2 * BLOCK, seed=1)
    answer(engine, "b", tokens)
    answer(make_gpu(role="kv_consumer"), "b", tokens)


def test_trap_loads_that_failed_from_the_first_block_on_keep_no_engine_waiting_for_ever(
    make_gpu: MakeGpuEngine, store: MemoryBlockStore
) -> None:
    two_first_blocks_are_gone(make_gpu, store)
