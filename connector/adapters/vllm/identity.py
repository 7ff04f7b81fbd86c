"""Makes namespace fields of a vLLM engine's weights and configuration."""

from __future__ import annotations

import os
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from vllm import __version__ as vllm_version
from vllm import envs
from vllm.platforms import current_platform

from connector.layout.block_hashes import ALGORITHM
from connector.layout.geometry import Field
from connector.layout.identity import digest_of, files_of, forward_digest, weights_or_unknown

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, SpeculativeConfig, VllmConfig

    from connector.settings import ConnectorSettings

ROPE_OF_ANY_LENGTH = ("default", "linear", "llama3", "yarn", "dynamic", "mrope", "proportional")
"""Position encodings that vLLM computes without looking at `max_model_len`."""
LENGTH_SHAPES_FORWARD = ("llama4", "nomic", "minimax_m2", "plamo3", "cohere")
"""First parts of names of models whose decoder layers ask vLLM for `max_model_len`, or may."""
DRAFTS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Speculative methods that write nothing into the KV cache: the KV is the same with them and
without."""
UNREADABLE_FORMATS = ("ipc_cache", "modelexpress", "runai_streamer_sharded")
"""`load_format`s whose weights are in no file of this host."""
CONFIGURATION: dict[str, object] = {
    "additional_config": {},
    "attention_config.disable_flashinfer_q_quantization": False,
    "attention_config.indexer_kv_dtype": "auto",
    "attention_config.use_non_causal": False,
    "attention_config.use_prefill_query_quantization": False,
    "cache_config.use_replayssm": False,
    "load_config.ignore_patterns": ["original/**/*"],
    "load_config.model_loader_extra_config": {},
    "lora_config.enable_moe_shared_loras": False,
    "lora_config.target_modules": None,
    "mamba_config.enable_stochastic_rounding": False,
    "model_config.code_revision": None,
    "model_config.model_class_overrides": {},
    "model_config.model_impl": "auto",
    "model_config.multimodal_config.mm_encoder_attn_dtype": None,
    "model_config.multimodal_config.mm_encoder_fp8_scale_path": None,
    "model_config.multimodal_config.video_pruning_method": "evs",
    "model_config.multimodal_config.video_pruning_rate": None,
    "speculative_config.kv_cache_dtype": None,
    "speculative_config.quantization": None,
}
"""Settings of vLLM that change K and V by more than the order of sums, with their defaults."""
ENVIRONMENT: dict[str, object] = {
    "VLLM_B12X_MOE_FP4_FORCE_A16": False,
    "VLLM_CPU_INT4_W4A8": True,
    "VLLM_DEEPEPLL_NVFP4_DISPATCH": False,
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": False,
    "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": None,
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": None,
    "VLLM_MARLIN_INPUT_DTYPE": None,
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "",
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN": False,
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT": "",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "NONE",
    "VLLM_ROCM_USE_AITER_FP4BMM": None,
    "VLLM_ROCM_USE_AITER_FP8BMM": None,
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": None,
    "VLLM_USE_DEEP_GEMM_E8M0": True,
    "VLLM_USE_MODELSCOPE": False,
    "VLLM_VIDEO_LOADER_BACKEND": "opencv",
    "VLLM_XPU_INC_WNA16_BACKEND": "auto",
}
"""Environment variables of the same kind; None where releases differ, so that each value counts."""


def model_fields(vllm_config: VllmConfig, config: ConnectorSettings) -> dict[str, Field]:
    """Return namespace fields of the model.

    Reads the files of the weights, within `kvstore.limits.WEIGHTS_TIMEOUT_S` each.
    """
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    return {
        "engine": "vllm",
        "weights": _weights(vllm_config, model, config.weights_id),
        "forward": _forward(model),
        "dtype": str(model.dtype),
        "quantisation": str(model.quantization or ""),
        "layers": int(model.get_total_num_hidden_layers()),
        "kv_heads": int(model.get_total_num_kv_heads()),
        "draft": "" if speculative is None else _draft(vllm_config, speculative, config),
        "hash_algorithm": ALGORITHM,
        **unusual_fields(vllm_config),
        **config.life,
    }


def unusual_fields(vllm_config: VllmConfig) -> dict[str, Field]:
    """Return fields for what is not vLLM's default: an engine that has nothing but defaults keeps
    its keys when something is added here."""
    changed = {
        path: reduce(lambda part, name: getattr(part, name, None), path.split("."), vllm_config)
        for path in CONFIGURATION
    }
    changed |= {name: getattr(envs, name, None) for name in ENVIRONMENT if name in os.environ}
    defaults = CONFIGURATION | ENVIRONMENT
    fields: dict[str, Field] = {
        name: value if isinstance(value, str | int | float) else digest_of(value)
        for name, value in changed.items()
        if value is not None and value != defaults[name]
    }
    if envs.VLLM_BATCH_INVARIANT:
        # Such an engine promises the same bits whoever was first: those of an engine like it.
        backend, size = vllm_config.attention_config.backend, vllm_config.parallel_config.world_size
        fields["batch_invariant"] = f"vllm {vllm_version}, {device()}, {size} workers, {backend}"
    return fields


def device() -> str:
    """Return what computes here, as precisely as vLLM knows it."""
    if current_platform.is_cpu():
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return f"{current_platform.device_type} {current_platform.get_device_name()}"


def _weights(vllm_config: VllmConfig, model: ModelConfig, weights_id: str | None) -> str:
    if weights_id is not None:
        return f"id {weights_id}"
    load = vllm_config.load_config
    if str(load.load_format) == "dummy":
        # Filled from a seed of vLLM's own, tensor by tensor as each worker and device has them.
        size = vllm_config.parallel_config.tensor_parallel_size
        return f"dummy, {current_platform.device_type}, {size} workers"
    path, why_not = _files_of(model, load)
    # Of this engine alone, and the same on all its workers.
    unknown = f"of engine {vllm_config.instance_id} {vllm_config.kv_transfer_config.engine_id}"
    return weights_or_unknown(path, why_not, unknown)


def _files_of(model: ModelConfig, load: LoadConfig) -> tuple[Path | None, str]:
    """Return where the weights lie that vLLM has loaded, or why that cannot be read."""
    if str(load.load_format) in UNREADABLE_FORMATS:
        return None, f"load_format {load.load_format} reads no files of this host"
    name = str(getattr(model, "model_weights", "") or model.model)
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision
    return files_of(name, commit, load.download_dir)


def _forward(model: ModelConfig) -> str:
    """Return a digest of the model's configuration with all overrides applied, and of what else
    shapes K and V."""
    fields: dict[str, object] = {
        "config": forward_digest(model.hf_config.to_dict()),
        # Changed by vLLM itself, or by overrides of the text model alone.
        "text": forward_digest(model.hf_text_config.to_dict()),
        "quantization_config": model.quantization_config,
        "sliding_window_off": bool(model.disable_sliding_window),
        "multimodal": getattr(model.multimodal_config, "mm_processor_kwargs", None),
        "length": int(model.max_model_len) if length_shapes_forward(model) else None,
    }
    return digest_of(fields)


def length_shapes_forward(model: ModelConfig) -> bool:
    """Return whether K and V of a token may be others in an engine with another `max_model_len`."""
    text = model.hf_text_config
    own_code = bool(getattr(model.hf_config, "auto_map", None)) and model.trust_remote_code
    named = str(getattr(text, "model_type", "")).startswith(LENGTH_SHAPES_FORWARD)
    return (
        own_code
        or named
        or any(
            kind not in ROPE_OF_ANY_LENGTH
            for name in ("rope_parameters", "rope_scaling")
            for kind in _rope_types(getattr(text, name, None))
        )
    )


def _rope_types(rope: object) -> list[object]:
    """Return the kinds of a position encoding, or of one for each kind of layer."""
    if not isinstance(rope, dict):
        return []
    kinds = [rope[key] for key in ("rope_type", "type") if rope.get(key) is not None]
    return kinds + [kind for value in rope.values() for kind in _rope_types(value)]


def _draft(
    vllm_config: VllmConfig, speculative: SpeculativeConfig, config: ConnectorSettings
) -> str:
    """Return what identifies the KV that drafts write into the blocks, from weights of their own;
    empty for a way to draft that writes none."""
    draft = speculative.draft_model_config
    method = str(speculative.method or "")
    if method in DRAFTS_WITHOUT_KV:
        return ""
    if method == "extract_hidden_states":  # of these layers
        layers = getattr(draft and draft.hf_config, "eagle_aux_hidden_state_layer_ids", None)
        return f"{method}, {layers}"
    if draft is None or str(draft.model) == str(vllm_config.model_config.model):
        return method  # with no weights, or with the target's
    weights = _weights(vllm_config, draft, config.weights_id)
    return f"{method}, {weights}, {_forward(draft)}"
