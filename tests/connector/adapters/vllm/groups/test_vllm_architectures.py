"""Models of the families that people run: what their layers tell vLLM, and what is shared of it.

Each is built by vLLM's own class from the configuration that transformers or vLLM has for it
(tests/support/vllm_models), with few layers and without weights. vLLM plans and allocates its KV
cache, one engine computes a prompt and others load it, byte for byte as far as attention looks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from each_input import each

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(1500)]
TESTS = Path(__file__).parents[4]
PROGRAM = TESTS / "support" / "vllm_models" / "vllm_architectures.py"
STORED: dict[str, str | None] = {
    "LlamaForCausalLM": None,
    "Qwen3ForCausalLM": None,
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3nForCausalLM": "gemma3n_text",
    "GptOssForCausalLM": None,
    "Llama4ForCausalLM": "llama4_text",
    "DeepseekV3ForCausalLM": None,
    "Qwen3NextForCausalLM": None,
    "JambaForCausalLM": None,
    "FalconH1ForCausalLM": None,
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Gemma4ForCausalLM": "gemma4_text",
    "MistralLarge3ForCausalLM": "deepseek_v3",
    "Ministral3ForCausalLM": None,
    "HYV4ForCausalLM": None,
    "GraniteSWAForCausalLM": None,
    "Exaone4ForCausalLM": None,
    "Cohere2ForCausalLM": None,
}
"""By architecture the `model_type` of its configuration, where it has several."""
REFUSED = {
    "BertModel": "pooler_config",
}
"""And the field that the refusal names."""


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    cases = [
        {"architecture": name, "config": {"model_type": kind} if kind else {}}
        for name, kind in {**STORED, **dict.fromkeys(REFUSED)}.items()
    ]
    path = [str(TESTS.parent), str(TESTS / "support" / "vllm_engines")]
    environment = {
        "PYTHONPATH": os.pathsep.join([*os.environ.get("PYTHONPATH", "").split(os.pathsep), *path]),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    ran = subprocess.run(
        [sys.executable, str(PROGRAM)],
        input=json.dumps(cases),
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answers = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return {answer["architecture"]: answer for answer in answers}


@each("name", STORED)
def test_another_engine_loads_what_one_computed(
    found: dict[str, dict[str, Any]], name: str
) -> None:
    answer = found[name]
    assert answer["verdict"] == "stored", answer
    writer, reader, _ = answer["loaded"]
    assert (writer, answer["left_out"]) == (0, [])
    assert reader > answer["tokens"] // 2, answer


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_begin_behind_a_prefix_is_refused_by_name(
    found: dict[str, dict[str, Any]], name: str
) -> None:
    answer = found[name]
    assert (answer["verdict"], answer.get("field")) == ("refused", REFUSED[name]), answer
