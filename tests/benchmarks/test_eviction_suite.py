"""Suite `eviction`: how it reads traces, and that nothing finds more than its optimum."""

import json
import random
from argparse import ArgumentParser
from itertools import product

import pytest

from benchmarks.suites import eviction
from benchmarks.suites.eviction import Prompt
from kvstore.core.memory.eviction import POLICIES


def options(*words):
    parser = ArgumentParser()
    eviction.arguments(parser)
    return parser.parse_args(words)


def trace(tmp_path, lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_requests_are_read_in_the_order_of_their_time(tmp_path):
    lines = [{"timestamp": at, "hash_ids": [1, 2, at]} for at in (2000, 500)]
    assert eviction._prompts(trace(tmp_path, lines), 1) == [
        Prompt(0.5, [1, 2, 500]),
        Prompt(2.0, [1, 2, 2000]),
    ]
    assert eviction._prompts(trace(tmp_path, lines), 2)[0].blocks == [2]


def test_a_block_of_a_session_is_of_the_request_that_had_it_first(tmp_path):
    session = [[0.0, 0, 3, "tool_use"], [5.0, 2, 4, "end_turn"]]
    one, two, *_ = eviction._prompts(trace(tmp_path, [session]), 1)
    assert two.at - one.at == 5
    assert one.blocks == [(0, 0, 0), (0, 1, 0), (0, 2, 0)]
    assert two.blocks == [(0, 0, 0), (0, 1, 0), (0, 2, 1), (0, 3, 1)]


def best(prompts, capacity, held=frozenset()):
    """The optimum by trying all that may be kept after each prompt."""
    if not prompts:
        return 0
    blocks = prompts[0].blocks
    hits = next((i for i, block in enumerate(blocks) if block not in held), len(blocks))
    there = sorted(held | set(blocks))
    kept = (
        frozenset(block for block, keep in zip(there, flags, strict=True) if keep)
        for flags in product((0, 1), repeat=len(there))
        if sum(flags) == min(capacity, len(there))
    )
    return hits + max(best(prompts[1:], capacity, one) for one in kept)


@pytest.mark.parametrize("seed", range(8))
def test_the_optimum_is_what_no_choice_is_better_than(seed):
    rng = random.Random(seed)
    prompts = []
    for number in range(5):
        path = (rng.randrange(2), rng.randrange(2), rng.randrange(2))
        blocks = [str(path[: depth + 1]) for depth in range(rng.randint(1, 3))]
        prompts.append(Prompt(float(number), blocks))
    assert eviction._optimum(prompts, 3) == best(prompts, 3), f"seed {seed}"


def test_each_policy_has_a_row_beside_the_optimum(tmp_path):
    rng = random.Random(1)
    lines = []
    for at in range(300):
        first = int(rng.paretovariate(1)) % 40 * 100
        ids = list(range(first, first + rng.randint(1, 8)))
        lines.append({"timestamp": 1000 * at, "hash_ids": ids})
    asked = options("--trace", str(trace(tmp_path, lines)), "--blocks", "20", "10000")
    about, rows = eviction.run(asked)
    assert about["requests"] == 300
    assert [(row["capacity"], row["policy"]) for row in rows] == [
        (capacity, name) for capacity in (20, 10_000) for name in ("optimum", *sorted(POLICIES))
    ]
    tight, wide = rows[: len(POLICIES) + 1], rows[len(POLICIES) + 1 :]
    assert all(0 < row["hit"] <= tight[0]["hit"] for row in tight)
    assert {row["hit"] for row in wide} == {round(1 - about["distinct"] / about["blocks"], 4)}
