"""Layers of several shapes in one KV cache group: one payload, byte for byte."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from each_input import each

from connector.copiers.base import Gather, Scatter
from connector.copiers.registered import kv_memory
from connector.layout.geometry import GroupLayout, KVGeometry, LayerRun, splits_of
from connector.layout.shard_reads import GroupReads
from connector.layout.topology import TpKVTopology
from kvstore import UsageError

torch = pytest.importorskip("torch")

PAGE, BLOCK, POOL = 4, 8, 6
TP_SIZES = (1, 2, 4)
LAYERS = ((4, 6), (8, 2), (4, 6), (4, 10), (8, 2))
"""KV heads of the whole model and bytes of a token and head, layer by layer."""


WITH_A_DRAFT = ((8, 6), (8, 6), (2, 4))
"""Its layer comes last, as vLLM builds it."""
Layers = tuple[tuple[int, int], ...]


def runs_of(tp_size: int, layers: Layers) -> tuple[LayerRun, ...]:
    runs: dict[tuple[int, int], list[int]] = {}
    for i, (heads, size) in enumerate(layers):
        runs.setdefault((max(1, heads // tp_size), size), []).append(i)
    return tuple(LayerRun(tuple(places), *shape) for shape, places in runs.items())


class Engine:
    """Each worker's memory, copiers and pieces."""

    def __init__(self, tp_size: int, layers: Layers = LAYERS) -> None:
        geometry = KVGeometry(
            layers=len(layers),
            heads=max(1, layers[0][0] // tp_size),
            channel_bytes=layers[0][1],
            engine_block_tokens=PAGE,
            runs=runs_of(tp_size, layers),
        )
        topology = TpKVTopology.of(tp_size)
        self.splits = splits_of({}, geometry, topology, BLOCK, TP_SIZES)
        layout = GroupLayout(geometry=geometry, topology=topology, splits=self.splits)
        self.tp_size = tp_size
        self.pieces = [GroupReads(layout, rank, BLOCK) for rank in range(tp_size)]
        self.kv = [
            [
                np.zeros((POOL, max(1, heads // tp_size), PAGE, size), np.uint8)
                for heads, size in layers
            ]
            for _ in range(tp_size)
        ]
        self.copiers = [
            kv_memory(
                [({str(i): torch.from_numpy(a) for i, a in enumerate(kv)}, geometry)], BLOCK
            ).groups[0]
            for kv in self.kv
        ]

    def heads(self, rank: int, total: int) -> slice:
        first = rank * total // self.tp_size
        return slice(first, first + max(1, total // self.tp_size))


TABLE = [3, 1]
"""The engine blocks of a store block."""


def truth(layers: Layers = LAYERS) -> list[Any]:
    """`[head, token, C]` of each layer."""
    generator = np.random.default_rng(3)
    return [generator.integers(1, 256, (heads, BLOCK, size), np.uint8) for heads, size in layers]


SHARED = [
    *((LAYERS, *sizes) for sizes in itertools.product(TP_SIZES, TP_SIZES)),
    *(
        (layers, *sizes)
        for layers in (WITH_A_DRAFT, WITH_A_DRAFT[::-1])
        for sizes in [*itertools.product((1, 2), (1, 2)), (4, 4), (8, 8)]
    ),
]
"""Layers, and sizes of engines of which no worker shares a head with another; or the same size."""


@each(("layers", "writer", "reader"), SHARED)
@pytest.mark.covers("heads that differ within a group", "memory")
def test_every_layer_is_shared_between_sizes_byte_for_byte(
    layers: Layers, writer: int, reader: int
) -> None:
    one, other, expected = Engine(writer, layers), Engine(reader, layers), truth(layers)
    payloads = []
    for rank in range(writer):
        for layer, (heads, _) in enumerate(layers):
            mine = expected[layer][one.heads(rank, heads)]
            for i, block in enumerate(TABLE):
                one.kv[rank][layer][block] = mine[:, i * PAGE : (i + 1) * PAGE]
        payload = bytearray(one.pieces[rank].block_bytes)
        one.copiers[rank].gather_many([Gather(TABLE, memoryview(payload))])
        payloads.append(payload)
    (split,) = (i for i, s in enumerate(other.splits) if s.tp_shards == writer)
    for rank in range(reader):
        for piece in other.pieces[rank].pieces(split):
            payload = payloads[piece.shard]
            assert len(payload) == piece.payload_bytes
            for skip, block in enumerate(TABLE):  # engine block after engine block
                scatter = Scatter(memoryview(payload), skip, [block], piece.part)
                other.copiers[rank].scatter_many([scatter])
        for layer, (heads, _) in enumerate(layers):
            mine = expected[layer][other.heads(rank, heads)]
            for i, block in enumerate(TABLE):
                assert (other.kv[rank][layer][block] == mine[:, i * PAGE : (i + 1) * PAGE]).all()
            others = [i for i in range(POOL) if i not in TABLE]
            assert not other.kv[rank][layer][others].any()


@each("layers", [WITH_A_DRAFT, WITH_A_DRAFT[::-1]])
@each(("writer", "reader"), [(1, 4), (4, 1), (2, 4), (4, 2)])
def test_trap_copies_of_a_drafts_head_are_not_taken_for_heads_of_another_size(
    layers: Layers, writer: int, reader: int
) -> None:
    """It has one head for two workers of four: nothing of the other engine's fits, and that shows
    before a byte is copied."""
    one, other = Engine(writer, layers), Engine(reader, layers)
    payload_bytes = one.pieces[0].block_bytes
    for split, of in enumerate(other.splits):
        if of.tp_shards == writer:
            for reads in other.pieces:
                assert all(p.payload_bytes != payload_bytes for p in reads.pieces(split))


def test_a_whole_payload_goes_back_where_it_came_from() -> None:
    one, other, expected = Engine(1), Engine(1), truth()
    for layer, rows in enumerate(expected):
        for i, block in enumerate(TABLE):
            one.kv[0][layer][block] = rows[:, i * PAGE : (i + 1) * PAGE]
    payload = memoryview(bytearray(one.pieces[0].block_bytes))
    one.copiers[0].gather_many([Gather(TABLE, payload)])
    other.copiers[0].scatter_many([Scatter(payload, 0, TABLE)])
    for mine, its in zip(one.kv[0], other.kv[0], strict=True):
        assert (mine == its).all()


def test_tensors_of_another_shape_than_their_run_are_refused() -> None:
    geometry = Engine(1).pieces[0].geometry
    layers = {
        str(i): torch.zeros((POOL, heads, PAGE, size + (i == 3)), dtype=torch.uint8)
        for i, (heads, size) in enumerate(LAYERS)
    }
    with pytest.raises(UsageError, match="10 bytes"):
        kv_memory([(layers, geometry)], BLOCK)


def test_states_of_several_sizes_go_into_one_payload_and_back() -> None:
    sizes = (12, 20, 12)
    geometry = KVGeometry(
        layers=3,
        heads=1,
        channel_bytes=12,
        engine_block_tokens=16,
        recurrent=True,
        runs=(LayerRun((0, 2), 1, 12), LayerRun((1,), 1, 20)),
    )
    generator = np.random.default_rng(5)
    memories = [[np.zeros((POOL, 1, 1, size), np.uint8) for size in sizes] for _ in range(2)]
    one, other = (
        kv_memory([({str(i): torch.from_numpy(a) for i, a in enumerate(kv)}, geometry)], 16).groups[
            0
        ]
        for kv in memories
    )
    for layer in memories[0]:
        layer[2] = generator.integers(1, 256, layer[2].shape, np.uint8)
    payload = memoryview(bytearray(sum(sizes)))
    one.gather_many([Gather([2], payload)])
    other.scatter_many([Scatter(payload, 0, [5])])
    for mine, its in zip(*memories, strict=True):
        assert (mine[2] == its[5]).all()
        assert not its[:5].any()
