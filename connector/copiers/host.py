"""Copies KV in host memory by numpy, which is imported when tensors are registered."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from connector.copiers.base import Gather, HeadPart, Ready, Scatter

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from connector.layout.geometry import KVGeometry


class HostCopier:
    """Implements `KVCopier` over host memory by numpy.

    Measured on one core: 25 GB/s with one strided copy per engine block over
    all layers, 16 GB/s layer by layer, 7 to 10 GB/s with torch's index_select
    and index_copy, which also start an OpenMP team in the helper thread that
    competes with the model's (and an engine may have disabled
    `torch.set_num_threads`). numpy drops the GIL during the copy.
    """

    batch_blocks = 1

    def __init__(
        self, layers: Sequence[torch.Tensor], geometry: KVGeometry, block_tokens: int
    ) -> None:
        import numpy as np

        self._np = np
        self._layers = list(layers)  # keeps the memory alive
        self._kernel_tokens = int(layers[0].shape[2])
        self._split = geometry.engine_block_tokens // self._kernel_tokens
        word = next(size for size in (8, 4, 2, 1) if geometry.channel_bytes % size == 0)
        self._word = np.dtype(f"u{word}")
        self._payload_shape = (
            geometry.layers,
            geometry.heads,
            block_tokens // self._kernel_tokens,
            self._kernel_tokens,
            geometry.channel_bytes // word,
        )
        self._runs = [
            (first, count, self._view(first, count)) for first, count in _layer_runs(layers)
        ]
        self._single = [[(layer, 1, self._view(layer, 1))] for layer in range(len(layers))]

    def _view(self, first: int, count: int) -> npt.NDArray[np.generic]:
        """Return `[layer, block, head, token, C]` over `count` layers a constant distance apart."""
        layer = self._layers[first]
        size = layer.element_size()
        step = self._layers[first + 1].data_ptr() - layer.data_ptr() if count > 1 else 0
        strides = (step, *(stride * size for stride in layer.stride()[:3]), self._word.itemsize)
        shape = (count, *layer.shape[:3], self._payload_shape[4])
        span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + self._word.itemsize
        raw = (ctypes.c_uint8 * span).from_address(layer.data_ptr())
        return self._np.ndarray(shape, self._word, buffer=raw, strides=strides)

    def _kernel_ids(self, block_ids: Sequence[int]) -> Sequence[int]:
        if self._split == 1:
            return block_ids
        return [b * self._split + i for b in block_ids for i in range(self._split)]

    def _runs_of(self, layer: int | None) -> Sequence[tuple[int, int, npt.NDArray[np.generic]]]:
        return self._runs if layer is None else self._single[layer]

    def gather_many(self, items: Sequence[Gather], layer: int | None = None) -> None:
        for item in items:
            self._gather(*item, layer)

    def scatter_many(self, items: Sequence[Scatter], layer: int | None = None) -> None:
        for item in items:
            self._scatter(*item, layer)

    def _gather(self, block_ids: Sequence[int], out: Any, layer: int | None) -> None:
        payload = self._np.frombuffer(out, self._word).reshape(self._payload_shape)
        for first, count, view in self._runs_of(layer):
            part = payload[first : first + count]
            for i, block_id in enumerate(self._kernel_ids(block_ids)):
                part[:, :, i] = view[:, block_id]

    def _scatter(
        self,
        payload: Any,
        skip: int,
        block_ids: Sequence[int],
        part: HeadPart | None,
        layer: int | None,
    ) -> None:
        layers, heads, *rest = self._payload_shape
        take = part or HeadPart(heads, 0, 0, heads)
        whole = self._np.frombuffer(payload, self._word)
        source = whole.reshape((layers, take.payload_heads, *rest))
        taken = slice(take.source, take.source + take.heads)
        given = slice(take.target, take.target + take.heads)
        for first, count, view in self._runs_of(layer):
            blocks = source[first : first + count, taken]
            for i, block_id in enumerate(self._kernel_ids(block_ids), skip * self._split):
                view[:, block_id, given] = blocks[:, :, i]

    def mark_ready(self) -> None:
        return None

    def wait_ready(self, token: Ready | None) -> None:
        return None


def _layer_runs(layers: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return (first, count) of maximal runs of layers alike and a constant distance apart.

    Engines lay all layers out in one allocation, so that usually one run covers all of them and one
    copy moves a block of every layer.
    """
    runs: list[tuple[int, int]] = []
    first = 0
    for i in range(1, len(layers) + 1):
        if i < len(layers) and _continues(layers, first, i):
            continue
        runs.append((first, i - first))
        first = i
    return runs


def _continues(layers: Sequence[torch.Tensor], first: int, i: int) -> bool:
    a, b = layers[first], layers[i]
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    if a.shape != b.shape or a.stride() != b.stride():
        return False
    step = int(layers[first + 1].data_ptr() - a.data_ptr())
    return step > 0 and int(b.data_ptr() - a.data_ptr()) == step * (i - first)
