"""Groups whose layers have other numbers of KV heads than the model's configuration gives."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tp_engine import Model, TpEngine
from vllm_model_config import vllm_config

from connector.build import EngineShape
from connector.settings import ConnectorSettings
from kvstore import UsageError
from kvstore.testing.blockstore import MemoryBlockStore

pytestmark = pytest.mark.vllm

TP_SIZES = (1, 2, 4, 8)
ENGINE_BLOCK, BLOCK = 4, 8
WINDOW = 10
HEAD_SIZE = 2
LAYERS = 4
"""Every other one has a window, if any; the last has none."""


@pytest.fixture(scope="module")
def base(model: Path) -> Any:
    return vllm_config(model, blocks=8)


@pytest.fixture(autouse=True)
def token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connector.adapters.vllm.shape._within_block", lambda *_: "")


def plain(**fields: Any) -> Any:
    """A text configuration, with the names that a model's code in vLLM reads."""
    from transformers import PretrainedConfig

    base = {"num_hidden_layers": LAYERS, "num_attention_heads": 16, "hidden_size": 32}
    return PretrainedConfig(**{**base, **fields})


def mimo_v2() -> Any:
    """vllm/model_executor/models/mimo_v2.py reads the second number for layers with a window."""
    return plain(num_key_value_heads=4, swa_num_key_value_heads=8)


def gemma_4() -> Any:
    """transformers' own: vLLM reads each layer's heads out of `per_layer_config`."""
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

    return Gemma4TextConfig(
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        hidden_size=32,
        head_dim=HEAD_SIZE,
        global_head_dim=HEAD_SIZE,
        layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
    )


def with_text(base: Any, text: Any, tp_size: int, pp_size: int = 1) -> Any:
    """vLLM's configuration of an engine with the architecture that vLLM's converter reads."""
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    config = copy.copy(base)
    config.parallel_config = copy.copy(base.parallel_config)
    config.parallel_config.tensor_parallel_size = tp_size
    config.parallel_config.pipeline_parallel_size = pp_size
    config.model_config = copy.copy(base.model_config)
    config.model_config.hf_text_config = text
    config.model_config.model_arch_config = ModelArchConfigConvertorBase(text, text).convert()
    return config


