"""DeepSeek-V4 as a whole: what its layers tell vLLM, in vLLM's own groups, and what is shared.

The layers' specs are those that `models/deepseek_v4/{attention,compressor}.py` and
`v1/attention/backends/mla/sparse_swa.py` of vLLM 0.32 return for the sizes of the release: latents
of one state for 4 and for 128 tokens, the indexer of the former, windows of 128 tokens for every
layer, and the states of the compressors, in blocks of 4 and 8 tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_model_config import vllm_config

from connector.build import EngineShape
from connector.settings import ConnectorSettings

pytestmark = pytest.mark.vllm
BLOCK_TOKENS = 256
HEAD_DIM, INDEXER_DIM = 512, 132
WINDOW = 128
LATENT = {"num_kv_heads": 1, "max_tp_shards": 1}
LAYERS = (4, 128, 4, 128)
"""How many tokens a state of each layer stands for."""


def specs() -> dict[str, Any]:
    """By name of the layer that has them."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

    found: dict[str, Any] = {}
    packed = {
        "head_size": HEAD_DIM,
        "dtype": torch.uint8,
        "cache_dtype_str": "fp8_ds_mla",
        "alignment": 576,
        "model_version": "deepseek_v4",
        "state_content_bytes": 584,
        **LATENT,
    }
    for number, ratio in enumerate(LAYERS):
        name = f"layers.{number}.attn"
        found[name] = MLAAttentionSpec(block_size=BLOCK_TOKENS, tokens_per_state=ratio, **packed)
        found[f"{name}.swa_cache"] = SlidingWindowMLASpec(
            block_size=64, sliding_window=WINDOW, **packed
        )
        compressors = {"compressor": HEAD_DIM}
        if ratio == 4:
            found[f"{name}.indexer.k_cache"] = MLAAttentionSpec(
                block_size=BLOCK_TOKENS,
                tokens_per_state=ratio,
                head_size=INDEXER_DIM,
                dtype=torch.uint8,
                alignment=576,
                **LATENT,
            )
            compressors["indexer.compressor"] = 128
        overlap = 2 if ratio == 4 else 1
        for part, dim in compressors.items():
            found[f"{name}.{part}.state_cache"] = SlidingWindowMLASpec(
                block_size=4 if ratio == 4 else 8,
                head_size=2 * overlap * dim,
                dtype=torch.float32,
                sliding_window=overlap * ratio,
                alignment=576,
                **LATENT,
            )
    return found


@pytest.fixture(scope="module")
def found(model: Path) -> tuple[Any, EngineShape]:
    """vLLM's own configuration of the KV cache, and what this connector makes of it."""
    from vllm_planning import get_kv_cache_configs

    from connector.adapters.vllm.shape import engine_shape

    config = vllm_config(model, blocks=8)
    config.model_config.hf_config.model_type = "deepseek_v4"
    config.cache_config.block_size = BLOCK_TOKENS
    config.cache_config.num_gpu_blocks_override = None
    config.cache_config.kv_cache_layout = "BLHNC"
    (kv_cache,) = get_kv_cache_configs(config, [specs()], [1 << 30])
    return kv_cache, engine_shape(config, kv_cache, ConnectorSettings())


@pytest.mark.covers("several tokens a state (DeepSeek-V4)", "model")
def test_every_group_is_stored(found: tuple[Any, EngineShape]) -> None:
    kv_cache, shape = found
    numbers = [group.number for group in shape.groups]
    assert numbers == [*range(len(kv_cache.kv_cache_groups))]
    assert shape.left_out == ()
    names = {name for group in kv_cache.kv_cache_groups for name in group.layer_names}
    assert names == set(specs()), "vLLM has left none of them out either"


def test_a_block_has_the_bytes_of_its_states(found: tuple[Any, EngineShape]) -> None:
    """Of 256 tokens: 64 latents of 584 bytes and 64 of the indexer's, or two latents."""
    latents, *_ = found[1].groups
    states = BLOCK_TOKENS // 4
    finer, coarser = states * (584 + INDEXER_DIM), BLOCK_TOKENS // 128 * 584
    assert latents.geometry.payload_bytes(BLOCK_TOKENS) == 2 * finer + 2 * coarser
    assert latents.window_tokens is None


def test_windows_and_compressors_have_theirs_of_as_many_tokens_as_they_look_back(
    found: tuple[Any, EngineShape],
) -> None:
    kv_cache, shape = found
    windows: dict[int, set[int | None]] = {}
    for group, shaped in zip(kv_cache.kv_cache_groups, shape.groups, strict=True):
        windows.setdefault(group.kv_cache_spec.block_size, set()).add(shaped.window_tokens)
        for name in group.layer_names:
            of_layer = specs()[name]
            assert shaped.window_tokens == getattr(of_layer, "sliding_window", None), name
    assert windows == {BLOCK_TOKENS: {None}, 64: {WINDOW}, 4: {8}, 8: {128}}


def test_no_two_groups_share_keys(found: tuple[Any, EngineShape]) -> None:
    groups = found[1].layout(ConnectorSettings()).groups
    namespaces = [group.namespaces[0] for group in groups]
    assert len({namespace.id for namespace in namespaces}) == len(groups)
