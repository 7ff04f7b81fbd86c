"""Layers of several shapes in one of vLLM's groups: one namespace that both roles come to although
vLLM tells its scheduler the first layer's shape only, whichever layer that is."""

from __future__ import annotations

import copy
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from each_input import each
from vllm_model_config import vllm_config

from connector.layout.geometry import LayerRun
from connector.layout.shard_reads import GroupReads
from connector.settings import ConnectorSettings
from kvstore import UsageError

pytestmark = pytest.mark.vllm
TP_SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def base(model: Path) -> Any:
    return vllm_config(model, blocks=8)


def group_of(*specs: Any) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, UniformTypeKVCacheSpecs

    named = {f"model.layers.{i}.self_attn.attn": spec for i, spec in enumerate(specs)}
    uniform = UniformTypeKVCacheSpecs.from_specs(named)
    assert uniform is not None, "vLLM puts them into one group"
    return KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(list(named), uniform)]
    )


def latent_and_indexer() -> list[Any]:
    """As DeepSeek-V3.2's layers: a latent, and an indexer of other bytes beside each."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    shape = {"block_size": 64, "num_kv_heads": 1, "max_tp_shards": 1}
    return [
        MLAAttentionSpec(head_size=576, dtype=torch.bfloat16, **shape),
        MLAAttentionSpec(head_size=132, dtype=torch.uint8, **shape),
    ]


def shapes(config: Any, workers: Any) -> list[Any]:
    """The scheduler's and a worker's, each with what vLLM tells it."""
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

    from connector.adapters.vllm.shape import engine_shape

    scheduler = generate_scheduler_kv_cache_config([workers])
    return [engine_shape(config, told, ConnectorSettings()) for told in (scheduler, workers)]


def on_gpus(base: Any, tp_size: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    from connector.adapters.vllm import shape as vllm_shape

    monkeypatch.setattr(vllm_shape.current_platform, "is_cpu", lambda: False, raising=False)
    config = copy.copy(base)
    config.parallel_config = copy.copy(base.parallel_config)
    config.parallel_config.tensor_parallel_size = tp_size
    return config


@pytest.mark.parametrize("tp_size", [1, 8])
@pytest.mark.covers("MLA + indexer (DeepSeek-V3.2, GLM-5)", "model")
def test_both_roles_take_a_latent_and_its_indexer(
    base: Any, monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    config = on_gpus(base, tp_size, monkeypatch)
    scheduler, worker = shapes(config, group_of(*latent_and_indexer()))
    namespaces = [s.layout(ConnectorSettings()).groups[0].namespaces for s in (scheduler, worker)]
    assert namespaces[0] == namespaces[1]
    assert len(namespaces[0]) == 1, "a latent is the same on every worker"
    assert worker.groups[0].geometry.runs == (LayerRun((0,), 1, 1152), LayerRun((1,), 1, 132))
    assert scheduler.groups[0].geometry.runs == ()


def test_trap_layers_with_other_tokens_per_state_are_runs_of_their_own(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many heads and bytes: a block has fewer entries of theirs."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs as Uniform

    def latent(tokens: int) -> Any:
        return MLAAttentionSpec(
            block_size=64,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=128,
            dtype=torch.uint8,
            tokens_per_state=tokens,
        )

    specs = {"a": latent(1), "b": latent(4), "c": latent(1)}
    group = KVCacheGroupSpec(list(specs), Uniform(block_size=64, kv_cache_specs=specs))
    _, worker = shapes(on_gpus(base, 1, monkeypatch), KVCacheConfig(8, [], [group]))
    assert worker.groups[0].geometry.runs == (
        LayerRun((0, 2), 1, 128),
        LayerRun((1,), 1, 128, Fraction(4)),
    )


def test_trap_beside_a_latent_the_block_size_is_always_in_the_namespace(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler cannot know whether there is an indexer, whose bytes lie by the block."""
    scheduler, _ = shapes(on_gpus(base, 1, monkeypatch), group_of(*latent_and_indexer()))
    assert "64 tokens" in str(scheduler.groups[0].fields["within_block"])


def test_trap_layers_that_the_first_ones_word_is_not_true_of_are_refused(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    def spec(**changes: Any) -> Any:
        shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 4, "dtype": torch.bfloat16}
        return FullAttentionSpec(**{**shape, **changes})

    config = on_gpus(base, 2, monkeypatch)
    shapes(config, group_of(spec(), spec(num_kv_heads=4), spec(head_size=8)))
    for other in (
        spec(num_kv_heads=3),
        spec(num_kv_heads=4, num_head_slots=6),
        spec(state_content_bytes=20),
    ):
        with pytest.raises(UsageError, match=r"model\.layers\.1.*cannot be shared beside"):
            shapes(config, group_of(spec(), other))
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(UsageError, match="pipeline_parallel_size"):
        shapes(config, group_of(spec(), spec(head_size=8)))


