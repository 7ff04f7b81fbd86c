"""Traps for a connector in `GpuEngine`, each a function that fails when it is not kept out of.

`MakeGpuEngine` is the fixture `make_gpu`: it takes what `GpuEngine` takes, by name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_model_config import BLOCK, ENGINE_BLOCK
from vllm_model_engine import expected_output, prompt

from kvstore.client.base import Reservation
from kvstore.testing.blockstore import MemoryBlockStore

if TYPE_CHECKING:
    from vllm_gpu_engine import GpuEngine

MakeGpuEngine = Callable[..., "GpuEngine"]
BLOCKS = 128
"""Of an engine, unless a test says otherwise."""
PATIENCE_S = 30.0
ENDS_AFTER_STEPS = 1000
"""What must end at all ends long before."""


def answer(engine: GpuEngine, name: str, tokens: list[int], count: int = 4) -> None:
    engine.add(name, tokens, max_tokens=count)
    engine.run()
    assert engine.outputs[name] == expected_output(tokens, count)


def saved(store: MemoryBlockStore, engine: GpuEngine, tokens: list[int]) -> list[int]:
    """Return the tokens whose KV is in the store by now, all of it right."""
    answer(engine, "saves", tokens, 1)
    assert len(store.sealed()) == len(tokens) // BLOCK
    return tokens


def step_freed_while_a_step_writes(make_gpu: MakeGpuEngine, store: MemoryBlockStore) -> None:
    """A request ends while a step of it is under way, and a load is given its blocks.

    vLLM keeps such blocks back until that step is done. Without it (as before 0.24, and with
    pipeline parallelism elsewhere) the load's own wait has to do.
    """
    tokens = saved(store, make_gpu(role="kv_producer"), prompt(3 * BLOCK + 5))
    consumer = make_gpu(role="kv_consumer", blocks=16)
    consumer.scheduler.defer_block_free = False
    consumer.add("ends", prompt(12 * ENGINE_BLOCK - 8, seed=1), max_tokens=100)
    while len(consumer.outputs["ends"]) < 2:
        consumer.step()
    consumer.workers[0].on_forward = lambda _: time.sleep(0.2)
    consumer.add("a", tokens)  # no room for it yet
    consumer.step()
    consumer.abort("ends")
    consumer.run()
    assert consumer.loaded_tokens == 3 * BLOCK
    assert consumer.outputs["a"] == expected_output(tokens, 4)


def preempted_while_saving(
    make_gpu: MakeGpuEngine, store: MemoryBlockStore, workers: int = 1
) -> None:
    """Blocks are used again by others while saves of their former owners are in flight."""
    engine = make_gpu(blocks=26, workers=workers)
    prompts = {f"r{i}": prompt(4 * ENGINE_BLOCK + 5, seed=i) for i in range(5)}
    for name, tokens in prompts.items():
        engine.add(name, tokens, max_tokens=40)
    engine.run()
    assert engine.preemptions > 0, "the space was meant to be too small"
    again = make_gpu(workers=workers)
    for name, tokens in prompts.items():
        assert engine.outputs[name] == expected_output(tokens, 40)
        again.add(name, tokens, max_tokens=40)
    again.run()
    assert again.loaded_tokens >= 5 * 2 * BLOCK
    for name, tokens in prompts.items():
        assert again.outputs[name] == expected_output(tokens, 40)


def used_again_while_saving(make_gpu: MakeGpuEngine, store: MemoryBlockStore) -> None:
    """A request is done and another needs its blocks while a save still reads them."""
    gate = threading.Event()
    store.on_reserve = lambda: gate.wait(PATIENCE_S) and None
    engine = make_gpu(blocks=12, pinned_fraction=1.0)
    tokens = {"a": prompt(2 * BLOCK), "b": prompt(4 * BLOCK, seed=1)}
    for name in tokens:
        engine.add(name, tokens[name], max_tokens=1)
        for _ in range(100):
            engine.step()
    assert engine.outputs["a"] == expected_output(tokens["a"], 1)
    gate.set()
    engine.run(steps_max=ENDS_AFTER_STEPS)
    consumer = make_gpu(role="kv_consumer")
    for name in tokens:
        answer(consumer, name, tokens[name], 3)
    assert consumer.loaded_tokens == 6 * BLOCK
    assert engine.free_blocks == 11


def loaded_late(make_gpu: MakeGpuEngine, store: MemoryBlockStore) -> None:
    """A load is past its deadline while its copy is under way: nobody may use its blocks yet."""
    tokens = saved(store, make_gpu(role="kv_producer"), prompt(3 * BLOCK + 5))
    consumer = make_gpu(role="kv_consumer", late_s=0.05, load_timeout_s=0.1)
    _start_load(consumer, tokens)
    _steps_for(consumer, 0.3)
    consumer.add("b", prompt(BLOCK, seed=1))
    assert consumer.outputs["a"] == []
    consumer.gpus[0].cuda.hold.set()
    consumer.run()
    assert consumer.outputs["a"] == expected_output(tokens, 4)
    assert consumer.outputs["b"] == expected_output(prompt(BLOCK, seed=1), 4)
    assert consumer.free_blocks == BLOCKS - 1


def aborted_while_loading(
    make_gpu: MakeGpuEngine, store: MemoryBlockStore, amid_step: bool = False
) -> None:
    """A request ends while its load's copy is under way: its blocks are free after that copy."""
    tokens = saved(store, make_gpu(role="kv_producer"), prompt(3 * BLOCK + 5))
    consumer = make_gpu(role="kv_consumer", blocks=12, late_s=0.05)
    _start_load(consumer, tokens)
    consumer.abort("a", amid_step=amid_step)
    _steps_for(consumer, 0.1)
    other = prompt(9 * ENGINE_BLOCK, seed=1)  # more than what is left
    consumer.add("b", other, max_tokens=8)
    _steps_for(consumer, 0.1)
    consumer.gpus[0].cuda.hold.set()
    consumer.run(steps_max=ENDS_AFTER_STEPS)
    assert consumer.outputs["b"] == expected_output(other, 8)
    assert consumer.free_blocks == 11
    answer(consumer, "again", tokens)


