"""Checks that real vLLM engines on this machine's device share KV.

    python scripts/lib gpu.engine

One engine only saves, a second only loads, a third does both; with VRAM pools and without.
All must start, load what the first computed, and give its tokens; on a device with all that users
have there by default (`BY_DEFAULT`). Runs on vLLM for CPUs as well, without VRAM pools and those.
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
BY_DEFAULT = ("model runner V2", "asynchronous scheduling", "CUDA graphs")
"""What vLLM settles on with a GPU; an engine without one of these proves little."""
GRAPHS = {"cudagraph_capture_sizes": [1, 2, 4]}
"""Each size takes time to capture."""


def on_device() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def settings(folder: Path, role: str, vram: bool) -> EngineSettings:
    more: dict[str, Any] = {}
    if on_device():
        more = {
            "gpu_memory_utilization": 0.2,
            "enforce_eager": False,
            "compilation_config": GRAPHS,
        }
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
                engine = EngineProcess(model, settings(folder, role, vram), log, fresh=True)
            except RuntimeError as e:
                return [*wrong, f"{name}: {e}", *log.read_text().splitlines()[-40:]]
            engines.append(engine)  # the producer goes on: its VRAM is read
            runs = [what for what, does in engine.call("running").items() if does]
            if on_device():
                lacks = [what for what in BY_DEFAULT if what not in runs]
                wrong += [f"{name}: it runs without {what}" for what in lacks]
            results = [engine.generate([prompt])[0] for prompt in prompts]
            engine.drain()
            expected = expected or [result.tokens for result in results]
            cached = [result.cached_tokens for result in results]
            wanted = 0 if role == "kv_producer" else PREFIX_TOKENS
            if cached != [wanted] * len(prompts):
                wrong.append(f"{name}: {cached} tokens of each prompt loaded, {wanted} expected")
            if [result.tokens for result in results] != expected:
                wrong.append(f"{name}: other tokens than the engine that computed them")
            print(
                f"{name}: {len(prompts)} prompts, {cached[0]} tokens of each were loaded; "
                f"runs with {', '.join(runs) or 'none of what GPUs have'}"
            )
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
