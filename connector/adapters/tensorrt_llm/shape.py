"""Reads TensorRT-LLM's arguments and pool: settings, and the fields of the namespaces.

It looks at attributes only and imports no TensorRT-LLM.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from connector.layout.block_hashes import ALGORITHM
from connector.layout.geometry import Field
from connector.layout.identity import config_digest, digest_of, files_of, weights_or_unknown
from connector.settings import STORE_SETTINGS, ConnectorSettings, json_object
from kvstore import Namespace, UsageError, tenant_salt

if TYPE_CHECKING:
    from connector.adapters.tensorrt_llm.interface import KvCacheLayout

SETTINGS = "KVSTORE_TENSORRT_LLM"
"""Environment variable with our settings as JSON: the engine's arguments have no place for them."""
PAGE_VERSION = 1
"""Grows when the same fields come to mean other bytes."""
ONE_GROUP = "must be one layer group of full attention, in one region: its pages are one list"
_OF_THIS_PROCESS = f"of process {uuid4().hex}"


def settings() -> ConnectorSettings:
    """Raises `UsageError` for what is no JSON object, or has unknown names or values in it."""
    extra = json_object(SETTINGS, os.environ.get(SETTINGS, "{}"))
    return ConnectorSettings.from_extra(extra, where=SETTINGS, only=STORE_SETTINGS)


def check(args: object) -> None:
    """Raises `UsageError` for what cannot be shared rightly. TensorRT-LLM itself refuses several
    pipeline stages and beams beside a connector."""
    for name in ("pipeline_parallel_size", "context_parallel_size"):
        if (found := _number(args, name)) != 1:
            raise UsageError(name, found, "must be 1")
    if own := getattr(args, "enable_attention_dp", False):
        raise UsageError(
            "enable_attention_dp",
            own,
            "must be false: each rank has requests and blocks of its own then",
        )
    windows = getattr(getattr(args, "kv_cache_config", None), "max_attention_window", None)
    longest = getattr(args, "max_seq_len", None)
    # What is behind a window loses its block to other tokens, and the flat calls do not say so.
    if windows and (longest is None or min(windows) < longest):
        must = f"must not be set, or be max_seq_len ({longest}) at least: every block must be kept"
        raise UsageError("kv_cache_config.max_attention_window", windows, must)
    ranks, of_host = tp_size(args), getattr(args, "gpus_per_node", None)
    if of_host is not None and ranks > int(of_host):
        raise UsageError(
            "tensor_parallel_size", ranks, f"must be at most {of_host}, the GPUs of one host"
        )
    if (drafts := getattr(args, "speculative_config", None)) is not None:
        raise UsageError(
            "speculative_config",
            type(drafts).__name__,
            "must be None: the connector interface reports no drafts",
        )


def check_layout(layout: KvCacheLayout) -> None:
    """Raises `UsageError` for a KV cache that is no single list of pages; behind a window the
    engine keeps no page, also of one group."""
    groups = [
        (one.window_size, len(one.regions), len(one.replicated_regions)) for one in layout.groups
    ]
    if groups != [(None, 1, 0)]:
        name = "layer groups of the KV cache (window, regions, replicated regions)"
        raise UsageError(name, groups, ONE_GROUP)


def tp_size(args: object) -> int:
    return _number(args, "tensor_parallel_size")


def _number(args: object, name: str) -> int:
    return int(getattr(args, name, None) or 1)


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Describes an engine block in a worker's pool: a row of one tensor."""

    block_tokens: int
    row_bytes: int
    row_shape: tuple[int, ...]
    dtype: str

    def namespaces(
        self, args: object, config: ConnectorSettings, engine: Mapping[str, Field], ranks: int
    ) -> list[Namespace]:
        """Return one for each tensor-parallel rank."""
        common: dict[str, Field] = {
            **engine,
            "engine": "tensorrt_llm",
            "page_version": PAGE_VERSION,
            "hash": ALGORITHM,
            "block_tokens": self.block_tokens,
            "row_bytes": self.row_bytes,
            "row_shape": str(self.row_shape),
            "dtype": self.dtype,
            "tp_size": ranks,
            **config.life,
        }
        salt = tenant_salt()
        return [Namespace({**common, "tp_rank": rank}, salt=salt) for rank in range(ranks)]


def block_tokens(args: object) -> int:
    """Return tokens of an engine block. Raises `UsageError` where the arguments do not say it."""
    found = getattr(getattr(args, "kv_cache_config", None), "tokens_per_block", None)
    if not isinstance(found, int) or found < 1:
        raise UsageError("kv_cache_config.tokens_per_block", found, "must be a number of tokens")
    return found


def engine_fields(args: object, release: str, weights_id: str | None) -> dict[str, Field]:
    """Return namespace fields that the engine's arguments give: release, weights, what shapes a
    forward.

    Whatever else stands in the arguments and may shape it counts; a field too many costs hits.
    """
    model, revision = str(getattr(args, "model", "")), getattr(args, "revision", None)
    path, why_not = files_of(model, revision)
    if str(getattr(args, "load_format", "auto")).lower().endswith("dummy"):
        path, why_not = None, "load_format dummy reads no files"
    weights = f"id {weights_id}" if weights_id else ""
    kv = getattr(args, "kv_cache_config", None)
    forward = [
        str(getattr(args, name, None))
        for name in ("dtype", "quant_config", "attn_backend", "model_kwargs", "rope_scaling")
    ]
    forward += [str(getattr(kv, name, None)) for name in ("dtype", "max_attention_window")]
    return {
        "version": release,
        "weights": weights or weights_or_unknown(path, why_not, _OF_THIS_PROCESS),
        "config": config_digest(path) if path is not None else "",
        "forward": digest_of(forward),
    }


NOT_STORED = (
    "lora_task_id",
    "lora_config",
    "multimodal_hashes",
    "py_multimodal_data",
    "multimodal_embedding",
    "prompt_embedding_table",
    "mrope_rotary_cos_sin",
    "encoder_tokens",
    "encoder_input_features",
    "position_ids",
)
"""Inputs that shape the KV of a request and are not in its tokens; such a request is computed."""


def why_not(request: object) -> str:
    """Return why nothing of this request is loaded or saved; empty: its tokens and its salt say
    all."""
    for name in NOT_STORED:
        value = getattr(request, name, None)
        if callable(value):
            value = value()
        if value is not None:
            return name
    if getattr(request, "is_dummy_request", False):
        return "is_dummy_request"
    return ""


def salt_of(request: object) -> str | int | None:
    """Return what keeps a request's KV apart from that of others."""
    found = getattr(request, "cache_salt", None)
    if found is None:
        found = getattr(request, "cache_salt_id", None)
    return found if found is None or isinstance(found, int) else str(found)
