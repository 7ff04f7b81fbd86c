"""What vLLM returns of a request that only computing every token of its prompt gives.

Of a loaded prefix there is KV and nothing else. Each field of vLLM's own with which such an output
is asked for or returned has a verdict here; a new one fails until somebody has decided on it.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from vllm_model_config import BLOCK, kv_cache_config, vllm_config
from vllm_model_engine import MakeEngine, prompt

from connector.settings import ConnectorSettings
from kvstore import UsageError

pytestmark = pytest.mark.vllm

OF_EVERY_TOKEN = {
    "new_prompt_logprobs_tensors": "prompt_logprobs",
    "prompt_token_id_logprobs": "prompt_logprob_token_ids",
    "pooling_output": "task",
    "routed_experts": "enable_return_routed_experts",
}
"""Of `EngineCoreOutput`, and what asks for it."""
OF_NEW_TOKENS = {
    *("new_token_ids", "new_logprobs", "new_sampling_mask", "num_nans_in_logits"),
    *("finish_reason", "stop_reason", "spec_decode_metrics"),
}
ABOUT_THE_REQUEST = {
    *("request_id", "events", "kv_transfer_params", "ec_transfer_params", "trace_headers"),
    *("prefill_stats", "mm_cache_miss_hashes"),
}
SAMPLING = {
    # Of prompt tokens.
    *("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start"),
    *("routed_experts_prompt_start", "skip_reading_prefix_cache"),
    # Of tokens that are generated.
    *("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature"),
    *("watermarking", "_watermarking_skipped", "top_p", "top_k", "min_p", "seed", "stop"),
    *("stop_token_ids", "_all_stop_token_ids", "_eos_token_id", "ignore_eos", "max_tokens"),
    *("min_tokens", "logprobs", "logprob_token_ids", "structured_outputs", "logit_bias"),
    *("allowed_token_ids", "bad_words", "_bad_words_token_ids", "thinking_token_budget"),
    *("repetition_detection", "trace_decode_token_ids"),
    # Of their form.
    *("flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
    *("include_stop_str_in_output", "output_kind", "stream_interval", "skip_clone"),
    *("output_text_buffer_length", "extra_args"),
}
POOLING = {
    *("task", "skip_reading_prefix_cache", "step_tag_id", "returned_token_ids"),
    *("use_activation", "dimensions", "requires_token_ids", "late_interaction_params"),
    *("extra_kwargs", "output_kind"),
}
TASKS = {"embed": False, "classify": False} | dict.fromkeys(
    ["token_embed", "token_classify", "plugin", "embed&token_classify"], True
)
"""By task of pooling, whether every token must be computed for it."""
AUXILIARY = {"enable_return_routed_experts", "max_bytes"}
OF_THE_MODEL = {
    *("return_sampling_mask", "max_logprobs", "logprobs_mode", "enable_trace_replay"),
    "pooler_config",
}
"""Of `ModelConfig`, by name: none is of prompt tokens but where a request asks for it."""


def fields(struct: Any) -> set[str]:
    return set(struct.__struct_fields__)


def test_every_output_that_this_vllm_has_is_decided_on() -> None:
    from vllm import SamplingParams
    from vllm.config import ModelConfig
    from vllm.config.aux_output import AuxOutputConfig
    from vllm.pooling_params import PoolingParams, PoolingTask
    from vllm.v1.engine import EngineCoreOutput

    decided = set(OF_EVERY_TOKEN) | OF_NEW_TOKENS | ABOUT_THE_REQUEST
    assert fields(EngineCoreOutput) - decided == set()
    assert fields(SamplingParams) - SAMPLING == set()
    assert fields(PoolingParams) - POOLING == set()
    assert set(get_args(PoolingTask)) - set(TASKS) == set()
    assert {one.name for one in dataclasses.fields(AuxOutputConfig)} - AUXILIARY == set()
    asks = re.compile("return|output|logprob|hidden|pool|trace|routed")
    found = {one.name for one in dataclasses.fields(ModelConfig) if asks.search(one.name)}
    assert found - OF_THE_MODEL == set()


@pytest.fixture
def loads(make: MakeEngine, token_by_token: None) -> Any:
    """Says how many tokens a request with these parameters is offered of a stored prompt."""
    from vllm.v1.request import Request

    tokens = prompt(3 * BLOCK + 5)
    producer, consumer = make(), make()
    producer.serve("a", tokens)

    def offered(sampling: Any = None, pooling: Any = None) -> int:
        request = Request(
            request_id="r",
            prompt_token_ids=tokens,
            sampling_params=sampling,
            pooling_params=pooling,
            block_hasher=consumer._hasher,
        )
        connector: Any = consumer.scheduler.connector
        connector.on_new_request(request)
        while (answer := connector.get_num_new_matched_tokens(request, 0)[0]) is None:
            consumer.step()
        connector.request_finished(request, [])
        return int(answer)

    return offered


@pytest.mark.parametrize(
    "asked", [{}, {"prompt_logprobs": 1}, {"prompt_logprob_token_ids": [[1]] * (3 * BLOCK + 4)}]
)
@pytest.mark.covers("logprobs of the prompt", "model")
def test_nothing_is_loaded_for_logprobs_of_the_prompt(loads: Any, asked: dict[str, Any]) -> None:
    from vllm import SamplingParams

    assert loads(sampling=SamplingParams(**asked)) == (0 if asked else 3 * BLOCK)


@pytest.mark.parametrize("task", TASKS)
def test_nothing_is_loaded_for_what_is_pooled_of_every_token(
    loads: Any, model: Path, task: str
) -> None:
    from vllm.config import PoolerConfig
    from vllm.pooling_params import PoolingParams

    config = vllm_config(model, blocks=8).model_config
    config.pooler_config = PoolerConfig()
    parameters = PoolingParams(task=task)
    parameters.verify(config)
    assert loads(pooling=parameters) == (0 if TASKS[task] else 3 * BLOCK)


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
@pytest.mark.covers("routed experts (enable_return_routed_experts)", "refused")
def test_an_engine_that_returns_experts_of_every_token_loads_nothing(
    model: Path, role: str
) -> None:
    from connector.adapters.vllm.shape import engine_shape

    def start(role: str) -> None:
        config = vllm_config(model, role, blocks=8)
        config.aux_output_config.enable_return_routed_experts = True
        engine_shape(config, kv_cache_config(8), ConnectorSettings())

    with pytest.raises(UsageError, match=r"enable_return_routed_experts.*kv_producer"):
        start(role)
    start("kv_producer")
