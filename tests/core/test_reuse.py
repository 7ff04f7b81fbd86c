"""The curve of what a node of another size would find."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from hashlib import blake2b

import pytest

from kvstore.core import reuse
from kvstore.core.events import Commit, Reserve, Touch
from kvstore.core.node import NodeCore
from kvstore.core.reuse import REACH, SAMPLES_MAX, TIMES, Reuse
from kvstore.types import Key

PAGE = 4096
"""Bytes, and 4 granules, of each block."""


def key(number: int) -> Key:
    return blake2b(b"%d" % number, digest_size=32).digest()


def agents(sessions: int, live: int) -> tuple[list[float], list[array[int]]]:
    """Prompts of sessions that grow at both small and large gaps, in the order of their time."""
    rng = random.Random(3)
    found: list[tuple[float, array[int]]] = []
    began, new = 0.0, 0
    for _ in range(sessions):
        began += rng.expovariate(live / 600.0)
        at, blocks = began, array("I")
        for _ in range(30):
            kept = blocks if rng.random() < 0.9 else blocks[: len(blocks) // 2]
            more = int(rng.paretovariate(1.0)) % 200 + 1
            blocks = kept + array("I", range(new, new + more))
            new += more
            found.append((at, blocks))
            at += rng.expovariate(1 / 20.0) + 1
    found.sort(key=lambda one: one[0])
    return [at for at, _ in found], [blocks for _, blocks in found]


def exact(prompts: Sequence[Sequence[int]], sizes: Sequence[float]) -> list[float]:
    """Share of blocks that LRU finds at each size, by distances of all blocks."""
    order: dict[int, int] = {}
    """Blocks by last use, each prompt's end first; with the number of the prompt."""
    left: dict[int, int] = {}
    """Prompt -> blocks that it used last."""
    hits, asked = [0] * len(sizes), 0
    for number, prompt in enumerate(prompts):
        asked += len(prompt)
        seen: dict[int, int] = {}
        since: dict[int, int] = {}
        for block in prompt:
            before = order.get(block)
            if before is not None:
                if before not in since:
                    since[before] = sum(n for p, n in left.items() if p > before)
                distance = since[before] + seen.get(before, 0) + 1
                seen[before] = seen.get(before, 0) + 1
                for i, size in enumerate(sizes):
                    hits[i] += distance <= size
        for block in prompt:
            if (before := order.get(block)) is not None:
                left[before] -= 1
                if not left[before]:
                    del left[before]
            order[block] = number
        left[number] = len(prompt)
    return [hit / asked for hit in hits]


@pytest.mark.long
def test_the_sampled_curve_is_the_exact_one_within_a_fiftieth() -> None:
    times, prompts = agents(500, 40)
    capacity = 1500
    curve = Reuse(capacity * PAGE, {})
    for now, prompt in zip(times, prompts, strict=True):
        curve.used([key(number) for number in prompt], now, new=4)
    told = curve.told()
    uses = sum(map(len, prompts))
    assert told["reuse_sampled"] < uses / 2, "the sample was thinned"
    there = exact(prompts, [*(capacity * times for times in TIMES), float("inf")])
    names = [*(f"{times:g}" for times in TIMES), "unlimited"]
    apart = {
        name: round(told[f"reuse_hit_rate:{name}"] - rate, 3)
        for name, rate in zip(names, there, strict=True)
    }
    assert there[0] < 0.5 < there[-1], "the curve rises"
    assert max(map(abs, apart.values())) <= 0.02, apart


def test_the_sample_stays_small_and_knows_all_that_ever_was() -> None:
    curve = Reuse(64 * PAGE, {})
    assert curve.told() == {}
    distinct = 6 * SAMPLES_MAX
    for start in range(0, distinct, 64):
        curve.used([key(number) for number in range(start, start + 64)], start, new=4)
    first = curve.told()
    assert first["reuse_hit_rate:unlimited"] == 0
    for start in range(0, distinct, 64):
        keys = [key(number) for number in range(start, start + 64)]
        curve.used(keys, distinct + start, new=4)
    told = curve.told()
    assert told[f"reuse_hit_rate:{REACH}"] == 0
    assert 0.35 < told["reuse_hit_rate:unlimited"] <= 0.5


