"""Every kind of host pool that SGLang has: how to make one, or why no storage is handed it."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_pools import (
    HEAD_DIM,
    HEADS,
    INDEXER_PAGE_TOKENS,
    LAYERS,
    PAGE_TOKENS,
    PAGES,
    indexer_pool,
    mamba_pool,
    mha_pool,
    mla_pool,
)

ROOT_CLASS = "HostKVCache"
STATE_RING = 8


def asymmetric(layout: str) -> Any:
    """Return a pool whose values have half the width of its keys (MiMo-V2)."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls

    device = MHATokenToKVPool(
        size=PAGES * PAGE_TOKENS,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        head_num=HEADS,
        head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM // 2,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    info = device._mha_buffer_info()
    return get_mha_host_pool_cls(info)(
        info,
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=PAGE_TOKENS,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=device.size,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
    )


def keys_only(layout: str) -> Any:
    """Return the index keys of MiniMax's sparse attention."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKOnlyPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost

    device = MHATokenToKOnlyPool(
        size=PAGES * PAGE_TOKENS,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        head_num=1,
        head_dim=HEAD_DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    return MHATokenToKOnlyPoolHost(device, mha_pool(layout), layout, pin_memory=False)


def compressed(layout: str, dtype: str = "uint8", item_bytes: int = 48) -> Any:
    """Return rows of several tokens each, as DeepSeek-V4 keeps them."""
    import torch
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool

    kind = getattr(torch, dtype)
    rows = [torch.zeros(PAGES, item_bytes // kind.itemsize, dtype=kind) for _ in range(LAYERS)]
    return DeepSeekV4PagedHostPool(
        "deepseek_v4_c4",
        rows,
        item_bytes=item_bytes,
        num_host_pages=PAGES,
        slot_page_size=PAGE_TOKENS,
        layout=layout,
        pin_memory=False,
    )


def states(layout: str, dtype: str = "float32", ring: int = STATE_RING) -> Any:
    """Return the states of DeepSeek-V4's compressors, a ring of them a page."""
    import torch
    from sglang.srt.mem_cache.deepseek_v4_compress_state import CompressStatePool
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4StateHostPool

    device = [
        CompressStatePool(
            size=PAGES * ring,
            ring_size=ring,
            overlap=True,
            head_dim=4,
            dtype=getattr(torch, dtype),
            device="cpu",
            enable_memory_saver=False,
            ratio=4,
        )
        for _ in range(LAYERS)
    ]
    return DeepSeekV4StateHostPool(
        "deepseek_v4_c4_state",
        device,
        num_host_pages=PAGES,
        swa_page_size=PAGE_TOKENS,
        layout=layout,
        pin_memory=False,
    )


def compressed_index(layout: str) -> Any:
    """Return QSA's compressed index keys beside a KV pool."""
    import torch
    from sglang.srt.mem_cache.pool_host.qsa import QSAIndexerPoolHost

    ratio = 4
    keys = [
        torch.zeros(PAGES * PAGE_TOKENS // ratio, 6, dtype=torch.bfloat16) for _ in range(LAYERS)
    ]
    device = SimpleNamespace(qsa_compress_ratio=ratio, qsa_compressed_k_buffer_pool=keys)
    return QSAIndexerPoolHost(device, mha_pool(layout))


def page_rows(layout: str) -> tuple[Any, Any]:
    """Return MiniMax's KV in NVFP4 and its index keys, payload and scales in one row a page."""
    import torch
    from sglang.srt.mem_cache.device_pool_info import PageRowBufferInfo
    from sglang.srt.mem_cache.pool_host import minimax_m3_nvfp4 as nvfp4

    slab = torch.zeros(LAYERS, PAGES, 72, dtype=torch.uint8)
    info = PageRowBufferInfo(
        slab=slab, rows=tuple(slab), row_bytes=72, page_size=PAGE_TOKENS, num_pages=PAGES
    )
    layers = {"start_layer": 0, "end_layer": LAYERS}
    main = nvfp4.MiniMaxM3Nvfp4MainKVPoolHost(
        info,
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=PAGE_TOKENS,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=PAGES * PAGE_TOKENS,
        **layers,
    )
    return main, nvfp4.MiniMaxM3Nvfp4IndexKPoolHost(info, main, layout, pin_memory=False, **layers)


def counted_only(layout: str) -> Any:
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

    return LogicalHostPool(PAGES * PAGE_TOKENS, PAGE_TOKENS, layout=layout)


STORED = {
    "AsymmetricMHATokenToKVPoolHost": asymmetric,
    "DSAIndexerPoolHost": lambda layout: indexer_pool(
        mla_pool(layout, INDEXER_PAGE_TOKENS), layout
    ),
    "DeepSeekV4PagedHostPool": compressed,
    "DeepSeekV4StateHostPool": states,
    "LogicalHostPool": counted_only,
    "MHATokenToKOnlyPoolHost": keys_only,
    "MHATokenToKVPoolHost": mha_pool,
    "MLATokenToKVPoolHost": mla_pool,
    "MambaPoolHost": lambda layout: mamba_pool(),
    "MiniMaxM3Nvfp4IndexKPoolHost": lambda layout: page_rows(layout)[1],
    "MiniMaxM3Nvfp4MainKVPoolHost": lambda layout: page_rows(layout)[0],
    "QSAIndexerPoolHost": compressed_index,
}
"""How to make one of each kind in a memory layout."""


def without_storage_pages() -> Any:
    """Return a pool of MXFP8 as far as it can be made without a GPU: its pages are never asked
    for."""
    from sglang.srt.mem_cache.pool_host.mha_mxfp8 import MHATokenToKVPoolMXFP8Host

    pool = MHATokenToKVPoolMXFP8Host.__new__(MHATokenToKVPoolMXFP8Host)
    pool.page_size, pool.layout, pool.dtype = PAGE_TOKENS, "page_first", "torch.float8_e4m3fn"
    return pool


def sharded() -> Any:
    """Return a pool of which every rank has every other page."""
    from sglang.srt.mem_cache.page_interleave import PageInterleavePlacement, PageShardSpec
    from sglang.srt.mem_cache.pool_host.page_interleave import PageInterleaveHostPool

    spec = PageShardSpec(
        shard_rank=0,
        shard_size=2,
        page_size=PAGE_TOKENS,
        max_prefix_tokens=0,
        chunk_tokens=0,
    )
    return PageInterleaveHostPool(mha_pool(), PageInterleavePlacement(spec))


REFUSED = {
    "MHATokenToKVPoolMXFP8Host": without_storage_pages,
    "PageInterleaveHostPool": sharded,
}
NEVER_HANDED = {
    "HiSparseMHATokenToKVPoolHost": "of SGLang's HiSparse alone, which moves its pages itself",
    "UnifiedPageEnvelopeHostPool": "SGLang hands it to its backend `mori` alone",
}


def kinds() -> set[str]:
    """Return the names of all classes of host pools in SGLang's source."""
    import sglang.srt.mem_cache as package

    (folder,) = package.__path__
    bases: dict[str, set[str]] = {}
    for path in Path(folder).rglob("*.py"):
        if "storage" in path.relative_to(folder).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(base).split(".")[-1] for base in node.bases}
    found = {name for name in bases if name.endswith(("HostPool", "PoolHost"))}
    found |= {ROOT_CLASS}
    while more := {name for name, its in bases.items() if its & found} - found:
        found |= more
    return found - {ROOT_CLASS}


def page_bytes(pool: Any, page: int) -> bytes:
    """Return a page as SGLang flattens it, or, where it does not, K's and V's of it."""
    import torch

    index = page * pool.page_size
    try:
        parts = [pool.get_data_page(index)]
    except NotImplementedError:
        of = slice(index, index + pool.page_size) if pool.layout == "page_first" else page
        parts = [pool.k_buffer[of], pool.v_buffer[of]]
    return b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
