"""Says what the store does with each of vLLM's KV cache groups, by the kinds of its layers.

A group that is left out costs nothing as long as vLLM itself does without it after a prefix that it
has found in its own cache: then it is of use to nobody but its request, or is made anew from other
groups. What every token needs and cannot be stored makes a prefix useless, whatever else is there:
such a model is refused, by the name of the kind.

Kinds are told by their exact class. A kind that is not listed may mean anything, whatever class it
derives from, so nothing of that model is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.kv_cache_interface import iter_layer_specs

from kvstore import UsageError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


class Fate(StrEnum):
    """Says what becomes of a group whose layers are of one kind."""

    STORED = "stored"
    LEFT_OUT = "left out"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class GroupKind:
    """Says what is true of one class of specs."""

    fate: Fate
    why: str = ""


NEEDED = "and every token needs it"
OWN_REQUEST = "vLLM shares it between no requests: it is empty where a hit ends"
KINDS = {
    "FullAttentionSpec": GroupKind(Fate.STORED),
    "MLAAttentionSpec": GroupKind(Fate.STORED),
    "SinkFullAttentionSpec": GroupKind(Fate.STORED),
    "RSWASpec": GroupKind(Fate.STORED, "prompts only"),
    "HiddenStateCacheSpec": GroupKind(Fate.STORED),
    "SlidingWindowSpec": GroupKind(Fate.STORED),
    "SlidingWindowMLASpec": GroupKind(Fate.STORED),
    "ChunkedLocalAttentionSpec": GroupKind(Fate.STORED),
    "MambaSpec": GroupKind(Fate.STORED),
    "CircularBufferSpec": GroupKind(Fate.LEFT_OUT, OWN_REQUEST),
    "HiSparseHotSpec": GroupKind(Fate.LEFT_OUT, "vLLM makes it from another group"),
    "HiSparseResidentSpec": GroupKind(Fate.LEFT_OUT, "vLLM makes it from another group"),
    "CrossAttentionSpec": GroupKind(
        Fate.REFUSED,
        "vLLM computes it from the encoder only when it computes the first token",
    ),
    "EncoderOnlyAttentionSpec": GroupKind(Fate.REFUSED, "it attends to all tokens in every step"),
}
"""Every class that vLLM 0.32 and 0.33 give to a layer, by name."""


class Group(NamedTuple):
    """Names one of vLLM's groups that is stored."""

    number: int
    """vLLM's number, counted over all groups."""
    group: KVCacheGroupSpec


class Groups(NamedTuple):
    """Sorts vLLM's groups by what becomes of them."""

    stored: tuple[Group, ...]
    left_out: tuple[str, ...]
    """Number, kind and reason of each group that is left out."""


def sorted_groups(kv_cache_config: KVCacheConfig) -> Groups:
    """Return which groups are stored. Raises `UsageError` where no prefix could be used again."""
    stored, left_out = [], []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        why = _why_left_out(number, group)
        if why is None:
            stored.append(Group(number, group))
        else:
            left_out.append(f"group {number} ({', '.join(_kinds(group))}): {why}")
    if not stored:
        raise UsageError(
            "kv_cache_groups",
            "; ".join(left_out) or 0,
            "must have at least one that can be stored: there is no KV to share",
        )
    return Groups(tuple(stored), tuple(left_out))


def check_outputs(vllm_config: VllmConfig) -> None:
    """Raise `UsageError` where vLLM returns something of tokens that only computing them gives, and
    does not compute them for it (`skip_reading_prefix_cache`)."""
    if vllm_config.aux_output_config.enabled and vllm_config.kv_transfer_config.is_kv_consumer:
        why = "of loaded tokens vLLM has no experts to return, and ends"
        must = f"must be off: {why}. It may be on where kv_role is kv_producer"
        raise UsageError("enable_return_routed_experts", True, must)


def _why_left_out(number: int, group: KVCacheGroupSpec) -> str | None:
    """Return why `group` is not stored, None where it is."""
    if not group.enable_kv_transfer:
        return "vLLM makes it from another group (enable_kv_transfer is false)"
    if group.host_resident:
        _refuse(number, "a group in host memory", f"its blocks are of another pool, {NEEDED}")
    for spec in iter_layer_specs(group.kv_cache_spec):
        name = type(spec).__name__
        kind = KINDS.get(name)
        if kind is None:
            _refuse(number, name, "this version does not know what such a layer's KV means")
        elif kind.fate is Fate.REFUSED:
            _refuse(number, name, kind.why)
        elif getattr(spec, "non_causal", False):
            why = "the KV of a prefix depends on the tokens behind it"
            _refuse(number, f"{name}, non-causal", why)
        elif kind.fate is Fate.LEFT_OUT:
            return kind.why
    if not group.kv_cache_spec.prefix_cacheable:
        return "vLLM computes it again behind every hit (prefix_cacheable is false)"
    return None


def _refuse(number: int, name: str, why: str) -> None:
    raise UsageError(
        "kv_cache_groups",
        f"{name} in group {number}",
        f"cannot be stored, so that nothing of this model can: {why}",
    )


def _kinds(group: KVCacheGroupSpec) -> Iterator[str]:
    return iter(dict.fromkeys(type(one).__name__ for one in iter_layer_specs(group.kv_cache_spec)))


def check_model(model_config: ModelConfig) -> None:
    """Raise `UsageError` for a model that cannot begin behind a prefix, whatever its groups."""
    if model_config.is_encoder_decoder:
        why = KINDS["CrossAttentionSpec"].why
        raise UsageError("is_encoder_decoder", True, f"must be false: {why}")
    pooler = getattr(model_config, "pooler_config", None)
    if pooler is not None and not model_config.is_prefix_caching_supported:
        how = pooler.seq_pooling_type or pooler.tok_pooling_type
        raise UsageError(
            "pooler_config",
            f"{how} over {model_config.attn_type} attention",
            "cannot begin behind a prefix, so that nothing of it can be shared: "
            "vLLM needs the hidden states of all tokens",
        )