def targets_and_drafts(tp_size: int, heads: int, draft_heads: int) -> list[Any]:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    shape = {"block_size": 16, "dtype": torch.bfloat16}
    return [
        FullAttentionSpec(num_kv_heads=max(1, heads // tp_size), head_size=8, **shape),
        FullAttentionSpec(num_kv_heads=max(1, draft_heads // tp_size), head_size=4, **shape),
    ]


def with_draft(config: Any, heads: int, draft_heads: int, method: str = "draft_model") -> Any:
    from transformers import PretrainedConfig

    def model(count: int) -> Any:
        made = copy.copy(config.model_config)
        made.model_arch_config = copy.copy(made.model_arch_config)
        made.model_arch_config.total_num_kv_heads = count
        made.hf_text_config = PretrainedConfig(num_key_value_heads=count)
        made.hf_config = PretrainedConfig(eagle_aux_hidden_state_layer_ids=[1, 2])
        return made

    config = copy.copy(config)
    config.model_config = model(heads)
    config.speculative_config = SimpleNamespace(
        method=method,
        draft_model_config=model(draft_heads),
        use_eagle=lambda: False,
        use_multi_module_mtp=lambda: False,
    )
    return config


@each("tp_size", TP_SIZES)
@each("first", ["target", "draft"])
@each(("heads", "draft_heads"), [(8, 2), (4, 8), (8, 3), (2, 2)])
@pytest.mark.covers("draft models with heads of their own", "model")
def test_a_draft_with_heads_of_its_own_is_stored_whichever_layer_comes_first(
    base: Any,
    monkeypatch: pytest.MonkeyPatch,
    tp_size: int,
    first: str,
    heads: int,
    draft_heads: int,
) -> None:
    config = with_draft(on_gpus(base, tp_size, monkeypatch), heads, draft_heads)
    specs = targets_and_drafts(tp_size, heads, draft_heads)
    both = shapes(config, group_of(*(specs if first == "target" else specs[::-1])))
    layouts = [shape.layout(ConnectorSettings()) for shape in both]
    assert layouts[0].groups[0].splits == layouts[1].groups[0].splits
    assert len(both[1].groups[0].geometry.runs) == 2
    sizes = {split.tp_shards for split in layouts[0].groups[0].splits}
    if (heads, draft_heads) == (8, 3):
        assert sizes == {tp_size}, "no engine of another size has such workers"
    reads = [
        GroupReads(layouts[1].groups[0], rank, layouts[1].block_tokens) for rank in range(tp_size)
    ]
    assert all(one.pieces(split) for one in reads for split in range(len(sizes)))


@each("tp_size", TP_SIZES)
@each("turn", [1, -1])
@each("count", [1, 3, 4])
@each("gpus", [True, False])
@pytest.mark.covers("hidden states (extract_hidden_states)", "model")
def test_hidden_states_are_stored_whichever_layer_comes_first(
    base: Any, monkeypatch: pytest.MonkeyPatch, tp_size: int, turn: int, count: int, gpus: bool
) -> None:
    """Each worker has those of all heads: only engines of one size have payloads alike."""
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

    with monkeypatch.context() as patch:
        config = on_gpus(base, tp_size, patch)
        config = with_draft(config, 8, 8, "extract_hidden_states")
        target = targets_and_drafts(tp_size, 8, 8)[0]
        hidden = HiddenStateCacheSpec(
            block_size=16, num_kv_heads=count, head_size=64, dtype=torch.bfloat16
        )
        patch.setattr("vllm.platforms.current_platform.is_cpu", lambda: not gpus, raising=False)
        scheduler, worker = shapes(config, group_of(*[target, hidden][::turn]))
        config.speculative_config.draft_model_config.hf_config.update(
            {"eagle_aux_hidden_state_layer_ids": [1, 3]}
        )
        others, _ = shapes(config, group_of(*[target, hidden][::turn]))
    assert {run.heads for run in worker.groups[0].geometry.runs} == {target.num_heads, count}
    splits = [
        one.layout(ConnectorSettings()).groups[0].splits for one in (scheduler, worker, others)
    ]
    assert splits[0] == splits[1]
    assert len(splits[0]) == 1
    assert splits[2] != splits[0], "they are of other layers of the model"


def test_both_roles_take_states_of_several_shapes(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.kv_cache_interface import MambaSpec

    def spec(*last: int) -> Any:
        return MambaSpec(
            block_size=16,
            shapes=((2, 4), last),
            dtypes=(torch.bfloat16, torch.float32),
            page_size_padded=64,
            mamba_cache_mode="align",
        )

    config, workers = on_gpus(base, 1, monkeypatch), group_of(spec(2, 2), spec(3, 2))
    scheduler, worker = shapes(config, workers)
    namespaces = [s.layout(ConnectorSettings()).groups[0].namespaces for s in (scheduler, worker)]
    assert namespaces[0] == namespaces[1]
    assert worker.groups[0].geometry.runs == (LayerRun((0,), 1, 32), LayerRun((1,), 1, 40))
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(UsageError, match="pipeline_parallel_size"):
        shapes(config, workers)
