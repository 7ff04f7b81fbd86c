from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from itertools import product

from each_input import each

from kvstore.cli.replay.optimum import next_uses, optimum
from kvstore.cli.replay.traces import PromptTrace


def trace_of(prompts: Sequence[Sequence[int]]) -> PromptTrace:
    distinct = len({block for prompt in prompts for block in prompt})
    return PromptTrace("t", [float(i) for i in range(len(prompts))],
                 [array("I", prompt) for prompt in prompts], distinct)  # fmt: skip


def best(prompts: Sequence[Sequence[int]], capacity: int, held: frozenset[int]) -> int:
    """The optimum by trying all that may be kept after each prompt."""
    if not prompts:
        return 0
    hits = next((i for i, block in enumerate(prompts[0]) if block not in held), len(prompts[0]))
    there = sorted(held | set(prompts[0]))
    kept = (
        frozenset(block for block, keep in zip(there, flags, strict=True) if keep)
        for flags in product((0, 1), repeat=len(there))
        if sum(flags) == min(capacity, len(there))
    )
    return hits + max(best(prompts[1:], capacity, one) for one in kept)


@each("seed", range(12))
def test_the_optimum_is_what_no_choice_is_better_than(seed: int) -> None:
    rng = random.Random(seed)
    names: dict[tuple[int, ...], int] = {}
    prompts = []
    for _ in range(5):
        path = tuple(rng.randrange(2) for _ in range(rng.randint(1, 3)))
        heads = (path[: depth + 1] for depth in range(len(path)))
        prompts.append([names.setdefault(head, len(names)) for head in heads])
    for capacity in (1, 3):
        found = optimum(next_uses(trace_of(prompts)), capacity)
        assert found == best(prompts, capacity, frozenset()), f"seed {seed}, {capacity} blocks"


def test_an_unlimited_store_finds_all_but_the_first_use() -> None:
    prompts = [[0, 1, 2], [0, 1, 3], [4], [0, 1, 2, 5]]
    assert optimum(next_uses(trace_of(prompts)), 100) == 5
    assert next_uses(trace_of(prompts))[0] == [(1, 2), (3, 1)]
