"""Paged KV of random shape in any memory layout, and what its payloads must be, byte by byte."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from connector.copiers.base import HeadPart
from connector.layout.geometry import KVGeometry


class Strided:
    """As much of a tensor as the copiers look at, over numpy's memory."""

    def __init__(self, array: Any, storage: Any) -> None:
        self.array = array
        self.shape = array.shape
        self._storage = storage
        self.device = type("Device", (), {"type": "cpu"})()

    def stride(self, dimension: int | None = None) -> Any:
        strides = tuple(n // self.array.itemsize for n in self.array.strides)
        return strides if dimension is None else strides[dimension]

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def data_ptr(self) -> int:
        return int(self.array.__array_interface__["data"][0])

    def untyped_storage(self) -> Any:
        return type("Storage", (), {"data_ptr": lambda _: self._storage.ctypes.data})()


@dataclass(frozen=True)
class Shape:
    layers: int = 2
    heads: int = 2
    channels: int = 16
    element_bytes: int = 1
    page_tokens: int = 4
    pages_per_block: int = 1
    blocks_per_payload: int = 2
    engine_blocks: int = 6
    order: tuple[int, int, int, int] = (0, 1, 2, 3)
    """Of layer, page, head, token in memory, the slowest first; channels are the fastest."""
    padding: int = 0
    """Channels between a token's and the next one's."""
    apart: bool = False
    """Whether each layer has an allocation of its own."""
    offset: int = 0
    """Elements before the first one."""

    @property
    def engine_block_tokens(self) -> int:
        return self.page_tokens * self.pages_per_block

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of a layer, without what is between tokens."""
        return self.page_tokens * self.heads * self.channels * self.element_bytes

    @property
    def block_tokens(self) -> int:
        return self.engine_block_tokens * self.blocks_per_payload

    @property
    def geometry(self) -> KVGeometry:
        return KVGeometry(
            layers=self.layers,
            heads=self.heads,
            channel_bytes=self.channels * self.element_bytes,
            engine_block_tokens=self.engine_block_tokens,
        )

    @property
    def payload_shape(self) -> tuple[int, int, int, int]:
        """Return the shape of a payload: bytes as `[layer, head, token, C]`."""
        g = self.geometry
        return g.layers, g.heads, self.block_tokens, g.channel_bytes


@dataclass
class Case:
    """`kv[layer, page, head, token, C]` as bytes, all a view into `storages`."""

    shape: Shape
    seed: int
    storages: list[Any] = field(init=False)
    layers: list[Strided] = field(init=False)

    def __post_init__(self) -> None:
        s, generator = self.shape, np.random.default_rng(self.seed)
        sizes = [s.layers, s.engine_blocks * s.pages_per_block, s.heads, s.page_tokens]
        self.storages, arrays = [], []
        for count in [1] * s.layers if s.apart else [s.layers]:
            sizes[0] = count
            stored = [sizes[i] for i in s.order] + [s.channels + s.padding]
            length = int(np.prod(stored)) + s.offset
            raw = generator.integers(0, 256, length * s.element_bytes + 64, np.uint8)
            start = -raw.ctypes.data % 16  # what an allocator gives is aligned
            storage = raw[start : start + length * s.element_bytes].view(f"u{s.element_bytes}")
            view = storage[s.offset :].reshape(stored)[..., : s.channels]
            view = view.transpose(*(s.order.index(i) for i in range(4)), 4)
            self.storages.append(raw)
            arrays += list(view)
        self.layers = [
            Strided(array, self.storages[0 if not s.apart else i]) for i, array in enumerate(arrays)
        ]

    def copy(self) -> Case:
        """Return another engine with the same bytes."""
        other = Case(self.shape, self.seed)
        for mine, its in zip(self.storages, other.storages, strict=True):
            its[:] = mine
        return other

    def _bytes(self, layer: int) -> Any:
        array = self.layers[layer].array
        return np.ndarray(
            (*array.shape[:3], array.shape[3] * array.itemsize),
            np.uint8,
            buffer=array.base if array.base is not None else array,
            offset=self.layers[layer].data_ptr() - array.base.__array_interface__["data"][0],
            strides=(*array.strides[:3], 1),
        )

    def tokens(self, layer: int, block_ids: list[int]) -> Any:
        """Return a copy of `[head, token, C]` of these engine blocks, token by token."""
        s = self.shape
        pages = [b * s.pages_per_block + i for b in block_ids for i in range(s.pages_per_block)]
        return np.concatenate([self._bytes(layer)[page] for page in pages], axis=1)

    def payload(self, block_ids: list[int]) -> Any:
        """Return what gathering gives, `[layer, head, token, C]`."""
        return np.stack([self.tokens(layer, block_ids) for layer in range(self.shape.layers)])

    def put(
        self, payload: Any, skip: int, block_ids: list[int], part: HeadPart, layer: int | None
    ) -> None:
        """Write what scattering writes."""
        s = self.shape
        for number in range(s.layers) if layer is None else (layer,):
            kv = self._bytes(number)
            for i, block in enumerate(block_ids, skip):
                for j in range(s.pages_per_block):
                    first = (i * s.pages_per_block + j) * s.page_tokens
                    heads = payload[number, part.source : part.source + part.heads]
                    kv[block * s.pages_per_block + j, part.target : part.target + part.heads] = (
                        heads[:, first : first + s.page_tokens]
                    )


@st.composite
def shapes(draw: Any) -> Shape:
    element_bytes = draw(st.sampled_from([1, 2, 4]))  # fp8 or int8, bfloat16 or fp16, float32
    return Shape(
        layers=draw(st.integers(1, 4)),
        heads=draw(st.sampled_from([1, 1, 2, 3, 8])),  # one: latent attention
        channels=draw(st.sampled_from([1, 3, 6, 8, 16, 36, 64, 576])),
        element_bytes=element_bytes,
        page_tokens=draw(st.sampled_from([1, 2, 3, 4, 8])),
        pages_per_block=draw(st.sampled_from([1, 1, 2, 4])),
        blocks_per_payload=draw(st.integers(1, 3)),
        engine_blocks=draw(st.integers(3, 6)),
        order=tuple(draw(st.permutations(range(4)))),
        padding=draw(st.sampled_from([0, 0, 1, 4, 16])),
        apart=draw(st.booleans()),
        offset=draw(st.sampled_from([0, 0, 1, 2, 8])),
    )
