"""SGLang's own host pools, filled with random bytes, and our backend as SGLang makes it."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stores import NodeProcess

PAGE_TOKENS = 16
LAYERS, HEADS, HEAD_DIM = 3, 2, 8
PAGES = 6
INDEXER_PAGE_TOKENS = 64
"""The only size that there is of them."""


def storage_config(node: NodeProcess, **changes: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    ours = changes.pop("ours", {})
    extra = {
        "backend_name": "kvstore",
        "module_path": "connector.adapters.sglang",
        "class_name": "KVStoreHiCache",
        "interface_v1": 1,
        **node.engine_settings,
        "weights_id": "tiny",
        **ours,
    }
    plain = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": False,
        "model_name": "tiny",
    }
    return HiCacheStorageConfig(**{**plain, **changes}, extra_config=extra)


def backend(node: NodeProcess, pool: Any, **changes: Any) -> Any:
    """As SGLang's controller makes it from its command line."""
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    made = StorageBackendFactory.create_backend("dynamic", storage_config(node, **changes), pool)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    return made


def mha_pool(
    layout: str = "page_first",
    dtype: str = "bfloat16",
    head_dim: int = HEAD_DIM,
    heads: int = HEADS,
) -> Any:
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    device = MHATokenToKVPool(
        size=PAGES * PAGE_TOKENS,
        page_size=PAGE_TOKENS,
        dtype=getattr(torch, dtype),
        head_num=heads,
        head_dim=head_dim,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    return MHATokenToKVPoolHost(
        device._mha_buffer_info(),
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=PAGE_TOKENS,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=device.size,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
    )


def mla_pool(layout: str = "page_first", page_tokens: int = PAGE_TOKENS) -> Any:
    import torch
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    device = MLATokenToKVPool(
        size=PAGES * page_tokens,
        page_size=page_tokens,
        dtype=torch.bfloat16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    return MLATokenToKVPoolHost(
        device._mla_buffer_info(),
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=page_tokens,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=device.size,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
        target_layer_num=device.layer_num,
        override_kv_cache_dim=device.kv_cache_dim,
    )


def randomize(pool: Any) -> None:
    import torch

    flat = pool.kv_buffer.view(torch.uint8)
    flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8))


def page_bytes(pool: Any, indices: Any) -> list[bytes]:
    """Every page as SGLang itself flattens it."""
    import torch

    return [
        pool.get_data_page(indices[i]).contiguous().view(torch.uint8).numpy().tobytes()
        for i in range(0, len(indices), PAGE_TOKENS)
    ]


def bits(page: Any) -> Any:
    """A tensor that compares: random KV has NaNs."""
    import torch

    return page.contiguous().view(torch.uint8)


def hashes(count: int) -> list[str]:
    return [hashlib.sha256(os.urandom(8)).hexdigest() for _ in range(count)]


def slots(pool: Any, *pages: int) -> Any:
    import torch

    size = pool.page_size
    return torch.cat([torch.arange(p * size, (p + 1) * size) for p in pages])


def mamba_pool() -> Any:
    """Return states of two recurrent layers; a page of it is one state."""
    import torch
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    info = MambaStateBufferInfo(
        temporal=torch.zeros(2, PAGES, 4, 8, dtype=torch.float32),
        conv=(torch.zeros(2, PAGES, 6, 3, dtype=torch.bfloat16),),
    )
    return MambaPoolHost(
        info,
        host_to_device_ratio=2.0,
        host_size=0,
        device_capacity=PAGES,
        pin_memory=False,
        layout="page_first",
    )


def indexer_pool(anchor: Any, layout: str = "page_first") -> Any:
    """Return the index keys of sparse attention, beside an MLA pool."""
    import torch
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl

    device = DSATokenToKVPool(
        size=PAGES * INDEXER_PAGE_TOKENS,
        page_size=INDEXER_PAGE_TOKENS,
        kv_lora_rank=16,
        dtype=torch.bfloat16,
        qk_rope_head_dim=8,
        layer_num=LAYERS,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=24,
        index_buf_size=PAGES * INDEXER_PAGE_TOKENS,
    )
    return DSAIndexerPoolHost(make_dsa_indexer_pool_decl(device), anchor, pin_memory=False)


def fill(pool: Any) -> None:
    """Random bytes in all memory of a pool, of whatever kind."""
    import torch

    names = ("kv_buffer", "k_buffer", "index_k_with_scale_buffer", "temporal_buffer", "conv_buffer")
    for name in names:
        value = getattr(pool, name, None)
        buffers = value if isinstance(value, list | tuple) else [value]
        for buffer in buffers:
            if isinstance(buffer, torch.Tensor):
                flat = buffer.view(torch.uint8)
                flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8))


def states(pool: Any, indices: Any) -> list[bytes]:
    """Each page as SGLang itself flattens it."""
    import torch

    step = pool.page_size
    return [
        pool.get_data_page(int(indices[i])).contiguous().view(torch.uint8).numpy().tobytes()
        for i in range(0, len(indices), step)
    ]
