"""vLLM's configuration objects for the model of vllm_model_engine.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ENGINE_BLOCK = 16
BLOCK = 2 * ENGINE_BLOCK
"""Tokens of a store block."""
LAYERS, HEADS, HEAD_SIZE = 2, 2, 4
STATE_PAGE_BYTES = 48
"""Of one layer: vLLM pads states to the size of an attention block."""
VOCABULARY = 500


def vllm_config(
    model: Path,
    role: str = "kv_both",
    *,
    blocks: int,
    max_batched_tokens: int = 256,
    block_size: int = ENGINE_BLOCK,
    mamba_cache_mode: str = "none",
    transfer: dict[str, Any] | None = None,
    events: bool = False,
    prefix_caching: bool = True,
    media_cache_gb: float | None = None,
    **extra: Any,
) -> Any:
    """`media_cache_gb`: of a model that takes pictures, None: it takes none."""
    from transformers import LlamaConfig
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVEventsConfig,
        KVTransferConfig,
        ModelConfig,
        MultiModalConfig,
        SchedulerConfig,
        VllmConfig,
    )

    if not (model / "config.json").exists():
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HEAD_SIZE * HEADS,
            intermediate_size=16,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            head_dim=HEAD_SIZE,
            max_position_embeddings=2048,
            architectures=["LlamaForCausalLM"],
        ).save_pretrained(model)
        # Nobody loads it: what it stands for is computed by vllm_model_engine.py.
        (model / "pytorch_model.bin").write_bytes(b"weights")
    model_config = ModelConfig(
        model=str(model), dtype="bfloat16", seed=0, skip_tokenizer_init=True, max_model_len=1024
    )
    cache = CacheConfig(
        block_size=block_size,
        enable_prefix_caching=prefix_caching,
        prefix_caching_hash_algo="sha256_cbor",
        mamba_cache_mode=mamba_cache_mode,
    )
    config = VllmConfig(
        model_config=model_config,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=max_batched_tokens,
            max_model_len=1024,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=events, publisher="null"),
        kv_transfer_config=KVTransferConfig(
            **(
                transfer
                or {
                    "kv_connector": "KVStoreConnector",
                    "kv_connector_module_path": "connector.adapters.vllm",
                    "kv_role": role,
                    "kv_load_failure_policy": "recompute",
                    # Tests are about answers, not about their speed on a busy machine.
                    "kv_connector_extra_config": {"lookup_timeout_s": 5.0, **extra},
                }
            )
        ),
    )
    if media_cache_gb is not None:
        media = MultiModalConfig(mm_processor_cache_gb=media_cache_gb)
        config.model_config.multimodal_config = media
    config.cache_config.num_gpu_blocks = blocks
    config.cache_config.block_size = block_size
    return config


def kv_cache_config(
    blocks: int,
    block_size: int = ENGINE_BLOCK,
    window: int | None = None,
    mamba_cache_mode: str = "none",
    chunk: int | None = None,
    ring: bool = False,
    heads_of: int = 1,
) -> Any:
    """Return one group of full attention, and a second one of sliding-window or state-space layers,
    or of attention within chunks. With `ring` a group that is not stored is between the two.
    `heads_of` is how many tensor-parallel workers share the heads."""
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        CircularBufferSpec,
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    shape = {
        "block_size": block_size,
        "num_kv_heads": HEADS // heads_of,
        "head_size": HEAD_SIZE,
        "dtype": torch.bfloat16,
    }
    specs: list[Any] = [FullAttentionSpec(**shape)]
    if ring:
        specs.append(CircularBufferSpec(**{**shape, "block_size": block_size // 4}))
    if chunk is not None:
        specs.append(ChunkedLocalAttentionSpec(attention_chunk_size=chunk, **shape))
    if window is not None:
        specs.append(SlidingWindowSpec(sliding_window=window, **shape))
    if mamba_cache_mode != "none":
        specs.append(
            MambaSpec(
                block_size=block_size,
                shapes=((2, 4), (2, 2)),
                dtypes=(torch.bfloat16, torch.float32),
                page_size_padded=STATE_PAGE_BYTES,
                mamba_cache_mode=mamba_cache_mode,
            )
        )
    groups = [
        KVCacheGroupSpec(
            [f"model.layers.{len(specs) * i + g}.self_attn.attn" for i in range(LAYERS)], spec
        )
        for g, spec in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
