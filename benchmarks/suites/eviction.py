"""Suite `eviction` replays a trace of prompts against a node's core, by policy and capacity: how
much of them would have been found, beside the optimum, and what it takes."""

from __future__ import annotations

import functools
import json
import random
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from heapq import heappop, heappush
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.report import Row
from kvstore.core.events import Reserve
from kvstore.core.memory.eviction import POLICIES
from kvstore.core.node import NodeCore
from kvstore.keys import Namespace as NamedBlocks
from kvstore.limits import SLOT_BYTES_MIN

CAPACITIES = (1000, 3000, 10_000, 30_000)
LIVE, SEED = 60, 7
"""Sessions at the same time, and what draws when each begins."""
VALUE = bytes(SLOT_BYTES_MIN)
"""Of every block: a core writes no payload, so all have the same."""
NAMESPACE = 7
NEVER = float("inf")


class Prompt(NamedTuple):
    at: float
    """In seconds of the trace."""
    blocks: Sequence[Any]
    """What names each, head first."""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--trace",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSONL: requests with `timestamp` in ms and `hash_ids` (Mooncake's traces), or "
        "sessions, each a list of [s, blocks kept, blocks in all, ...]",
    )
    parser.add_argument(
        "--blocks",
        type=int,
        nargs="+",
        default=CAPACITIES,
        help=f"capacities (default: {' '.join(map(str, CAPACITIES))})",
    )
    parser.add_argument(
        "--join", type=int, default=1, help="so many of the trace's blocks are one (%(default)s)"
    )
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--policies", nargs="+", choices=sorted(POLICIES), default=sorted(POLICIES))


def run(options: Namespace) -> tuple[dict[str, Any], list[Row]]:
    prompts = _prompts(options.trace, options.join)[: options.requests]
    blocks = sum(len(prompt.blocks) for prompt in prompts)
    about = {
        "trace": options.trace.name,
        "requests": len(prompts),
        "blocks": blocks,
        "distinct": len({block for prompt in prompts for block in prompt.blocks}),
        "hours": round((prompts[-1].at - prompts[0].at) / 3600, 2),
    }
    rows: list[Row] = []
    for capacity in options.blocks:
        best = _optimum(prompts, capacity) / blocks
        rows.append({"capacity": capacity, "policy": "optimum", "hit": round(best, 4)})
        for name in options.policies:
            hits, cpu_s = _replayed(prompts, capacity, name)
            rows.append(
                {
                    "capacity": capacity,
                    "policy": name,
                    "hit": round(hits / blocks, 4),
                    "of_optimum": round(hits / blocks / best, 3) if best else 1.0,
                    "cpu_us_block": round(cpu_s / blocks * 1e6, 2),
                }
            )
    return about, rows


def _replayed(prompts: Iterable[Prompt], capacity: int, policy: str) -> tuple[int, float]:
    """Blocks of the leading runs that were found, and what the core took."""
    core = NodeCore(
        node_id=1, epoch=1, size_bytes=capacity * SLOT_BYTES_MIN, policy=POLICIES[policy]
    )
    space = NamedBlocks.named("trace")
    hits, cpu_s = 0, 0.0
    for prompt in prompts:
        keys = space.engine_keys(list(map(_hash, prompt.blocks)))
        n = len(keys)
        hits += next((i for i, key in enumerate(keys) if key not in core.blocks.by_key), n)
        none = [0] * n
        put = Reserve(1, 1, keys, [len(VALUE)] * n, NAMESPACE, none, none, [VALUE] * n, none)
        started = time.process_time()
        core.handle(put, prompt.at)
        cpu_s += time.process_time() - started
        # The index hears of it at once.
        core.blocks.outbox.published(core.blocks.outbox.take_publications(n))
        core.blocks.outbox.removed(
            core.blocks.outbox.take_removals(core.blocks.outbox.removals_pending)
        )
    return hits, cpu_s


def _optimum(prompts: Sequence[Prompt], capacity: int) -> int:
    """What is found by who knows the future: what is used again last goes, of a prompt's blocks its
    end first (Belady, whose ties decide which prefixes stay whole)."""
    following: dict[Any, float] = {}
    again: list[list[float]] = []
    for number in range(len(prompts) - 1, -1, -1):
        blocks = prompts[number].blocks
        again.append([following.get(block, NEVER) for block in blocks])
        following.update(dict.fromkeys(blocks, number))
    again.reverse()
    held: dict[Any, float] = {}
    """When each is used again."""
    last: list[tuple[float, int, int, Any]] = []
    hits = 0
    for number, prompt in enumerate(prompts):
        hits += next((i for i, b in enumerate(prompt.blocks) if b not in held), len(prompt.blocks))
        for depth, (block, at) in enumerate(zip(prompt.blocks, again[number], strict=True)):
            held[block] = at
            heappush(last, (-at, -depth, number, block))
        while len(held) > capacity:
            at, _, _, block = heappop(last)
            if held.get(block) == -at:  # the others were used since, and are in it again
                del held[block]
    return hits


# --- traces -----------------------------------------------------------------------


@functools.cache
def _hash(block: object) -> bytes:
    """As an engine names a block: the keys are made of it, with the tag that their run shares."""
    return blake2b(repr(block).encode(), digest_size=32).digest()


def _prompts(path: Path, join: int) -> list[Prompt]:
    """All prompts of a trace, in the order of their time."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    mooncake = isinstance(lines[0], dict)
    found = _of_requests(lines) if mooncake else _of_sessions(lines)
    joined = [Prompt(one.at, one.blocks[join - 1 :: join]) for one in found]
    return sorted((one for one in joined if one.blocks), key=lambda one: one.at)


def _of_requests(requests: Iterable[dict[str, Any]]) -> Iterator[Prompt]:
    for one in requests:
        yield Prompt(one["timestamp"] / 1000, one["hash_ids"])


def _of_sessions(sessions: Sequence[Sequence[Any]]) -> Iterator[Prompt]:
    """Sessions begin by chance, so often that `LIVE` of them are live. A block is named by its
    session, its place, and the request that first had it there."""
    rng = random.Random(SEED)
    each_s = fmean(requests[-1][0] for requests in sessions) / LIVE
    began = 0.0
    for number, requests in enumerate(sessions):
        began += rng.expovariate(1 / each_s)
        blocks: list[tuple[int, int, int]] = []
        for turn, (at, kept, total, *_) in enumerate(requests):
            blocks = [*blocks[:kept], *((number, place, turn) for place in range(kept, total))]
            yield Prompt(began + at, blocks)