def _start_load(consumer: GpuEngine, tokens: list[int]) -> None:
    """Begin the copies of request "a", which do not go on before `hold` is set."""
    cuda = consumer.gpus[0].cuda
    cuda.hold.clear()
    consumer.add("a", tokens)
    deadline = time.monotonic() + PATIENCE_S
    while not cuda.queued:
        assert time.monotonic() < deadline
        consumer.step()


def _steps_for(engine: GpuEngine, duration_s: float) -> None:
    """Step for so long, but take no step that waits for a forward."""
    end = time.monotonic() + duration_s
    while time.monotonic() < end:
        if not any(o.total_num_scheduled_tokens for _, o, _ in engine.core.batch_queue):
            engine.step()
        time.sleep(0.001)


def block_is_gone(
    make_gpu: MakeGpuEngine, store: MemoryBlockStore, gone: int = 0, workers: int = 1
) -> None:
    """A block is gone, and the first one too, after which vLLM asks again: it must not be offered
    for ever."""
    tokens = prompt(3 * BLOCK + 5)
    answer(make_gpu(workers=workers), "a", tokens)
    store.evict(store.sealed()[gone], forget=False)  # the index still names it
    consumer = make_gpu(role="kv_consumer", workers=workers)
    consumer.add("a", tokens)
    consumer.run(steps_max=ENDS_AFTER_STEPS)
    assert consumer.outputs["a"] == expected_output(tokens, 4)
    assert consumer.computed_tokens >= (3 - gone) * BLOCK
    assert consumer.free_blocks == BLOCKS - 1


def requests_load(make_gpu: MakeGpuEngine, store: MemoryBlockStore) -> None:
    """Requests do nothing but load, by copies that are later than any step."""
    tokens = prompt(3 * BLOCK + 5)
    answer(make_gpu(role="kv_producer"), "a", tokens)
    consumer = make_gpu(role="kv_consumer", late_s=0.1)
    answer(consumer, "a", tokens)
    assert consumer.loaded_tokens == 3 * BLOCK


def written_over_two_steps(make_gpu: MakeGpuEngine, store: MemoryBlockStore) -> None:
    """Each block is filled by several steps, two of which are in flight at a time."""
    producer = make_gpu(role="kv_producer", max_batched_tokens=ENGINE_BLOCK + 3)
    for worker in producer.workers:
        worker.on_forward = lambda _: time.sleep(0.02)
    tokens = prompt(3 * BLOCK + 7)
    answer(producer, "a", tokens, BLOCK)
    assert producer.in_flight == 2
    consumer = make_gpu(role="kv_consumer", max_batched_tokens=ENGINE_BLOCK + 3)
    longer = tokens + producer.outputs["a"]
    answer(consumer, "a", longer)
    assert consumer.loaded_tokens == 4 * BLOCK


def saved_anew(store: MemoryBlockStore) -> None:
    """Every block leaves the store and comes back, elsewhere and with the same bytes."""
    for slot in list(store.slots()):
        payload = bytes(slot.payload)
        store.evict(slot.key)
        (reservation,) = store.reserve([slot.key], len(payload), slot.namespace_id)
        assert isinstance(reservation, Reservation)
        reservation.buffer[:] = payload
        store.commit([reservation])


def two_first_blocks_are_gone(make_gpu: MakeGpuEngine, store: MemoryBlockStore) -> None:
    """The loads of two requests fail from their first block on, and both could load again.

    vLLM goes on counting the blocks of a request whose load has failed as promised to it, but
    gives them back: it would admit neither load, for the sake of the other and of itself.
    """
    tokens = [prompt(3 * BLOCK + 15, seed=i) for i in range(2)]
    producer = make_gpu(role="kv_producer")
    for i in range(2):
        answer(producer, f"r{i}", tokens[i])

    def moved() -> None:
        store.on_view = lambda: None
        saved_anew(store)

    consumer = make_gpu(role="kv_consumer", blocks=20)
    store.on_view = moved
    for i in range(2):
        consumer.add(f"r{i}", tokens[i])
    consumer.run(steps_max=ENDS_AFTER_STEPS)
    for i in range(2):
        assert consumer.outputs[f"r{i}"] == expected_output(tokens[i], 4)
    assert consumer.free_blocks == 19
