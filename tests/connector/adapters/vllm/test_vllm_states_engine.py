"""A real hybrid model on a CPU: linear attention with states beside full attention.

Of vLLM's state-space layers the gated delta nets of Qwen3-Next run on a CPU; Mamba's
own kernels do not (docs/decisions/0015).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from engines import EngineProcess, EngineSettings, kv_transfer
from stores import MIB, NodeProcess

if TYPE_CHECKING:
    from redis_servers import RedisServer

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(400)]
BLOCK = 128
"""What vLLM makes of this model's state and attention pages."""
PROMPTS = [random.Random(i).choices(range(2, 500), k=1100) for i in range(2)]


@pytest.mark.covers("state-space layers, mode align", "engine")
def test_states_that_one_engine_saved_let_another_go_on_from_them(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    model = build_qwen3_next(tmp_path / "model")
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


def build_qwen3_next(path: Path) -> Path:
    """Random weights: three layers of linear attention, one of full attention, few experts.

    Its heads are 128 wide because vLLM's CPU kernels take no others.
    """
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=4096,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        initializer_range=0.2,
        architectures=["Qwen3NextForCausalLM"],
    )
    Qwen3NextForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path