def groups(tp_size: int, heads: int, window_heads: int | None) -> Any:
    """As vLLM's layers make them: `max(1, heads // tp_size)` on each worker."""
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )

    shape = {"block_size": ENGINE_BLOCK, "head_size": HEAD_SIZE, "dtype": torch.bfloat16}
    specs: list[Any] = [FullAttentionSpec(num_kv_heads=max(1, heads // tp_size), **shape)]
    if window_heads is not None:
        local = max(1, window_heads // tp_size)
        specs.append(SlidingWindowSpec(num_kv_heads=local, sliding_window=WINDOW, **shape))
    step = len(specs)
    return KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(
                [f"model.layers.{i}.self_attn.attn" for i in range(step - 1 - g, LAYERS, step)],
                spec,
            )
            for g, spec in enumerate(specs)
        ],
    )


def shape_of(config: Any, kv_cache_config: Any) -> EngineShape:
    from connector.adapters.vllm.shape import engine_shape

    return engine_shape(config, kv_cache_config, ConnectorSettings())


def shards(base: Any, text: Any, heads: int, window_heads: int | None, tp_size: int) -> list[int]:
    config = with_text(base, text, tp_size)
    found = shape_of(config, groups(tp_size, heads, window_heads))
    return [group.topology.tp_shards for group in found.groups]


Engines = Callable[..., TpEngine]


@pytest.fixture
def engine(base: Any, store: MemoryBlockStore) -> Iterator[Engines]:
    made: list[TpEngine] = []

    def one(text: Any, tp_size: int, heads: int, window_heads: int | None) -> TpEngine:
        config = with_text(base, text, tp_size)
        windowed = window_heads is not None
        model = Model(
            layers=LAYERS // 2 if windowed else LAYERS,
            heads=heads,
            channel_bytes=2 * HEAD_SIZE * 2,
            window_tokens=WINDOW if windowed else None,
            window_heads=window_heads,
        )
        shape = shape_of(config, groups(tp_size, heads, window_heads))
        made.append(TpEngine(store, model, tp_size, shape=shape, seed=tp_size))
        return made[-1]

    yield one
    for each in made:
        each.close()


MODELS = {
    "window layers have more (MiMo-V2)": (mimo_v2, 4, 8),
    "window layers have more than full ones (Gemma 4)": (gemma_4, 2, 8),
    "all layers have the same": (lambda: plain(num_key_value_heads=4), 4, 4),
    "one head": (lambda: plain(num_key_value_heads=1), 1, 1),
    "no windows": (lambda: plain(num_key_value_heads=2), 2, None),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.covers("heads that differ by group (MiMo-V2, Gemma 4)", "model")
@pytest.mark.covers("tensor parallel 1, 2, 4, 8, mixed", "model")
def test_engines_of_all_sizes_share_every_head_byte_for_byte(engine: Engines, name: str) -> None:
    text, heads, window_heads = MODELS[name]
    engines = {tp_size: engine(text(), tp_size, heads, window_heads) for tp_size in TP_SIZES}
    for writer, reader in itertools.product(TP_SIZES, TP_SIZES):
        rng = random.Random(writer * 10 + reader)
        tokens = [rng.randrange(32000) for _ in range(4 * BLOCK + 3)]
        engines[writer].save(tokens)
        engines[reader].wipe()
        offered, tables, _, report = engines[reader].load(tokens)
        assert offered == 4 * BLOCK, (writer, reader)
        assert report.failed_blocks == {}
        engines[reader].check(tokens, offered, tables)


def test_a_head_is_saved_once_where_workers_hold_copies(base: Any) -> None:
    assert [shards(base, mimo_v2(), 4, 8, tp) for tp in TP_SIZES] == [
        [1, 1],
        [2, 2],
        [4, 4],
        [4, 8],
    ]
    assert [shards(base, gemma_4(), 2, 8, tp) for tp in (4, 8, 16)] == [[2, 4], [2, 8], [2, 8]]


AMBIGUOUS: dict[str, dict[str, Any]] = {
    "more heads than any number says": {"num_key_value_heads": 4, "kv_n_heads": 8},
    "a number within a part": {
        "num_attention_groups": 4,
        "attention_other_setting": {"num_attention_groups": 8},
    },
    "one for each layer": {"num_key_value_heads": 4, "num_kv_heads_per_layer": [4, 8, 4, 8]},
    "by heads in a group": {
        "num_key_value_heads": 4,
        "block_configs": [SimpleNamespace(attention=SimpleNamespace(n_heads_in_group=4))],
    },
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_trap_heads_that_may_be_copies_or_not_are_all_kept(base: Any, name: str) -> None:
    """One head a worker is what 4 and 8 heads give alike among 8: taken for copies, half the
    workers would load another one's."""
    assert shards(base, plain(**AMBIGUOUS[name]), 8, None, 8) == [8]


@pytest.mark.parametrize(("heads", "tp_size"), [(6, 8), (3, 4), (3, 8)])
def test_trap_heads_that_do_not_divide_the_workers_are_no_copies_known_here(
    base: Any, heads: int, tp_size: int
) -> None:
    """vLLM's layers hold one on each worker: whose, is not known."""
    assert shards(base, plain(num_key_value_heads=heads), heads, None, tp_size) == [tp_size]


def test_trap_a_draft_models_heads_are_not_the_models(base: Any) -> None:
    config = with_text(base, plain(num_key_value_heads=4), 8)
    draft = with_text(base, plain(num_key_value_heads=8), 8).model_config
    config.speculative_config = SimpleNamespace(
        draft_model_config=draft,
        use_eagle=lambda: True,
        use_multi_module_mtp=lambda: False,
        method="eagle",
    )
    (group,) = shape_of(config, groups(8, 8, None)).groups
    assert group.topology.tp_shards == 8


def test_trap_without_the_hybrid_manager_a_group_may_hold_both_kinds(base: Any) -> None:
    import dataclasses

    config, found = with_text(base, mimo_v2(), 8), groups(8, 8, None)
    (group,) = found.kv_cache_groups
    object.__setattr__(
        group, "kv_cache_spec", dataclasses.replace(group.kv_cache_spec, sliding_window=WINDOW)
    )
    assert shape_of(config, found).groups[0].topology.tp_shards == 8


def test_what_vllm_says_of_a_spec_comes_before_the_configuration(base: Any) -> None:
    import dataclasses

    config, found = with_text(base, plain(num_key_value_heads=8), 8), groups(8, 8, None)
    (group,) = found.kv_cache_groups
    for said, expected in ((1, 1), (2, 2), (16, 8)):
        spec = dataclasses.replace(group.kv_cache_spec, max_tp_shards=said)
        object.__setattr__(group, "kv_cache_spec", spec)
        assert shape_of(config, found).groups[0].topology.tp_shards == expected
    spec = dataclasses.replace(group.kv_cache_spec, max_tp_shards=3)
    object.__setattr__(group, "kv_cache_spec", spec)
    with pytest.raises(UsageError, match="tp_size"):
        shape_of(config, found)


def test_trap_pipeline_stages_that_part_layers_otherwise_share_nothing(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fields() -> dict[str, object]:
        config = with_text(base, plain(num_key_value_heads=4), 2, pp_size=2)
        return shape_of(config, groups(2, 4, None)).groups[0].fields

    even = fields()
    assert even == fields()
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,3")
    assert fields() != even


@pytest.mark.covers("non-causal attention (prefix LM)", "refused")
def test_trap_kv_that_depends_on_tokens_behind_it_is_refused(base: Any) -> None:
    import dataclasses

    config, found = with_text(base, plain(num_key_value_heads=4), 2), groups(2, 4, None)
    (group,) = found.kv_cache_groups
    spec = dataclasses.replace(group.kv_cache_spec, non_causal=True)
    object.__setattr__(group, "kv_cache_spec", spec)
    with pytest.raises(UsageError, match="depends on the tokens behind it"):
        shape_of(config, found)
