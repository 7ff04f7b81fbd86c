"""Suite `hybrids` replays agents' sessions through vLLM's scheduler, over the KV cache groups of
hybrid models: what is found, next to what would be if all layers had full attention."""

from __future__ import annotations

import itertools
import json
import random
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.hybrids.layouts import LAYOUTS, Planned, attention_alone
from benchmarks.hybrids.replay import PROMPT_BLOCK_TOKENS, PROMPT_TOKENS_MAX, Engine, Prompt
from benchmarks.report import Row

EVERY, LIVE, SEED = 24, 6, 7
CAPACITIES = (0.5, 1.0)
INTERVALS = (-1, 0)


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--sessions", type=Path, required=True, metavar="FILE", help="trace, a session a line"
    )
    parser.add_argument(
        "--every", type=int, default=EVERY, help="only every so manyth session (%(default)s)"
    )
    parser.add_argument("--requests", type=int, help="only the first so many requests")
    parser.add_argument(
        "--live", type=int, default=LIVE, help="sessions at the same time (%(default)s)"
    )
    parser.add_argument(
        "--answers",
        type=int,
        default=0,
        metavar="BLOCKS",
        help="of 64 tokens that each request generates, if the next one has them (%(default)s)",
    )
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument(
        "--capacities",
        type=float,
        nargs="+",
        default=CAPACITIES,
        help="of the store, in live working sets (default: 0.5 1.0)",
    )
    parser.add_argument(
        "--intervals",
        type=int,
        nargs="+",
        default=INTERVALS,
        help="checkpoint_interval_tokens; -1: not set (default: -1 0)",
    )


def run(options: Namespace) -> tuple[dict[str, Any], list[Row]]:
    every, live, answers = options.every, options.live, options.answers
    prompts = trace(options.sessions, every, live, answers)[: options.requests]
    about = {
        "trace": options.sessions.name,
        "sessions": len({prompt.session for prompt in prompts}),
        "requests": len(prompts),
        "prompt_tokens": sum(prompt.size for prompt in prompts),
    }
    rows: list[Row] = []
    for name in options.layouts:
        planned = LAYOUTS[name]()
        for capacity in options.capacities:
            rows += compared(name, planned, prompts, capacity, options.intervals)
    return about, rows


def compared(
    name: str,
    planned: Planned,
    prompts: Sequence[Prompt],
    capacity: float,
    intervals: Sequence[int],
) -> Iterator[Row]:
    """Replay a layout with a store of `capacity` live working sets, and attention alone with one
    of as many of its own."""
    base = replayed(attention_alone(planned), prompts, capacity)
    for interval in intervals:
        settings = {} if interval < 0 else {"checkpoint_interval_tokens": interval}
        row = replayed(planned, prompts, capacity, **settings)
        ratio = row["hit"] / base["hit"] if base["hit"] else 1.0
        yield {
            "layout": name,
            "capacity": capacity,
            "interval": "-" if interval < 0 else interval,
            "hit": round(row.pop("hit"), 4),
            "attention": round(base["hit"], 4),
            "ratio": round(ratio, 3),
            **row,
        }


def replayed(
    planned: Planned, prompts: Sequence[Prompt], capacity: float, **settings: Any
) -> dict[str, Any]:
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        one = Engine(planned, None, Path(folder), **settings)
        one.close()
        live = live_bytes(prompts, one)
        engine = Engine(planned, int(capacity * live), Path(folder), **settings)
        try:
            hits = sum(engine.ask(p.blocks, p.at, p.answer) for p in prompts)
        finally:
            engine.close()
    counts = engine.store.core.blocks.watched.bytes
    end = engine.layout.block_tokens * 64
    more = engine.needed_bytes(end + engine.layout.block_tokens) - engine.needed_bytes(end)
    return {
        "hit": hits / sum(prompt.size for prompt in prompts),
        "live_gib": round(live / (1 << 30), 2),
        "saved_gib": round(engine.saved_bytes / (1 << 30), 2),
        "read": round(counts["ever_read_bytes"] / counts["stored_bytes"], 3),
        # What windows and states at one place weigh, in tokens of attention.
        "checkpoint_tokens": round((engine.needed_bytes(end) / more - 64) * end / 64),
        "block_tokens": engine.layout.block_tokens,
        "refused": engine.refused,
        "cpu_s": round(time.process_time() - started, 1),
    }


def live_bytes(prompts: Sequence[Prompt], engine: Engine) -> float:
    """Return the live working set in bytes, a mean over all requests: of each session that has
    begun and not ended what its last prompt needs to be found whole, windows and states at its end
    included."""
    last = {prompt.session: number for number, prompt in enumerate(prompts)}
    held: dict[int, int] = {}
    sums = []
    for number, prompt in enumerate(prompts):
        held[prompt.session] = engine.needed_bytes(prompt.size)
        sums.append(sum(held.values()))
        if last[prompt.session] == number:
            del held[prompt.session]
    return fmean(sums)


def trace(path: Path, every: int, live: int, answers: int = 0) -> list[Prompt]:
    """Return prompts of every so manyth session, in the order of their time. Sessions begin by
    chance, so often that about `live` of them are at the same time."""
    sessions = [json.loads(line) for line in path.read_text().splitlines()][::every]
    source = random.Random(SEED)
    each_s = fmean(requests[-1][0] for requests in sessions) / live
    prompts: list[Prompt] = []
    began = 0.0
    for number, requests in enumerate(sessions):
        began += source.expovariate(1 / each_s)
        prompts += _answered([*_session(number, began, requests)], answers)
    return sorted(prompts, key=lambda prompt: prompt.at)


def _answered(prompts: Sequence[Prompt], blocks: int) -> Iterator[Prompt]:
    """Give each request the first `blocks` that the next one adds to its prompt as its answer."""
    for prompt, after in itertools.zip_longest(prompts, prompts[1:], fillvalue=prompts[-1]):
        size = len(prompt.blocks)
        goes_on = after.blocks[:size] == prompt.blocks
        yield prompt._replace(answer=after.blocks[size : size + blocks] if goes_on else [])


def _session(number: int, began: float, requests: Sequence[Sequence[Any]]) -> Iterator[Prompt]:
    """A block has tokens of its own, named by its session and the request that first had it: each
    one's place is in the hash of the blocks before it."""
    blocks: list[int] = []
    for turn, (at, kept, total, *_) in enumerate(requests):
        blocks = [*blocks[:kept], *[(number << 16) + turn] * (total - kept)]
        blocks = blocks[: PROMPT_TOKENS_MAX // PROMPT_BLOCK_TOKENS - 1]
        if blocks:
            yield Prompt(began + at, number, blocks)
