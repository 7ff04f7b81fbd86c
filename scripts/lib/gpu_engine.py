"""Checks that real vLLM engines on this machine's device share KV: run it by its path.

    python scripts/lib/gpu_engine.py

One engine only saves, a second only loads, a third does both; with VRAM pools and without.
All must start, load what the first computed, and give its tokens. Runs on vLLM for CPUs as well,
where VRAM pools are left out by themselves.
"""

from __future__ import annotations

import random
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engines import EngineProcess, EngineSettings, build_model, kv_transfer

BLOCK_TOKENS = 64
PREFIX_TOKENS = 8 * BLOCK_TOKENS
PROMPT_TOKENS = PREFIX_TOKENS + 2
"""Every engine splits its prefill behind the prefix: the tail runs through the same kernels."""
ENGINES = (("kv_producer", True), ("kv_consumer", True), ("kv_both", False))
"""Role, and whether it uses VRAM pools."""


def settings(folder: Path, role: str, vram: bool) -> EngineSettings:
    import torch

    more: dict[str, Any] = {"gpu_memory_utilization": 0.2} if torch.cuda.is_available() else {}
    connector = kv_transfer(
        role,
        run_dir=str(folder / "run"),
        node_size_bytes=256 << 20,
        vram=vram,
        block_tokens=BLOCK_TOKENS,
        lookup_timeout_s=1.0,
        load_timeout_s=30.0,
    )
    return EngineSettings(
        connector=connector, max_batched_tokens=PREFIX_TOKENS, max_model_len=1024, extra=more
    )


def check(folder: Path) -> list[str]:
    """Return what was wrong; empty when all went well."""
    model = build_model(folder / "model")
    rng = random.Random(1)
    prompts = [[rng.randrange(2, 500) for _ in range(PROMPT_TOKENS)] for _ in range(3)]
    wrong: list[str] = []
    expected: list[list[int]] = []
    engines: list[EngineProcess] = []
    try:
        for role, vram in ENGINES:
            name = f"{role}{' with VRAM' if vram else ''}"
            log = folder / f"{role}.log"
            try:
                engine = EngineProcess(model, settings(folder, role, vram), log)
            except RuntimeError as e:
                return [*wrong, f"{name}: {e}", *log.read_text().splitlines()[-40:]]
            engines.append(engine)  # the producer goes on: its VRAM is read
            results = [engine.generate([prompt])[0] for prompt in prompts]
            engine.drain()
            expected = expected or [result.tokens for result in results]
            cached = [result.cached_tokens for result in results]
            wanted = 0 if role == "kv_producer" else PREFIX_TOKENS
            if cached != [wanted] * len(prompts):
                wrong.append(f"{name}: {cached} tokens of each prompt loaded, {wanted} expected")
            if [result.tokens for result in results] != expected:
                wrong.append(f"{name}: other tokens than the engine that computed them")
            print(f"{name}: {len(prompts)} prompts, {cached[0]} tokens of each were loaded")
    finally:
        for engine in engines:
            engine.close()
    return wrong


def main() -> int:
    if find_spec("vllm") is None:
        print("SKIPPED real engines: this Python has no vLLM")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        wrong = check(Path(folder))
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
