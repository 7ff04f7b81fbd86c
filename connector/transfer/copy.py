"""Copies blocks between two paged KV caches of one process. Imports torch when it is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from connector.limits import COPY_BLOCKS_MAX
from kvstore import UsageError

if TYPE_CHECKING:
    import torch

CopyDirection = Literal["h2d", "d2h", "d2d"]
BlockLayout = Literal["NHD", "HND"]

_PLACES = {"h2d": ("cpu", None), "d2h": (None, "cpu"), "d2d": (None, None)}
"""Device type that source and target must have; None: any, because the device may be the CPU."""


def copy_kv_blocks(
    src_kv_caches: Mapping[str, torch.Tensor],
    dst_kv_caches: Mapping[str, torch.Tensor],
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    direction: CopyDirection,
    *,
    src_layout: BlockLayout = "NHD",
    dst_layout: BlockLayout = "NHD",
    block_dim: int = 0,
) -> None:
    """Copy block `src_block_ids[i]` of every layer to block `dst_block_ids[i]`, for all i.

    Caches map layer names to tensors of one dtype whose dimension `block_dim` counts blocks and
    whose last three are tokens, heads, channels ("NHD") or heads, tokens, channels ("HND"); with
    three in all (MLA) they are blocks, tokens, channels. Both caches have the same layers and, in
    one layout, the same blocks. Strides do not matter. All blocks are read before the first is
    written, layer by layer, so a cache may be copied within itself.

    "h2d": from CPU memory to the device; "d2h": to CPU memory; "d2d": on the
    device. d2h returns when the bytes are there; the others may still run on the
    device's current stream, where what follows them sees their result.

    Raises `UsageError` for ids out of range or written twice, lists of different
    lengths, and tensors that do not fit each other; then nothing was written.
    """
    if direction not in _PLACES:
        raise UsageError("direction", direction, "must be one of h2d, d2h, d2d")
    for name, layout in (("src_layout", src_layout), ("dst_layout", dst_layout)):
        if layout not in ("NHD", "HND"):
            raise UsageError(name, layout, "must be NHD or HND")
    if len(src_block_ids) != len(dst_block_ids):
        raise UsageError(
            "dst_block_ids",
            f"{len(dst_block_ids)} ids",
            f"must be as many as the {len(src_block_ids)} of src_block_ids",
        )
    if set(src_kv_caches) != set(dst_kv_caches):
        names = sorted(set(src_kv_caches) ^ set(dst_kv_caches))
        raise UsageError("dst_kv_caches", names, "both caches must have the same layers")
    swap = src_layout != dst_layout
    for name, src in src_kv_caches.items():
        _check_layer(name, src, dst_kv_caches[name], direction, swap, block_dim)
        _check_ids("src_block_ids", src_block_ids, src.shape[block_dim])
        _check_ids("dst_block_ids", dst_block_ids, dst_kv_caches[name].shape[block_dim])
    if len(set(dst_block_ids)) != len(dst_block_ids):
        raise UsageError("dst_block_ids", dst_block_ids, "must not name a block twice")
    if not src_block_ids:
        return
    for name, src in src_kv_caches.items():
        _copy_layer(src, dst_kv_caches[name], src_block_ids, dst_block_ids, swap, block_dim)


def _check_layer(
    name: str,
    src: torch.Tensor,
    dst: torch.Tensor,
    direction: CopyDirection,
    swap: bool,
    block_dim: int,
) -> None:
    if src.dtype != dst.dtype:
        raise UsageError(f"dst_kv_caches[{name!r}]", str(dst.dtype), f"must be {src.dtype}")
    if not 0 <= block_dim < max(src.dim() - 3, int(src.dim() == 3)):
        raise UsageError("block_dim", block_dim, f"must be from 0 to {max(0, src.dim() - 4)}")
    shape = list(src.shape)
    if swap and src.dim() > 3:
        shape[-2], shape[-3] = shape[-3], shape[-2]
    shape[block_dim] = dst.shape[block_dim] if dst.dim() == src.dim() else -1
    if shape != list(dst.shape):
        raise UsageError(
            f"dst_kv_caches[{name!r}]",
            tuple(dst.shape),
            f"must have blocks like the source's {tuple(src.shape)}",
        )
    for field, tensor, place in zip(("src", "dst"), (src, dst), _PLACES[direction], strict=True):
        if place is not None and tensor.device.type != place:
            raise UsageError(
                f"{field}_kv_caches[{name!r}]",
                str(tensor.device),
                f"must be in CPU memory for {direction}",
            )


def _check_ids(field: str, ids: Sequence[int], blocks: int) -> None:
    if len(ids) > COPY_BLOCKS_MAX:
        raise UsageError(field, f"{len(ids)} ids", f"at most {COPY_BLOCKS_MAX}")
    for block_id in ids:
        if isinstance(block_id, bool) or not isinstance(block_id, int):
            raise UsageError(field, block_id, "must be whole numbers")
        if not 0 <= block_id < blocks:
            raise UsageError(field, block_id, f"must be from 0 to {blocks - 1}")


def _copy_layer(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    swap: bool,
    block_dim: int,
) -> None:
    import torch

    # As plain integers: index_copy knows no fp8, and no dtype's bytes may change.
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    raw = integers[src.element_size()]
    src, dst = src.view(raw), dst.view(raw)
    blocks = src.index_select(block_dim, torch.tensor(src_block_ids, device=src.device))
    if swap and src.dim() > 3:
        blocks = blocks.transpose(-2, -3)
    dst.index_copy_(
        block_dim, torch.tensor(dst_block_ids, device=dst.device), blocks.to(dst.device)
    )
