"""Gather engine blocks into a store block and scatter them back.

torch and numpy are imported here, and only when tensors are registered.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvstore import UsageError

if TYPE_CHECKING:
    from connector.geometry import KVGeometry


class HeadPart(NamedTuple):
    """A range of a payload's heads and where it goes among the engine's."""

    payload_heads: int
    """Heads that the whole payload has."""
    source: int
    target: int
    heads: int


class KVBlocks(Protocol):
    """Copies between an engine's KV and payloads laid out `[layer][head][token][C]`.

    With `layer` only that layer of a payload, one contiguous part of it, is copied.
    """

    def gather(self, block_ids: Sequence[int], out: memoryview, layer: int | None = None) -> None:
        """Engine blocks, in token order, into a whole payload."""
        ...

    def scatter(
        self,
        payload: memoryview,
        skip: int,
        block_ids: Sequence[int],
        part: HeadPart | None = None,
        layer: int | None = None,
    ) -> None:
        """The payload's engine blocks from number `skip` on into `block_ids`.

        With `part` only those heads of it, and only those bytes are read.
        """
        ...

    def mark_ready(self) -> Any:
        """A token for "all that was submitted so far has written the KV"; see `wait_ready`."""
        ...

    def wait_ready(self, token: Any) -> None:
        """Return when the work before `mark_ready` is done."""
        ...


def kv_blocks(kv_caches: Mapping[str, Any], geometry: KVGeometry, block_tokens: int) -> KVBlocks:
    """Copier over an engine's layer tensors, each a strided `[B, H, N, C]` view.

    N may be a part of the engine's block (kernel blocks): B is then as many
    times larger. Raises `UsageError` when the tensors do not have the shape the
    namespace was made from.
    """
    layers = list(kv_caches.values())
    if geometry.recurrent:  # an engine block and a store block have one slot each, the state
        geometry, block_tokens = replace(geometry, engine_block_tokens=1), 1
    _check(layers, geometry)
    if all(layer.device.type == "cpu" for layer in layers):
        return HostBlocks(layers, geometry, block_tokens)
    return DeviceBlocks(layers, geometry, block_tokens)


def _check(layers: Sequence[Any], geometry: KVGeometry) -> None:
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


class HostBlocks:
    """KV in host memory, copied by numpy.

    Measured on one core: 25 GB/s with one strided copy per engine block over
    all layers, 16 GB/s layer by layer, 7 to 10 GB/s with torch's index_select
    and index_copy, which also start an OpenMP team in the helper thread that
    competes with the model's (and an engine may have disabled
    `torch.set_num_threads`). numpy drops the GIL during the copy.
    """

    def __init__(self, layers: Sequence[Any], geometry: KVGeometry, block_tokens: int) -> None:
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

    def _view(self, first: int, count: int) -> Any:
        """`[layer, block, head, token, C]` over `count` layers a constant distance apart."""
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

    def _runs_of(self, layer: int | None) -> Sequence[tuple[int, int, Any]]:
        return self._runs if layer is None else self._single[layer]

    def gather(self, block_ids: Sequence[int], out: memoryview, layer: int | None = None) -> None:
        payload = self._np.frombuffer(out, self._word).reshape(self._payload_shape)
        for first, count, view in self._runs_of(layer):
            part = payload[first : first + count]
            for i, block_id in enumerate(self._kernel_ids(block_ids)):
                part[:, :, i] = view[:, block_id]

    def scatter(
        self,
        payload: memoryview,
        skip: int,
        block_ids: Sequence[int],
        part: HeadPart | None = None,
        layer: int | None = None,
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

    def wait_ready(self, token: Any) -> None:
        return None


def _layer_runs(layers: Sequence[Any]) -> list[tuple[int, int]]:
    """(first, count) of maximal runs of layers alike and a constant distance apart.

    Engines lay all layers out in one allocation, so that usually one run
    covers all of them and one copy moves a block of every layer.
    """
    runs: list[tuple[int, int]] = []
    first = 0
    for i in range(1, len(layers) + 1):
        if i < len(layers) and _continues(layers, first, i):
            continue
        runs.append((first, i - first))
        first = i
    return runs


def _continues(layers: Sequence[Any], first: int, i: int) -> bool:
    a, b = layers[first], layers[i]
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    if a.shape != b.shape or a.stride() != b.stride():
        return False
    step = int(layers[first + 1].data_ptr() - a.data_ptr())
    return step > 0 and int(b.data_ptr() - a.data_ptr()) == step * (i - first)


class DeviceBlocks:
    """KV on an accelerator: a stream of its own, staging through one pinned host block.

    Every call returns only when the bytes are where they belong: the caller's
    fence (nobody writes after having reported) needs that. Used by two threads,
    one that gathers and one that scatters: each has its own staging.
    """

    def __init__(self, layers: Sequence[Any], geometry: KVGeometry, block_tokens: int) -> None:
        import numpy as np
        import torch as untyped_torch

        torch: Any = untyped_torch
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

    def _ids(self, block_ids: Sequence[int]) -> Any:
        ids = [b * self._split + i for b in block_ids for i in range(self._split)]
        return self._torch.tensor(ids, dtype=self._torch.int64).to(self._device)

    def gather(self, block_ids: Sequence[int], out: memoryview, layer: int | None = None) -> None:
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

    def scatter(
        self,
        payload: memoryview,
        skip: int,
        block_ids: Sequence[int],
        part: HeadPart | None = None,
        layer: int | None = None,
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

    def mark_ready(self) -> Any:
        event = self._torch.cuda.Event()
        event.record(self._torch.cuda.current_stream(self._device))
        return event

    def wait_ready(self, token: Any) -> None:
        token.synchronize()
