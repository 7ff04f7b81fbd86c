"""Makes the copiers for the KV that an engine registered, wherever it lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from connector.copiers.base import KVCopier, KVMemory
from connector.copiers.host import HostCopier
from connector.copiers.mixed import MixedCopier
from connector.limits import PAGE_LOCK_BYTES_MAX
from kvstore import UsageError
from kvstore.spi import PoolMapping

if TYPE_CHECKING:
    import torch

    from connector.layout.geometry import KVGeometry


def kv_memory(
    groups: Sequence[tuple[Mapping[str, torch.Tensor], KVGeometry]],
    block_tokens: int,
    mappings: Callable[[], Sequence[PoolMapping]] = tuple,
    count: Callable[[int, str], None] = lambda size_bytes, failure: None,
    page_lock_bytes_max: int = PAGE_LOCK_BYTES_MAX,
) -> KVMemory:
    """Return copiers over layer tensors, each a strided `[B, H, N, C]` view, all on one device.

    N may be a part of the engine's block (kernel blocks): B is then as many
    times larger. `mappings` says where the store's memory is, and `count` is told of
    bytes that were page-locked for the device, or could not be and why; at most
    `page_lock_bytes_max` are. Raises `UsageError` when the tensors do not have the shape the
    namespace was made from.
    """
    checked = []
    for kv_caches, geometry in groups:
        layers = list(kv_caches.values())
        if geometry.folded_heads > 1:
            layers = [folded(layer, geometry) for layer in layers]
        for some, own in _runs(layers, geometry):
            # Copiers know slots, of which an engine's blocks and a store's have so many.
            slots = own.payload_slots(block_tokens)
            pages = replace(
                own,
                engine_block_tokens=own.payload_slots(own.engine_block_tokens),
                tokens_per_slot=Fraction(1),
            )
            _check(some, pages)
            checked.append((some, pages, slots))
    memory = _copiers(checked, mappings, count, page_lock_bytes_max)
    copiers, by_group = iter(memory.groups), list[KVCopier]()
    for _, geometry in groups:
        runs = [next(copiers) for _ in geometry.runs or (geometry,)]
        by_group.append(MixedCopier(runs, geometry, block_tokens) if geometry.runs else runs[0])
    return memory._replace(groups=by_group)


def folded(layer: torch.Tensor, geometry: KVGeometry) -> torch.Tensor:
    """Return `[B, 1, N, H * C]` of a layer's `[B, H, N, C]` over the same memory. Raises
    `UsageError` where its strides do not allow it."""
    shape = tuple(layer.shape)
    if len(shape) == 4 and shape[1] == geometry.folded_heads:
        blocks, heads, tokens, channels = shape
        with suppress(RuntimeError):  # torch's, for strides that are none of that view
            return layer.transpose(1, 2).view(blocks, 1, tokens, heads * channels)
    raise UsageError(
        "payload_order",
        "tokens",
        f"must be heads where the {geometry.folded_heads} heads of a token do not lie side by side "
        f"in the engine's memory, as in vLLM's layout LBNHC: {shape} lie {layer.stride()} apart",
    )


def _runs(
    layers: Sequence[torch.Tensor], geometry: KVGeometry
) -> Iterator[tuple[list[torch.Tensor], KVGeometry]]:
    """Yield layers of one shape each, with their own geometry."""
    if not geometry.runs:
        yield list(layers), geometry
        return
    if len(layers) != geometry.layers:
        raise UsageError("kv_caches", len(layers), f"must have {geometry.layers} layers")
    for run in geometry.runs:
        own = replace(
            geometry,
            layers=len(run.layers),
            heads=run.heads,
            channel_bytes=run.channel_bytes,
            tokens_per_slot=run.tokens_per_slot,
            runs=(),
        )
        yield [layers[i] for i in run.layers], own


def _copiers(
    checked: Sequence[tuple[list[torch.Tensor], KVGeometry, int]],
    mappings: Callable[[], Sequence[PoolMapping]],
    count: Callable[[int, str], None],
    page_lock_bytes_max: int,
) -> KVMemory:
    if all(layer.device.type == "cpu" for layers, _, _ in checked for layer in layers):
        return KVMemory([HostCopier(*group) for group in checked], lambda: None)
    from connector.copiers.cuda.start import device_memory  # torch and cuda-python

    return device_memory(checked, mappings, count, page_lock_bytes_max)


def _check(layers: Sequence[torch.Tensor], geometry: KVGeometry) -> None:
    if len(layers) != geometry.layers:
        raise UsageError("kv_caches", len(layers), f"must have {geometry.layers} layers")
    for layer in layers:
        shape = tuple(layer.shape)
        if (
            len(shape) != 4
            or shape[1] != geometry.heads
            or geometry.engine_block_tokens % shape[2]
            or shape[3] * layer.element_size() != geometry.channel_bytes
            or layer.stride(3) != 1
        ):
            raise UsageError(
                "kv_caches",
                (shape, str(layer.dtype)),
                f"must be [blocks, {geometry.heads} heads, tokens dividing "
                f"{geometry.engine_block_tokens}, {geometry.channel_bytes} bytes]",
            )
