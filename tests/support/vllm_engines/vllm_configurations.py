"""Configurations of vLLM as its users make them, drawn from what vLLM's own source has to offer.

Kinds of layers, dtypes, layouts, hashes and speculative methods are enumerated from vLLM's classes
and types, so one that a new release adds is drawn too. Groups are those that vLLM's own planner
makes of the layers, memory is allocated by vLLM. What vLLM itself does not start with, and with no
connector, is `UnusableError`, and nothing else is.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import random
from typing import Any, NamedTuple, get_args

import torch

ATTENTION_LAYERS = 4
MEMORY_BYTES = 32 << 20
PLATFORMS = ("cpu", "cuda")


class UnusableError(Exception):
    """vLLM itself does not start with it, and with no connector."""


class KVCaches(NamedTuple):
    """What vLLM tells the scheduler, and each pipeline stage's workers, of the KV cache."""

    scheduler: Any
    stages: list[Any]


def layer_kinds() -> list[type]:
    """Every class of specs that one layer may have."""
    from vllm.v1 import kv_cache_interface as module

    none_of_a_layer = (module.KVCacheSpec, module.AttentionSpec, module.UniformTypeKVCacheSpecs)
    return [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind)
        and issubclass(kind, module.KVCacheSpec)
        and kind not in none_of_a_layer
    ]


def axes() -> dict[str, list[Any]]:
    """What users choose, and every value that vLLM has for it."""
    from vllm.config.cache import CacheDType, PrefixCachingHashAlgo
    from vllm.config.speculative import SpeculativeMethod
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return {
        "kind": layer_kinds(),
        "other_kind": [None, None, *layer_kinds()],
        "cache_dtype": list(get_args(CacheDType)),
        "block_size": [8, 16, 32, 64, 128, 256],
        "hash": list(get_args(PrefixCachingHashAlgo)),
        "layout": [one.name for one in KVCacheLayout],
        "tp_size": [1, 2, 4, 8],
        "pp_size": [1, 1, 2],
        "dcp_size": [1, 1, 2, 4],
        "pcp_size": [1, 1, 1, 2],
        "interleave": [1, 2, 8, 16],
        "kv_heads": [1, 2, 8],
        "head_size": [64, 80, 128],
        "method": [None, None, *_flat(SpeculativeMethod)],
        "v2_runner": [False, True],
        "caching": [True, True, True, False],
        "mamba_mode": ["align", "align", "all", "none"],
        "role": ["kv_both", "kv_producer", "kv_consumer"],
        "layerwise": [False, False, False, True],
        "payload_order": ["heads", "heads", "tokens"],
        "platform": list(PLATFORMS),
    }


def _flat(kind: Any) -> list[str]:
    args = get_args(kind)
    return [one for arg in args for one in (_flat(arg) if get_args(arg) else [arg])]


def drawn(rng: random.Random, **fixed: Any) -> dict[str, Any]:
    return {name: rng.choice(values) for name, values in axes().items()} | fixed


def check_usable(base: Any, draw: dict[str, Any]) -> None:
    """Raise `UnusableError` where vLLM does not start with it, and with no connector."""
    try:
        for own in kv_caches_of(config_of(base, draw, connector=False), draw).stages:
            memory_of(own, draw["layout"])
    except Exception as e:  # whatever it is: no connector has had a part in it
        raise UnusableError(f"{type(e).__name__}: {e}") from e


