"""Copies between SGLang's pools of the "device" and of the host, where both are host memory.

On GPUs they are kernels of `sgl_kernel`, one for each memory layout and direction, with these
names and parameters. Here each moves the same bytes, row by row. A row is one layer of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import memmove
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Place = Callable[[int], int]
"""The address of a token's row."""


def _at(base: int, stride: int) -> Place:
    return lambda token: base + token * stride


def _at_head(base: int, stride: int, page_size: int, heads: int, head: int) -> Place:
    """Of one head, where a page has a token's heads apart. `stride` is of a token in all layers."""
    each = stride // heads
    return lambda token: (
        base
        + token // page_size * page_size * stride
        + (head * page_size + token % page_size) * each
    )


def _move(
    source: Place, target: Place, src_indices: torch.Tensor, dst_indices: torch.Tensor, size: int
) -> None:
    for i, j in zip(src_indices.tolist(), dst_indices.tolist(), strict=True):
        memmove(target(j), source(i), size)


def transfer_kv_per_layer_mla(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
) -> None:
    source, target = _at(src.data_ptr(), item_size), _at(dst.data_ptr(), item_size)
    _move(source, target, src_indices, dst_indices, item_size)


def transfer_kv_per_layer(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
) -> None:
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla(src, dst, src_indices, dst_indices, item_size)


def transfer_kv_per_layer_mla_pf_lf(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    source = _at(src.data_ptr() + layer_id * item_size, src_layout_dim)
    _move(source, _at(dst.data_ptr(), item_size), src_indices, dst_indices, item_size)


def transfer_kv_per_layer_pf_lf(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla_pf_lf(
            src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim
        )


def transfer_kv_per_layer_ph_lf(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
) -> None:
    each = item_size // head_num
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        base = src.data_ptr() + layer_id * each
        for head in range(head_num):
            source = _at_head(base, src_layout_dim, page_size, head_num, head)
            target = _at(dst.data_ptr() + head * each, item_size)
            _move(source, target, src_indices, dst_indices, each)


def transfer_kv_all_layer_mla(
    src_layers: torch.Tensor,
    dst_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
) -> None:
    """Layers are addresses."""
    for source, target in zip(src_layers.tolist(), dst_layers.tolist(), strict=True):
        _move(_at(source, item_size), _at(target, item_size), src_indices, dst_indices, item_size)


def transfer_kv_all_layer(
    src_k_layers: torch.Tensor,
    dst_k_layers: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
) -> None:
    for src, dst in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        transfer_kv_all_layer_mla(src, dst, src_indices, dst_indices, item_size, num_layers)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    for layer, source in enumerate(src_layers.tolist()):
        target = _at(dst.data_ptr() + layer * item_size, dst_layout_dim)
        _move(_at(source, item_size), target, src_indices, dst_indices, item_size)


def transfer_kv_all_layer_lf_pf(
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    for src, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        transfer_kv_all_layer_mla_lf_pf(
            src, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
        )


def transfer_kv_all_layer_lf_ph(
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
) -> None:
    each = item_size // head_num
    for src, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer, address in enumerate(src.tolist()):
            base = dst.data_ptr() + layer * each
            for head in range(head_num):
                target = _at_head(base, dst_layout_dim, page_size, head_num, head)
                source = _at(address + head * each, item_size)
                _move(source, target, src_indices, dst_indices, each)


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices].to(target.dtype)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy pages of all layers, first all of K, then of V, into the pool of the host."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for source, target in zip(
        src_indices[::page_size].tolist(), dst_indices[::page_size].tolist(), strict=True
    ):
        for i, layer in enumerate(src_ptrs):
            page = dst_ptrs[i // layers][target // page_size]
            page[i % layers].copy_(layer[source : source + page_size])


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer of pages, K and V, out of the pool of the host."""
    for source, target in zip(
        src_indices[::page_size].tolist(), dst_indices[::page_size].tolist(), strict=True
    ):
        for pages, layer in zip(src_ptrs, dst_ptrs, strict=True):
            layer[target : target + page_size].copy_(pages[source // page_size][layer_id])


def install(*pools: ModuleType) -> None:
    """Give these modules of SGLang's host pools all the copies."""
    for name, function in list(globals().items()):
        if name.startswith("transfer_kv_"):
            for pool in pools:
                setattr(pool, name, function)
