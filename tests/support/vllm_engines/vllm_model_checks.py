"""Checks that the engines of vllm_model_engine.py answer right, whatever becomes of the store."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm_model_config import BLOCK
from vllm_model_engine import ModelEngine, expected_output, prompt

from kvstore.testing.blockstore import MemoryBlockStore


def check_answers(
    engines: Iterable[ModelEngine],
    tokens: list[int],
    *,
    name: str = "a",
    steps_max: int = 2000,
    **expected: Any,
) -> None:
    """Ask the engines for four tokens after `tokens`, one engine after the other: each gives the
    right ones. `expected` goes to `expected_output`."""
    for engine in engines:
        engine.add(name, tokens)
        engine.run(steps_max=steps_max)
        assert engine.outputs[name] == expected_output(tokens, 4, **expected)


def groups_of(connector: Any) -> Any:
    """Return the groups of what one side of our connector has made of its configuration."""
    return connector._shape.layout(connector._config).groups


def evict_unnoticed(store: MemoryBlockStore) -> None:
    """Evict every block; the index still names them."""
    for key in store.sealed():
        store.evict(key, forget=False)


def spoil_last_block(engine: ModelEngine, store: MemoryBlockStore, group: int) -> None:
    """Change a byte of the block of that group which was saved last."""
    namespace = groups_of(engine.scheduler.connector)[group].namespaces[0]
    last = [slot for slot in store.slots() if slot.namespace_id == namespace.id][-1]
    last.payload[-1] ^= 1


def check_under_pressure(
    engines: Sequence[ModelEngine],
    rng: random.Random,
    *,
    requests: int = 24,
    between: Callable[[], None] = lambda: None,
    **expected: Any,
) -> None:
    """Put requests with shared prefixes, preemption and aborts on all engines: no token may be
    wrong.

    `between` is called after each request was added and `expected` goes to `expected_output`.
    Fails as well when nothing was loaded, or an engine does not get all its blocks back.
    """
    free = [engine.free_blocks for engine in engines]
    prefixes = [prompt(4 * BLOCK, seed=100 + i) for i in range(3)]
    wanted: list[tuple[ModelEngine, str, list[int], int]] = []
    aborted: set[str] = set()
    for i in range(requests):
        engine = rng.choice(engines)
        tokens = rng.choice(prefixes)[: rng.randrange(10, 4 * BLOCK)] + prompt(3, seed=i)
        count = rng.randrange(1, 30)
        engine.add(f"r{i}", tokens, max_tokens=count)
        wanted.append((engine, f"r{i}", tokens, count))
        for _ in range(rng.randrange(6)):
            rng.choice(engines).step()
        between()
        if rng.random() < 0.15:
            aborted.add(f"r{i}")
            engine.abort(f"r{i}")
    for engine in engines:
        engine.run(steps_max=5000)
    for engine, name, tokens, count in wanted:
        output = engine.outputs[name]
        assert output == expected_output(tokens, count, **expected)[: len(output)], name
        assert len(output) == count or name in aborted, name
    assert sum(engine.loaded_tokens for engine in engines) > 0
    assert [engine.free_blocks for engine in engines] == free


def evict_some(store: MemoryBlockStore, rng: random.Random) -> None:
    """Evict a block every other time, unnoticed by the index every other time."""
    if store.sealed() and rng.random() < 0.5:
        store.evict(rng.choice(store.sealed()), forget=rng.random() < 0.5)
