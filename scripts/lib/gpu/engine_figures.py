"""Measures real vLLM engines on this machine's device, next to yardsticks.

    python scripts/lib gpu.engine_figures --out FILE

The time to the first token of a hit, over that of vLLM's own CPU offloading connector with the
same model; and what a producer's throughput loses against an engine without a connector.
`benchmarks.gpu_judge` has the aims.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engines import EngineProcess, EngineSettings, Generated, ModelShape, build_model, kv_transfer

from gpu.engine import attention

SHAPE = ModelShape(layers=16, hidden=2048, heads=16, kv_heads=8, vocabulary=32000)
PROMPT_TOKENS = 2048
BATCH = 8
NEW_TOKENS = 32
REPETITIONS = 15
WARM_UP = 2
HOST_BYTES = 2 << 30
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": HOST_BYTES},
}

Start = Callable[[str, dict[str, Any] | None], Any]
"""An engine of that name with that kv_transfer_config."""


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    return [
        [rng.randrange(2, SHAPE.vocabulary) for _ in range(PROMPT_TOKENS + 2)] for _ in range(count)
    ]


def first_token_s(engine: Any, prompt: list[int]) -> float:
    """Time the first token of a hit, in seconds: a prompt is computed, saved, forgotten by the
    engine itself, and asked for again."""
    engine.generate([prompt], max_tokens=1)
    engine.drain()
    engine.call("reset", connector=False)
    hit: Generated = engine.generate([prompt], max_tokens=1)[0]
    if hit.cached_tokens < PROMPT_TOKENS // 2:
        raise RuntimeError(f"only {hit.cached_tokens} of {PROMPT_TOKENS} tokens were a hit")
    return hit.ttft_s


def batch_s(engine: Any, batch: list[list[int]]) -> float:
    began = time.perf_counter()
    engine.generate(batch, max_tokens=NEW_TOKENS)
    return time.perf_counter() - began


def in_turns(
    measure: Callable[[Any, Any], float], ours: Any, yardstick: Any, inputs: list[Any]
) -> float:
    """Return the median of what ours takes over what the yardstick takes of the same input, each
    the first in every other repetition."""
    ratios = []
    for turn, given in enumerate(inputs):
        order = (ours, yardstick) if turn % 2 else (yardstick, ours)
        took = {id(engine): measure(engine, given) for engine in order}
        ratios.append(took[id(ours)] / took[id(yardstick)])
    return statistics.median(ratios[WARM_UP:])


def run(start: Start, run_dir: Path) -> list[dict[str, Any]]:
    """Return one row a figure. Two engines at a time are on the device."""
    rng = random.Random(1)

    def ours(role: str) -> dict[str, Any]:
        return kv_transfer(
            role,
            run_dir=str(run_dir / role),
            node_size_bytes=HOST_BYTES,
            lookup_timeout_s=1.0,
            load_timeout_s=30.0,
        )

    rounds = WARM_UP + REPETITIONS
    with start("both", ours("kv_both")) as engine, start("offloading", OFFLOADING) as yardstick:
        one_each = [prompts(rng, 1)[0] for _ in range(rounds)]
        hit = in_turns(first_token_s, engine, yardstick, one_each)
    with start("producer", ours("kv_producer")) as engine, start("alone", None) as yardstick:
        producer = in_turns(
            batch_s, engine, yardstick, [prompts(rng, BATCH) for _ in range(rounds)]
        )
    return [
        {"figure": "hit", "tokens": PROMPT_TOKENS, "value": round(hit, 3)},
        {
            "figure": "producer",
            "tokens": PROMPT_TOKENS,
            "value": round(100 * (1 - 1 / producer), 2),
        },
    ]


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the rows to this file too")
    parser.add_argument("--folder", type=Path, help="for the model and the logs; it stays")
    options = parser.parse_args()
    if find_spec("vllm") is None:
        print("SKIPPED figures of real engines: this Python has no vLLM")
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder: Path = options.folder or Path(name)
        folder.mkdir(exist_ok=True)
        model = build_model(folder / "model", SHAPE)

        def start(name: str, connector: dict[str, Any] | None) -> EngineProcess:
            settings = EngineSettings(
                connector=connector,
                max_batched_tokens=8192,
                kv_blocks=1024,
                extra={"gpu_memory_utilization": 0.3, "enforce_eager": False, **attention()},
            )
            log = folder / f"{name}.log"
            try:
                return EngineProcess(model, settings, log, fresh=True)
            except RuntimeError:
                print(*log.read_text().splitlines()[-40:], sep="\n", file=sys.stderr)
                raise

        rows = run(start, folder)
    if options.out is not None:
        options.out.write_text(json.dumps({"suite": "gpu_engine", "rows": rows}))
    print(*rows, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