def core(blocks: int = 64) -> NodeCore:
    return NodeCore(node_id=1, epoch=1, size_bytes=blocks * PAGE)


def save(node: NodeCore, keys: Sequence[Key], now: float) -> None:
    """As a connector saves: reserve, commit, and then it tells of the run."""
    none = [0] * len(keys)
    put = Reserve(1, 1, keys, [PAGE] * len(keys), 1, none, none, [None] * len(keys), none)
    grants = node.handle(put, now).replies[0].body
    items = [(grant.slot_id, grant.generation, 0) for grant in grants]  # type: ignore[union-attr]
    node.handle(Commit(1, 2, items), now + 0.2)


def told(node: NodeCore) -> tuple[int, float]:
    found = node.reuse.told()
    return int(found["reuse_sampled"]), round(found["reuse_hit_rate:1"], 3)


def test_a_save_counts_once_and_a_read_once() -> None:
    node, keys = core(), [key(number) for number in range(8)]
    save(node, keys[:4], 10.0)
    node.handle(Touch(1, keys[:4]), 10.4)
    assert told(node) == (4, 0.0), "the run of a save is no use of it"
    node.handle(Touch(1, keys[:4]), 30.0)
    assert told(node) == (8, 0.5)
    node.handle(Touch(1, keys[:4]), 30.5)
    assert told(node) == (8, 0.5), "one request is several messages"
    save(node, keys[4:], 31.0)
    node.handle(Touch(1, keys), 31.5)
    assert told(node) == (12, 0.333), "the head of a saved run was loaded before"


def test_blocks_of_other_nodes_are_not_counted() -> None:
    node = core()
    node.handle(Touch(1, [key(1)]), 10.0)
    node.handle(Touch(1, []), 10.0)
    assert node.reuse.told() == {}


def test_a_run_in_parts_is_one() -> None:
    node, keys = core(), [key(number) for number in range(8)]
    save(node, keys, 10.0)
    node.handle(Touch(1, keys[4:]), 10.4)
    node.handle(Touch(1, keys[:4], goes_on=True), 10.4)
    assert told(node) == (8, 0.0)


def test_an_evicted_block_that_is_saved_again_was_missed_at_this_size_alone() -> None:
    node = core(blocks=16)
    prompts = [[key(10 * first + i) for i in range(8)] for first in range(4)]
    for turn in range(2):
        for number, keys in enumerate(prompts):
            save(node, keys, 100.0 * turn + 10.0 * number)
    found = node.reuse.told()
    assert (found["reuse_hit_rate:1"], found["reuse_hit_rate:1.5"]) == (0, 0)
    assert found["reuse_hit_rate:3"] == found["reuse_hit_rate:unlimited"] == 0.5


def test_what_was_counted_long_ago_counts_less(monkeypatch: pytest.MonkeyPatch) -> None:
    node, keys = core(), [key(number) for number in range(4)]
    save(node, keys, 10.0)
    late = 20.0 + reuse.HALVED_EVERY_S
    node.handle(Touch(1, keys), late)
    assert told(node) == (6, 0.667)


def test_runs_are_numbered_anew_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "RUNS_MAX", 8)
    node = core()
    keys = [key(number) for number in range(4)]
    for one in keys:
        save(node, [one], 10.0)
    for turn in range(1, 12):
        for one in keys:
            node.handle(Touch(1, [one]), 10.0 + 10 * turn)
    found = node.reuse.told()
    assert found["reuse_hit_rate:0.125"] == found["reuse_hit_rate:1"] == 44 / 48
