"""Reads SGLang's storage configuration and host pools: settings, and the fields of the namespace.

It looks at attributes only and imports no SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from connector.layout.geometry import Field
from connector.settings import STORE_SETTINGS, ConnectorSettings
from kvstore import Namespace, UsageError, tenant_salt

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.memory_pool_host import HostKVCache

LOADER_NAMES = ("backend_name", "module_path", "class_name", "interface_v1")
"""Settings of the extra configuration that SGLang itself reads and leaves in it."""
PAGE_VERSION = 1
"""Grows when the same fields come to mean other bytes."""
KV, MAMBA, DRAFT = "kv", "mamba", "draft"
"""SGLang's names of its main pool, of a pool that ranks never share, and how a draft model's
begin."""

_POOL_NUMBERS = (
    "layer_num",
    "target_layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "head_group_num",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "size_per_token",
    "num_mamba_layers",
    "indexer_page_stride_size",
)
"""Numbers of the host pool; those that a kind of pool lacks are null in the namespace."""
_OF_ALL_HEADS = ("head_num", "size_per_token")
"""The numbers among them that count all heads of a rank."""
_POOL_SHAPES = ("temporal_state_shape", "conv_state_shapes")


def settings(extra: Mapping[str, Any] | None) -> ConnectorSettings:
    """Return our settings of `--hicache-storage-backend-extra-config`. Raises `UsageError` for
    unknown ones."""
    ours = {name: value for name, value in (extra or {}).items() if name not in LOADER_NAMES}
    where = "hicache_storage_backend_extra_config"
    return ConnectorSettings.from_extra(ours, where=where, only=STORE_SETTINGS)


def head_groups(storage: HiCacheStorageConfig, pool: HostKVCache, interface: str) -> int:
    """Return the number of pieces in which this rank's pages are kept, so that ranks of
    `tp_lcm_size` share them: one for each of that many ranks whose heads it has. SGLang asks for it
    where it can be done, in the layout `page_head`."""
    if not getattr(storage, "should_split_heads", False) or interface != "v1":
        return 1
    pieces = int(storage.tp_lcm_size) // int(storage.tp_size)
    if int(pool.head_num) % pieces:
        raise UsageError(
            "tp_lcm_size",
            storage.tp_lcm_size,
            f"must divide the {pool.head_num} heads of a rank into equal parts",
        )
    return pieces


def has_draft(pool: object, name: str) -> bool:
    """Return whether some of a page may be computed by a draft model: a pool of its own, or layers
    of it behind those of the model. A pool with layers that does not say how many of them are the
    model's (DeepSeek-V4's, QSA's) may have them."""
    layers = getattr(pool, "layer_num", None)
    return (
        name.startswith(DRAFT)
        or bool(getattr(pool, "mtp_draft_buffer_infos", ()))
        or (bool(layers) and getattr(pool, "target_layer_num", None) != layers)
    )


def page_namespaces(
    storage: HiCacheStorageConfig,
    pool: HostKVCache,
    config: ConnectorSettings,
    engine: Mapping[str, Field],
    interface: str,
    *,
    name: str = KV,
    sizes_bytes: Sequence[int] = (),
) -> list[Namespace]:
    """Return everything that must match for a page, or each of its pieces (`head_groups`), to be
    reusable; SGLang's hash covers the tokens, the LoRA and the salt alone.

    `storage` is its HiCacheStorageConfig and `pool` the host pool `name`. `engine` has what only
    the process knows: version, weights, overrides, dtypes. `interface` ("v1" or "flat") decides the
    order of the bytes in a page, whose parts have `sizes_bytes`. Raises `UsageError` for what
    cannot be told apart from something else.
    """
    if getattr(storage, "dcp_size", 1) != 1:
        raise UsageError("dcp_size", storage.dcp_size, "must be 1: sequence shards are not stored")
    pieces = head_groups(storage, pool, interface)
    # The KV of such a model is the same on every rank of a tensor-parallel group,
    # and only one of them saves it. Not so what a pool beside it keeps of its own heads.
    replicated = bool(storage.is_mla_model) and (name == KV or not _has_heads(pool, name))
    rank, size = (0, 1) if replicated else (int(storage.tp_rank), int(storage.tp_size))
    fields: dict[str, Field] = {
        **engine,
        "engine": "sglang",
        "page_version": PAGE_VERSION,
        "interface": interface,
        "weights": f"id {config.weights_id}" if config.weights_id else engine["weights"],
        "dtype": str(pool.dtype),
        "pool": type(pool).__name__,
        "page_format": getattr(pool, "storage_format_tag", None),
        "layout": str(pool.layout),
        "page_tokens": int(pool.page_size),
        "tp_rank": rank,
        "tp_size": size,
        "pp_rank": int(storage.pp_rank),
        "pp_size": int(storage.pp_size),
        "cp_rank": int(storage.attn_cp_rank),
        "cp_size": int(storage.attn_cp_size),
    }
    for number in _POOL_NUMBERS:
        value = getattr(pool, number, None)
        fields[number] = None if value is None else int(value)
    if name != KV:
        fields |= {"pool_name": name, "sizes_bytes": " ".join(map(str, sizes_bytes))}
        fields |= {shape: str(getattr(pool, shape, None)) for shape in _POOL_SHAPES}
        fields["dtypes"] = " ".join(
            f"{attribute}={value}"
            for attribute, value in sorted(vars(pool).items())
            if type(value).__name__ == "dtype"
        )
        fields["device"] = _device_form(pool)
    fields |= config.life
    if pieces > 1:
        fields |= {n: None if v is None else v // pieces for n, v in _numbers(fields).items()}
    return [
        Namespace(
            {**fields, "tp_rank": rank * pieces + piece, "tp_size": size * pieces},
            salt=tenant_salt(),
        )
        for piece in range(pieces)
    ]


def _numbers(fields: Mapping[str, Field]) -> dict[str, int | None]:
    values = {name: fields[name] for name in _OF_ALL_HEADS}
    return {name: value if isinstance(value, int) else None for name, value in values.items()}


def _device_form(pool: object) -> str:
    """Return what the pool's own numbers leave open where its pages are rows of bytes: how the
    engine reads a row. A ring of states of half the size and twice the length is as large."""
    forms = {f"{rows.dtype}{list(rows.shape[1:])}" for rows in getattr(pool, "device_buffers", ())}
    forms |= {
        f"{states.kv_score_buffer.kv_score.dtype} ring {states.ring_size}"
        for states in getattr(pool, "state_pools", ())
    }
    return " ".join(sorted(forms))


def _has_heads(pool: object, name: str) -> bool:
    """Return whether ranks of a tensor-parallel group have different bytes in such a pool."""
    latent = getattr(pool, "kv_lora_rank", None) is not None
    return name == MAMBA or (getattr(pool, "head_num", None) is not None and not latent)