def config_of(base: Any, draw: dict[str, Any], *, connector: bool = True) -> Any:
    """vLLM's configuration, made out of one that it has checked. Raises what vLLM raises."""
    from vllm.config import SpeculativeConfig
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    config = copy.copy(base)
    parts = ("parallel_config", "model_config", "cache_config", "scheduler_config")
    for name in parts:
        setattr(config, name, copy.copy(getattr(base, name)))
    text = copy.deepcopy(base.model_config.hf_text_config)
    text.num_key_value_heads, text.num_attention_heads = draw["kv_heads"], 16
    text.num_hidden_layers = ATTENTION_LAYERS
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    model.hf_text_config = text
    model.model_arch_config = ModelArchConfigConvertorBase(text, text).convert()
    cache.block_size, cache.cache_dtype = draw["block_size"], draw["cache_dtype"]
    cache.prefix_caching_hash_algo = draw["hash"]
    cache.kv_cache_layout, cache.enable_prefix_caching = draw["layout"], draw["caching"]
    cache.mamba_cache_mode, cache.num_gpu_blocks = draw["mamba_mode"], None
    parallel.tensor_parallel_size = draw["tp_size"]
    parallel.pipeline_parallel_size = draw["pp_size"]
    parallel.decode_context_parallel_size = draw["dcp_size"]
    parallel.prefill_context_parallel_size = draw["pcp_size"]
    parallel.cp_kv_cache_interleave_size = draw["interleave"]
    parallel.world_size = draw["tp_size"] * draw["pp_size"] * draw["pcp_size"]
    if draw["method"] is not None:
        guesses = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=2,
            prompt_lookup_max=3,
            target_model_config=base.model_config,
            target_parallel_config=base.parallel_config,
        )
        guesses.method, guesses.draft_model_config = draw["method"], model
        config.speculative_config = guesses
    config.kv_transfer_config = None
    if connector:
        config.kv_transfer_config = transfer_of(draw)
    parallel._validate_parallel_config()
    model.verify_with_parallel_config(parallel)
    config.validate_block_size()
    return config


def transfer_of(draw: dict[str, Any]) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="KVStoreConnector",
        kv_connector_module_path="connector.adapters.vllm",
        kv_role=draw["role"],
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "layerwise": draw["layerwise"],
            "payload_order": draw["payload_order"],
            "weights_id": "w",
        },
    )


def spec_of(kind: type, draw: dict[str, Any], model: Any) -> Any:
    """A layer's spec with values for every field that has no default."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1.kv_cache_interface import get_kv_quant_mode

    heads = max(1, draw["kv_heads"] // draw["tp_size"])
    known = {
        "block_size": draw["block_size"],
        "num_kv_heads": 1 if "MLA" in kind.__name__ else heads,
        "head_size": draw["head_size"],
        "dtype": kv_cache_dtype_str_to_dtype(draw["cache_dtype"], model),
        "kv_quant_mode": get_kv_quant_mode(draw["cache_dtype"]),
        "sliding_window": 64,
        "attention_chunk_size": 128,
        "shapes": ((2, 4), (2, 2)),
        "dtypes": (torch.bfloat16, torch.float32),
        "mamba_cache_mode": draw["mamba_mode"],
        "sink_len": 4,
        "rswa_window": 64,
        "page_size": 1 << 10,
        "blocks_per_request": 4,
        "needed_tokens": 64,
    }
    if "MLA" in kind.__name__:
        known["max_tp_shards"] = 1
    needed: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        required = field.default is dataclasses.MISSING
        required = required and field.default_factory is dataclasses.MISSING
        if field.name in known and (required or known[field.name] is not None):
            needed[field.name] = known[field.name]
        elif required:
            raise AssertionError(f"{kind.__name__}.{field.name}: no value for it is known here")
    return kind(**needed)


def kv_caches_of(config: Any, draw: dict[str, Any]) -> KVCaches:
    """Have vLLM plan for these layers."""
    from vllm.v1.core import kv_cache_utils
    from vllm_planning import get_kv_cache_configs

    first = spec_of(draw["kind"], draw, config.model_config)
    other = spec_of(draw["other_kind"], draw, config.model_config) if draw["other_kind"] else first
    stages = draw["pp_size"]
    count = ATTENTION_LAYERS // stages
    per_stage = [
        {
            f"model.layers.{i}.self_attn.attn": (first if i % 2 == 0 else other)
            for i in range(stage * count, (stage + 1) * count)
        }
        for stage in range(stages)
    ]
    found = get_kv_cache_configs(config, per_stage, [MEMORY_BYTES] * stages)
    scheduler = kv_cache_utils.generate_scheduler_kv_cache_config(found)
    kv_cache_utils.resolve_kv_cache_block_sizes(scheduler, config)
    return KVCaches(scheduler, found)


def memory_of(kv_cache: Any, layout: str) -> dict[str, Any]:
    """The layers' tensors of one worker."""
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    return dict(allocate_kv_cache(kv_cache, torch.device("cpu"), KVCacheLayout[layout], None))
