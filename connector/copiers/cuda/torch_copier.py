"""Copies KV on a device by torch alone, which, like numpy, is imported for tensors it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from connector.copiers.base import Gather, HeadPart, Ready, Scatter

if TYPE_CHECKING:
    import torch

    from connector.layout.geometry import KVGeometry


class TorchCopier:
    """Implements `KVCopier` where no kernel can be compiled: a stream of its own, staging
    through one pinned host block, payload after payload.

    Every call returns only when the bytes are where they belong: the caller's
    copy guard (nobody writes after having reported) needs that. Used by two threads,
    one that gathers and one that scatters: each has its own staging.
    """

    batch_blocks = 1

    def __init__(
        self, layers: Sequence[torch.Tensor], geometry: KVGeometry, block_tokens: int
    ) -> None:
        import numpy as np
        import torch

        self._torch = torch
        self._np = np
        self._device = layers[0].device
        # Raw bytes: the store moves KV of any dtype without knowing it.
        self._layers = [layer.view(torch.uint8) for layer in layers]
        kernel_tokens = int(layers[0].shape[2])
        self._split = geometry.engine_block_tokens // kernel_tokens
        shape = (
            geometry.layers,
            geometry.heads,
            block_tokens // kernel_tokens,
            kernel_tokens,
            geometry.channel_bytes,
        )
        self._saved, self._loaded = (
            torch.empty(shape, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        )
        self._save_stream, self._load_stream = (torch.cuda.Stream(self._device) for _ in range(2))

    def _ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        ids = [b * self._split + i for b in block_ids for i in range(self._split)]
        return self._torch.tensor(ids, dtype=self._torch.int64).to(self._device)

    def gather_many(self, items: Sequence[Gather], layer: int | None = None) -> None:
        for item in items:
            self._gather(*item, layer)

    def scatter_many(self, items: Sequence[Scatter], layer: int | None = None) -> None:
        for item in items:
            self._scatter(*item, layer)

    def _gather(self, block_ids: Sequence[int], out: Any, layer: int | None) -> None:
        torch = self._torch
        which = slice(None) if layer is None else slice(layer, layer + 1)
        saved = self._saved[which]
        with torch.cuda.stream(self._save_stream):
            ids = self._ids(block_ids)
            staging = torch.stack([kv.index_select(0, ids) for kv in self._layers[which]])
            saved.copy_(staging.transpose(1, 2).contiguous(), non_blocking=True)
            self._save_stream.synchronize()
        payload = self._np.frombuffer(out, "u1").reshape(self._saved.shape)
        payload[which] = saved.numpy()

    def _scatter(
        self,
        payload: Any,
        skip: int,
        block_ids: Sequence[int],
        part: HeadPart | None,
        layer: int | None,
    ) -> None:
        torch = self._torch
        layers, heads, *rest = self._loaded.shape
        take = part or HeadPart(heads, 0, 0, heads)
        which = slice(None) if layer is None else slice(layer, layer + 1)
        source = self._np.frombuffer(payload, "u1").reshape((layers, take.payload_heads, *rest))
        begin, count = skip * self._split, len(block_ids) * self._split
        wanted = source[which, take.source : take.source + take.heads]
        # The front of the pinned block, so that it crosses to the device in one copy.
        taken = self._loaded.view(-1)[: wanted.size].view(wanted.shape)
        taken.numpy()[:] = wanted
        with torch.cuda.stream(self._load_stream):
            ids = self._ids(block_ids)
            staging = taken.to(self._device, non_blocking=True)
            for kv, heads_of_layer in zip(self._layers[which], staging, strict=True):
                kv.narrow(1, take.target, take.heads).index_copy_(
                    0, ids, heads_of_layer[:, begin : begin + count].transpose(0, 1)
                )
            self._load_stream.synchronize()

    def mark_ready(self) -> torch.cuda.Event:
        event = self._torch.cuda.Event(blocking=True)
        event.record(self._torch.cuda.current_stream(self._device))
        return event

    def wait_ready(self, token: Ready | None) -> None:
        if token is not None:
            token.synchronize()
