"""Random requests, aborts and evictions over engines with two steps in flight."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from vllm_gpu_traps import answer
from vllm_model_checks import evict_some
from vllm_model_config import BLOCK, VOCABULARY
from vllm_model_engine import expected_output, prompt

from kvstore.testing.blockstore import MemoryBlockStore

if TYPE_CHECKING:
    from vllm_gpu_engine import GpuEngine
    from vllm_gpu_traps import MakeGpuEngine

pytestmark = pytest.mark.vllm

REQUESTS_TOO_MANY = 3
"""They begin side by side in the 19 blocks of an engine, with 4 each, and end with 8 each."""


def check_schedule(
    engines: list[GpuEngine], store: MemoryBlockStore, rng: random.Random, requests: int = 50
) -> None:
    """Requests with shared prefixes that end early, late or never: no token is wrong.

    An engine has less room than they need together, and the store loses blocks, told or not.
    """
    from vllm_gpu_engine import STEPS_IN_FLIGHT

    free = [engine.free_blocks for engine in engines]
    prefixes = [prompt(4 * BLOCK, seed=100 + i) for i in range(3)]
    for i, tokens in enumerate(prefixes):
        answer(engines[0], f"prefix{i}", tokens, 1)
    wanted: dict[str, tuple[GpuEngine, list[int]]] = {}
    aborted: set[str] = set()
    for i in range(requests):
        name, engine = f"r{i}", rng.choice(engines)
        tokens = rng.choice(prefixes)[: rng.randrange(10, 4 * BLOCK)] + prompt(3, seed=i)
        count = rng.randrange(1, 60)
        stop = rng.sample(range(VOCABULARY), rng.choice([0, 30]))
        engine.add(name, tokens, max_tokens=count, stop=stop)
        output = expected_output(tokens, count)
        ends = next((at for at, token in enumerate(output) if token in stop), count)
        wanted[name] = engine, output[: ends + 1]
        for _ in range(rng.randrange(6)):
            one = rng.choice(engines)
            if one.has_work:
                one.step()
        evict_some(store, rng)
        if rng.random() < 0.2:
            gone = rng.choice([name, f"r{rng.randrange(i + 1)}"])
            aborted.add(gone)
            wanted[gone][0].abort(gone, amid_step=rng.random() < 0.5)
    for engine in engines:
        engine.run()
    # However long the steps took, and so whatever ran at a time: here some are preempted.
    for at, engine in enumerate(engines):
        for i in range(REQUESTS_TOO_MANY):
            name, tokens = f"last{at}-{i}", prompt(2 * BLOCK, seed=1000 + i)
            engine.add(name, tokens, max_tokens=60)
            wanted[name] = engine, expected_output(tokens, 60)
        engine.run()
    for name, (engine, right) in wanted.items():
        output = engine.outputs[name]
        assert output == right[: len(output)], name
        assert len(output) == len(right) or name in aborted, name
    assert [engine.free_blocks for engine in engines] == free
    assert all(engine.in_flight == STEPS_IN_FLIGHT for engine in engines)


@pytest.mark.parametrize(
    ("roles", "workers"),
    [
        (("kv_both", "kv_both"), 1),
        (("kv_producer", "kv_consumer"), 1),
        (("kv_both", "kv_both"), 2),
    ],
)
@pytest.mark.covers("asynchronous scheduling, two steps in flight", "model")
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))]
)
def test_random_schedules_never_give_a_wrong_token(
    make_gpu: MakeGpuEngine,
    store: MemoryBlockStore,
    roles: tuple[str, str],
    workers: int,
    seed: int,
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    store.capacity_blocks = 20
    engines = [
        make_gpu(blocks=20, max_batched_tokens=50, role=role, workers=workers, seed=seed)
        for role in roles
    ]
    check_schedule(engines, store, rng)
    # With words: pytest shows sums of generators alike, `assert 0 > 0`.
    assert sum(engine.loaded_tokens for engine in engines) > 0, "nothing was loaded"
    assert sum(engine.preemptions for engine in engines) > 0, "nobody was preempted"
