"""A real hybrid model on a CPU: linear attention with states beside full attention.

Of vLLM's state-space layers the gated delta nets of Qwen3-Next run on a CPU; Mamba's
own kernels do not (docs/decisions/0015).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from engines import EngineProcess, EngineSettings, kv_transfer
from stores import MIB, NodeProcess
from tiny_models import build_states

if TYPE_CHECKING:
    from pathlib import Path

    from redis_servers import RedisServer

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(400)]
BLOCK = 128
"""What vLLM makes of this model's state and attention pages."""
PROMPTS = [random.Random(i).choices(range(2, 500), k=1100) for i in range(2)]


@pytest.mark.covers("state-space layers, mode align", "engine")
def test_states_that_one_engine_saved_let_another_go_on_from_them(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    model = build_states(tmp_path / "model")
    with NodeProcess(redis_server, size=256 * MIB) as node:
        transfer = kv_transfer(load_timeout_s=60.0, **node.engine_settings)
        # vLLM computes linear attention on CPUs in bfloat16 alone.
        settings = EngineSettings(connector=transfer, dtype="bfloat16", extra={"block_size": None})
        with EngineProcess(model, settings, log=tmp_path / "writer.log") as writer:
            computed = [writer.generate([prompt], max_tokens=8)[0] for prompt in PROMPTS]
            writer.drain()
        assert [result.cached_tokens for result in computed] == [0, 0]
        with EngineProcess(model, settings, log=tmp_path / "reader.log") as reader:
            loaded = [reader.generate([prompt], max_tokens=8)[0] for prompt in PROMPTS]
        assert [result.cached_tokens for result in loaded] == [1100 // BLOCK * BLOCK] * 2
        assert [result.tokens for result in loaded] == [result.tokens for result in computed]
