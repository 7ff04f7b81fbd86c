"""Counts the distinct parts of a group's KV heads among vLLM's tensor-parallel workers.

A spec says how many heads one worker holds, and vLLM's layers hold `max(1, heads // tp_size)`. So
the heads of the group are known from it, but for workers with one head each: that may be a head of
its own or a copy of a neighbour's. Copies are saved once, and by no other worker; to take heads for
copies that are not would give a worker another one's bytes. So they are copies only where vLLM or
the model's configuration says so, for these very layers, and nothing there says otherwise. Heads
that might be copies are kept as if they were not: that costs memory, and engines of other sizes
do not find them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.config.model_arch import ModelArchitectureConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

KV_HEADS = re.compile(
    r"(kv|key_value)_(n_)?heads?(?!_(dim|size))|heads?_(kv|key_value)$|(attention|query)_groups?"
)
"""Matches what models call their number of KV heads, wherever it stands in their configuration."""
HEADS_IN_GROUP = re.compile(r"heads_in_group")
"""Matches a name that gives heads by another number, which differs from layer to layer."""
WINDOWED = re.compile(r"(^|_)(swa|sliding|local|window)")
"""Matches a name that concerns the layers with a sliding window only."""
OTHER_MODELS = ("vision_config", "audio_config", "speech_config")
"""Parts of a configuration whose layers have no KV cache."""
DEPTH_MAX = 6
"""Depth of a nested configuration that is searched."""


def tp_shards(spec: KVCacheSpec, layer_names: Iterable[str], vllm_config: VllmConfig) -> int:
    """Return the number of distinct parts of the group's KV among the tensor-parallel workers."""
    tp_size = int(vllm_config.parallel_config.tensor_parallel_size)
    if spec.max_tp_shards is not None:
        return min(tp_size, int(spec.max_tp_shards))
    if spec.num_kv_heads != 1:
        return tp_size
    heads = _heads(spec, layer_names, vllm_config)
    if len(heads) != 1:
        return tp_size
    (total,) = heads
    return total if 0 < total < tp_size and tp_size % total == 0 else tp_size


def one_size(
    spec: KVCacheSpec, layer_names: Iterable[str], vllm_config: VllmConfig, total_heads: int
) -> bool:
    """Return whether the configuration has layers that engines of other sizes split otherwise than
    the first one, of `total_heads`: those of a draft with fewer, or hidden states."""
    arch, speculative = vllm_config.model_config.model_arch_config, vllm_config.speculative_config
    if getattr(speculative, "method", None) == "extract_hidden_states":
        return True  # each worker has all of them
    draft = getattr(speculative, "draft_model_config", None)
    if (draft is None or draft is vllm_config.model_config) and arch.per_layer_overrides is None:
        return False
    return any(heads % total_heads for heads in _heads(spec, layer_names, vllm_config))


def _heads(spec: KVCacheSpec, layer_names: Iterable[str], vllm_config: VllmConfig) -> set[int]:
    """Return the numbers of KV heads that the layers may have in the whole model, by the
    configuration."""
    model = vllm_config.model_config
    arch, speculative = model.model_arch_config, vllm_config.speculative_config
    if arch.per_layer_overrides is not None:
        heads = _heads_of_layers(arch, layer_names, vllm_config.parallel_config)
    else:
        heads = {int(arch.total_num_kv_heads)} | _heads_by_name(spec, model.hf_text_config)
        if len(heads) > 1:
            heads = _heads_by_window(spec, model.hf_text_config) or heads
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and draft is not model:  # its layers may be in any group
        heads |= {int(draft.model_arch_config.total_num_kv_heads)}
        heads |= _heads_by_name(spec, draft.hf_text_config)
    return heads


def _heads_of_layers(
    arch: ModelArchitectureConfig, layer_names: Iterable[str], parallel: ParallelConfig
) -> set[int]:
    """Return what vLLM's own per-layer configuration says of these layers."""
    count = len(arch.per_layer_overrides)
    every = {int(arch[i].total_num_kv_heads) for i in range(count)}
    if parallel.pipeline_parallel_size != 1:
        return every  # the scheduler knows the layers of the first stage only
    heads: set[int] = set()
    for name in layer_names:
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        if len(numbers) != 1 or numbers[0] >= count:
            return every
        heads.add(int(arch[numbers[0]].total_num_kv_heads))
    return heads


def _heads_by_name(spec: KVCacheSpec, text_config: object) -> set[int]:
    return {heads for _, heads in _named(text_config)}


def _heads_by_window(spec: KVCacheSpec, text_config: object) -> set[int] | None:
    """Return where layers with a window have a number of their own: that of the group's kind.

    None where the configuration tells them apart in another way, or the group may hold both
    (vLLM without its hybrid KV cache manager).
    """
    windowed = {heads for name, heads in _named(text_config) if WINDOWED.search(name)}
    others = {heads for name, heads in _named(text_config) if not WINDOWED.search(name)}
    if not windowed:
        return None
    if isinstance(spec, SlidingWindowSpec):
        return windowed
    if isinstance(spec, FullAttentionSpec) and spec.sliding_window is None:
        return others
    return None


def _named(config: object, depth: int = 0) -> Iterator[tuple[str, int]]:
    """Yield (name, value) of everything in a configuration that is a number of KV heads."""
    if depth > DEPTH_MAX:
        return
    if not isinstance(config, Mapping):
        config = getattr(config, "__dict__", {})
    for name, value in config.items():
        if not isinstance(name, str) or name in OTHER_MODELS:
            continue
        values = value if isinstance(value, list | tuple) else [value]
        if HEADS_IN_GROUP.search(name):
            yield name, 0  # no number of heads: with it there are several
        elif KV_HEADS.search(name):
            for one in values:
                if isinstance(one, int) and not isinstance(one, bool):
                    yield name, one
        for one in values:
            if isinstance(one, Mapping) or hasattr(one, "__dict__"):
                yield from _named(one, depth + 1)
