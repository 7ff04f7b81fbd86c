"""Real vLLM engines of a model with latents (MLA): what one saved another has byte for byte.

Every engine computes the prompt in the same two pieces. One that computes it whole has other bytes
in its second layer (bfloat16) whatever a store does, and sooner or later another token.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from engines import EngineProcess, EngineSettings, kv_transfer
from stores import MIB, NodeProcess
from tiny_models import build_deepseek

if TYPE_CHECKING:
    from redis_servers import RedisServer

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]
ENGINE_BLOCK = 16
"""vLLM's kernel for latents on a CPU takes no other."""
BLOCK = 64
T = 4 * BLOCK
TESTS = Path(__file__).parents[4]
PROGRAM = TESTS / "support" / "vllm_engines" / "paged_engine.py"
PATHS = (TESTS.parent, TESTS / "support" / "vllm_engines", TESTS.parent / "scripts" / "lib")
PATH = os.pathsep.join([*map(str, PATHS), os.environ.get("PYTHONPATH", "")])
PROMPTS = [random.Random(i).choices(range(2, 500), k=T + 2) for i in (5, 6)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.covers("MLA (DeepSeek-V2, V3)", "engine")
def test_latents_that_are_loaded_are_the_bytes_saved_and_those_computed_alone(
    redis_server: RedisServer, tmp_path: Path, dtype: str
) -> None:
    model = build_deepseek(tmp_path / "model")

    def run(name: str, cached: int, connector: dict[str, Any] | None) -> list[Any]:
        """Tokens and pages of each prompt."""
        settings = EngineSettings(
            connector=connector,
            block_size=ENGINE_BLOCK,
            max_model_len=1024,
            max_batched_tokens=T,
            env={"PYTHONPATH": PATH, "PAGED_ENGINE": "chunks"},
            extra={"dtype": dtype},
        )
        answers = []
        with EngineProcess(model, settings, tmp_path / f"{name}.log", PROGRAM) as engine:
            for i, prompt in enumerate(PROMPTS):
                out = tmp_path / f"{name}{i}.npy"
                answer = engine.call("answer", prompt=prompt, max_tokens=24, out=str(out))
                assert answer["cached_tokens"] == cached
                answers.append((answer["tokens"], np.load(out)))
            engine.drain()
        return answers

    with NodeProcess(redis_server, size=64 * MIB) as node:
        transfer = kv_transfer(load_timeout_s=60.0, block_tokens=BLOCK, **node.engine_settings)
        saved = run("writer", 0, transfer)
        loaded = run("reader", T, transfer)
    alone = run("alone", 0, None)
    whole = T // ENGINE_BLOCK
    for (tokens, pages), (others, theirs), (wanted, computed) in zip(
        saved, loaded, alone, strict=True
    ):
        layers = pages[:, :whole]
        assert len({page.tobytes() for layer in layers for page in layer}) == layers[..., 0].size
        for layer in range(len(pages)):
            assert np.array_equal(theirs[layer, :whole], pages[layer, :whole]), "as saved"
            assert np.array_equal(theirs[layer, :whole], computed[layer, :whole]), "as computed"
        assert tokens == others == wanted
