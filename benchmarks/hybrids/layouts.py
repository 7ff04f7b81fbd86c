"""Makes KV cache specs of five models, as vLLM 0.32's source makes them of one worker's layers.

The models are not built: their kernels want a GPU, and some want more than this repository has. The
numbers are those of the models' configurations: DeepSeek-V4, GLM-5-Next, MiniMax-M3 and Qwen3.5
(35B-A3B) are the defaults of transformers' or vLLM's classes, Kimi-K3 is its published config.json
(93 layers, 69 of them with states). One worker: what several hold of states is the same in sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

ALIGNED_TOKENS = 64
"""What blocks of hybrid models are multiples of: kernels want 16 to 64."""
SPARSE_BLOCK_TOKENS = 128
V4_BLOCK_TOKENS = 256
V4_WINDOW = 128
V4_LATENT_BYTES = 584
V4_ALIGNMENT = 576
V4_HEAD = 512
INDEX_HEAD = 128
INDEX_BYTES = INDEX_HEAD + 4
"""fp8 and a scale."""


class Planned(NamedTuple):
    """Holds the specs of a model's layers by name, and the block size of its attention."""

    block_tokens: int
    specs: dict[str, Any]


def _with_states(
    attention: Callable[[int], dict[str, Any]],
    latent_bytes: int,
    states: int,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> Planned:
    """Return a model with so many layers of states, which are padded to a block of attention, as
    vLLM does it: attention's block grows until a state fits into one (`latent_bytes` a token)."""
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    dtypes = (torch.bfloat16, torch.float32)
    size = sum(math.prod(s) * d.itemsize for s, d in zip(shapes, dtypes, strict=True))
    tokens = math.ceil(size / latent_bytes / ALIGNED_TOKENS) * ALIGNED_TOKENS
    specs = attention(tokens)
    state = MambaSpec(
        block_size=tokens,
        shapes=shapes,
        dtypes=dtypes,
        page_size_padded=tokens * latent_bytes,
        mamba_cache_mode="align",
    )
    return Planned(tokens, specs | {f"model.layers.{i}.states": state for i in range(states)})


def _delta_shapes(heads: int, key_heads: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of a gated delta net's state: the convolution's, the recurrent one."""
    return (3, (heads + 2 * key_heads) * 128), (heads, 128, 128)


def kimi_k3() -> Planned:
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    def attention(tokens: int) -> dict[str, Any]:
        one = MLAAttentionSpec(
            block_size=tokens, num_kv_heads=1, max_tp_shards=1, head_size=576, dtype=torch.bfloat16
        )
        return {f"model.layers.{i}.attn": one for i in range(24)}

    return _with_states(attention, 2 * 576, 69, _delta_shapes(96, 96))


def glm_5() -> Planned:
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    def attention(tokens: int) -> dict[str, Any]:
        latent = MLAAttentionSpec(
            block_size=tokens, num_kv_heads=1, max_tp_shards=1, head_size=512, dtype=torch.bfloat16
        )
        return {f"model.layers.{i}.attn": latent for i in range(11)}

    return _with_states(attention, 2 * 512, 34, _delta_shapes(64, 64))


def qwen3_5() -> Planned:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    def attention(tokens: int) -> dict[str, Any]:
        one = FullAttentionSpec(
            block_size=tokens, num_kv_heads=2, head_size=256, dtype=torch.bfloat16
        )
        return {f"model.layers.{i}.attn": one for i in range(10)}

    return _with_states(attention, 2 * 2 * 256 * 2, 30, _delta_shapes(32, 16))


def minimax_m3() -> Planned:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    tokens = SPARSE_BLOCK_TOKENS
    one = FullAttentionSpec(block_size=tokens, num_kv_heads=4, head_size=128, dtype=torch.bfloat16)
    index = MLAAttentionSpec(
        block_size=tokens, num_kv_heads=1, head_size=INDEX_HEAD, dtype=torch.bfloat16
    )
    specs = {f"model.layers.{i}.attn": one for i in range(60)}
    return Planned(tokens, specs | {f"model.layers.{i}.index": index for i in range(3, 60)})


def deepseek_v4() -> Planned:
    """43 layers: two with a window alone, then layers of 4 tokens to an entry and of 128 in turn.

    Windows of 128 tokens, and of the compressors what they have not compressed yet.
    """
    specs: dict[str, Any] = {}
    for i in range(43):
        specs |= {f"model.layers.{i}.{name}": one for name, one in _v4_layer(i).items()}
    return Planned(V4_BLOCK_TOKENS, specs)


def _v4_layer(number: int) -> dict[str, Any]:
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    common = {"num_kv_heads": 1, "max_tp_shards": 1, "alignment": V4_ALIGNMENT}
    latent = {
        "head_size": V4_HEAD,
        "dtype": torch.uint8,
        "state_content_bytes": V4_LATENT_BYTES,
        "cache_dtype_str": "fp8_ds_mla",
        "model_version": "deepseek_v4",
    }
    window = SlidingWindowMLASpec(block_size=64, sliding_window=V4_WINDOW, **common, **latent)
    layer: dict[str, Any] = {"swa": window}
    if number < 2:
        return layer
    ratio = 4 if number % 2 == 0 else 128

    def compressor(width: int) -> Any:
        both = 2 if ratio == 4 else 1
        return SlidingWindowMLASpec(
            block_size=4 if ratio == 4 else 8,
            head_size=2 * both * width,
            dtype=torch.float32,
            sliding_window=both * ratio,
            **common,
        )

    layer["attn"] = MLAAttentionSpec(
        block_size=V4_BLOCK_TOKENS, tokens_per_state=ratio, **common, **latent
    )
    layer["compressor"] = compressor(V4_HEAD)
    if ratio == 4:
        layer["index"] = MLAAttentionSpec(
            block_size=V4_BLOCK_TOKENS,
            head_size=INDEX_BYTES,
            dtype=torch.uint8,
            tokens_per_state=ratio,
            **common,
        )
        layer["index_compressor"] = compressor(INDEX_HEAD)
    return layer


LAYOUTS: dict[str, Callable[[], Planned]] = {
    "DeepSeek-V4": deepseek_v4,
    "Kimi-K3": kimi_k3,
    "GLM-5-Next": glm_5,
    "MiniMax-M3": minimax_m3,
    "Qwen3.5": qwen3_5,
}


def attention_alone(planned: Planned) -> Planned:
    """Return the same model as if each of its layers had full attention, in the same blocks."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    one = FullAttentionSpec(
        block_size=planned.block_tokens, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
    )
    return Planned(planned.block_tokens, dict.fromkeys(planned.specs, one))
