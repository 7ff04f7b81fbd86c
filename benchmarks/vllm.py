"""Suite `vllm` measures time to first token: nothing cached, vLLM's own hit, a hit in the store."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.processes import house
from benchmarks.report import Row, machine, median, ratios, spread

sys.path.append(str(Path(__file__).parents[1] / "scripts" / "lib"))

PROMPT_TOKENS = 2050
"""A multiple of the block, and a tail: the last token is always computed."""
BLOCK_TOKENS = 64
NODE_BYTES = 1 << 30
KV_BLOCKS = 600
PROMPTS = 8
WARM_PROMPTS = 10
"""As many as touch every KV block of both engines once."""
LOOKUP_TIMEOUT_S = 0.5


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="repetitions, at least 5")


def run(options: Namespace) -> tuple[dict[str, Any], list[Row]]:
    """Measure two engines of the same random-weight model in turns, one with the connector."""
    if find_spec("vllm") is None:
        raise SystemExit("vLLM is not installed here (scripts/setup says why)")
    from engines import EngineProcess, EngineSettings, ModelShape, build_model, kv_transfer

    shape = ModelShape(layers=16, hidden=768, heads=12, kv_heads=4, vocabulary=8192)
    with house(NODE_BYTES) as here, tempfile.TemporaryDirectory(prefix="kvb-model-") as where:
        about = machine(here.url)
        model = build_model(Path(where), shape)
        transfer = kv_transfer(
            url=here.url,
            run_dir=str(here.run_dir),
            block_tokens=BLOCK_TOKENS,
            lookup_timeout_s=LOOKUP_TIMEOUT_S,
        )

        def settings(connector: dict[str, Any] | None) -> EngineSettings:
            return EngineSettings(connector=connector, kv_blocks=KV_BLOCKS, max_batched_tokens=4096)

        log = Path(where) / "engine.log"
        with (
            EngineProcess(model, settings(None), log=log.with_suffix(".alone")) as alone,
            EngineProcess(model, settings(transfer), log=log) as stored,
        ):
            return about, _measure(alone, stored, options.prompts)


def _measure(alone: Any, stored: Any, count: int) -> list[Row]:
    def prompts(count: int) -> list[list[int]]:
        return [[source.randrange(2, 8000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]

    def first_token_s(engine: Any, prompt: list[int], cached: int) -> float:
        """Time the first token of one request, which must have found exactly `cached` tokens."""
        done = engine.generate([prompt], max_tokens=2)[0]
        if done.cached_tokens != cached:
            raise AssertionError(f"{done.cached_tokens} tokens cached instead of {cached}")
        answers.setdefault(tuple(prompt), done.tokens)
        if answers[tuple(prompt)] != done.tokens:
            raise AssertionError("other tokens than without the store")
        return float(done.ttft_s)

    source = random.Random(1)
    answers: dict[tuple[int, ...], list[int]] = {}
    whole = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
    for prompt in prompts(WARM_PROMPTS):
        for engine in (alone, stored):
            first_token_s(engine, prompt, 0)
    took: dict[str, list[float]] = {
        case: [] for case in ("recompute", "producer", "local_hit", "local_hit_with", "store_hit")
    }
    for prompt in prompts(count):
        took["recompute"].append(first_token_s(alone, prompt, 0))
        took["producer"].append(first_token_s(stored, prompt, 0))
        stored.drain()
        time.sleep(0.2)  # the last blocks are published
        took["local_hit"].append(first_token_s(alone, prompt, whole))
        took["local_hit_with"].append(first_token_s(stored, prompt, whole))
        stored.call("reset", connector=False)
        took["store_hit"].append(first_token_s(stored, prompt, whole))
    names = {
        "recompute": "recompute, no connector",
        "producer": "recompute and save (producer)",
        "local_hit": "vLLM's own prefix hit, no connector",
        "local_hit_with": "vLLM's own prefix hit, with the connector",
        "store_hit": "hit from the store",
    }
    return [
        {
            "case": name,
            "ttft_ms": round(median(took[case]) * 1e3, 1),
            "ratio_to_local_hit": round(median(ratios(took[case], took["local_hit"])), 2),
            "ratio_to_recompute": round(median(ratios(took[case], took["recompute"])), 3),
            "spread": round(spread(took[case]), 3),
            "prompt_tokens": PROMPT_TOKENS,
            "repetitions": len(took[case]),
        }
        for case, name in names.items()
    ]
