"""Reads SGLang's storage configuration and host pool: settings, and the fields of the namespace.

It looks at attributes only and imports no SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from connector.layout.geometry import Field
from connector.settings import STORE_SETTINGS, ConnectorSettings
from kvstore import Namespace, UsageError, tenant_salt

LOADER_NAMES = ("backend_name", "module_path", "class_name", "interface_v1")
"""What SGLang itself reads of the extra configuration and leaves in it."""
PAGE_VERSION = 1
"""Grows when the same fields come to mean other bytes."""

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
)
"""Of the host pool; those that a kind of pool does not have are null in the namespace."""


def settings(extra: Mapping[str, Any] | None) -> ConnectorSettings:
    """Ours of `--hicache-storage-backend-extra-config`. Raises `UsageError` for unknown ones."""
    ours = {name: value for name, value in (extra or {}).items() if name not in LOADER_NAMES}
    where = "hicache_storage_backend_extra_config"
    return ConnectorSettings.from_extra(ours, where=where, only=STORE_SETTINGS)


def page_namespace(
    storage: Any,
    pool: Any,
    config: ConnectorSettings,
    engine: Mapping[str, Field],
    interface: str,
) -> Namespace:
    """Everything that must match for a page to be reusable; SGLang's hash covers the tokens alone.

    `storage` is its HiCacheStorageConfig and `pool` the host pool. `engine` has
    what only the process knows: version, weights, overrides, dtypes. `interface`
    ("v1" or "flat") decides the order of the bytes in a page. Raises
    `UsageError` for what cannot be told apart from something else.
    """
    if getattr(storage, "dcp_size", 1) != 1:
        raise UsageError("dcp_size", storage.dcp_size, "must be 1: sequence shards are not stored")
    # The KV of such a model is the same on every rank of a tensor-parallel group,
    # and only one of them saves it.
    replicated = bool(storage.is_mla_model)
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
        "tp_rank": 0 if replicated else int(storage.tp_rank),
        "tp_size": 1 if replicated else int(storage.tp_size),
        "pp_rank": int(storage.pp_rank),
        "pp_size": int(storage.pp_size),
        "cp_rank": int(storage.attn_cp_rank),
        "cp_size": int(storage.attn_cp_size),
    }
    for name in _POOL_NUMBERS:
        value = getattr(pool, name, None)
        fields[name] = None if value is None else int(value)
    fields |= config.life
    return Namespace(fields, salt=tenant_salt())
