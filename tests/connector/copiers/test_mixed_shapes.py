"""Layers of several shapes in one KV cache group: one payload, byte for byte, and one namespace
that both roles come to although vLLM tells its scheduler the first layer's shape only."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_model_config import vllm_config

from connector.copiers.base import Gather, Scatter
from connector.copiers.registered import kv_memory
from connector.layout.geometry import GroupLayout, KVGeometry, LayerRun, splits_of
from connector.layout.shard_reads import GroupReads
from connector.layout.topology import TpKVTopology
from connector.settings import ConnectorSettings
from kvstore import UsageError

torch = pytest.importorskip("torch")

PAGE, BLOCK, POOL = 4, 8, 6
TP_SIZES = (1, 2, 4)
LAYERS = ((4, 6), (8, 2), (4, 6), (4, 10), (8, 2))
"""KV heads of the whole model and bytes of a token and head, layer by layer."""


def runs_of(tp_size: int) -> tuple[LayerRun, ...]:
    runs: dict[tuple[int, int], list[int]] = {}
    for i, (heads, size) in enumerate(LAYERS):
        runs.setdefault((heads // tp_size, size), []).append(i)
    return tuple(LayerRun(tuple(places), *shape) for shape, places in runs.items())


class Engine:
    """Each worker's memory, copiers and pieces."""

    def __init__(self, tp_size: int) -> None:
        geometry = KVGeometry(
            layers=len(LAYERS),
            heads=LAYERS[0][0] // tp_size,
            channel_bytes=LAYERS[0][1],
            engine_block_tokens=PAGE,
            runs=runs_of(tp_size),
        )
        topology = TpKVTopology.of(tp_size)
        self.splits = splits_of({}, geometry, topology, BLOCK, TP_SIZES)
        layout = GroupLayout(geometry=geometry, topology=topology, splits=self.splits)
        self.tp_size = tp_size
        self.pieces = [GroupReads(layout, rank, BLOCK) for rank in range(tp_size)]
        self.kv = [
            [np.zeros((POOL, heads // tp_size, PAGE, size), np.uint8) for heads, size in LAYERS]
            for _ in range(tp_size)
        ]
        self.copiers = [
            kv_memory(
                [({str(i): torch.from_numpy(a) for i, a in enumerate(kv)}, geometry)], BLOCK
            ).groups[0]
            for kv in self.kv
        ]

    def heads(self, rank: int, total: int) -> slice:
        return slice(rank * total // self.tp_size, (rank + 1) * total // self.tp_size)


TABLE = [3, 1]
"""The engine blocks of a store block."""


def truth() -> list[Any]:
    """`[head, token, C]` of each layer."""
    generator = np.random.default_rng(3)
    return [generator.integers(1, 256, (heads, BLOCK, size), np.uint8) for heads, size in LAYERS]


@pytest.mark.parametrize(("writer", "reader"), [*itertools.product(TP_SIZES, TP_SIZES)])
@pytest.mark.covers("heads that differ within a group", "memory")
def test_every_layer_is_shared_between_sizes_byte_for_byte(writer: int, reader: int) -> None:
    one, other, expected = Engine(writer), Engine(reader), truth()
    payloads = []
    for rank in range(writer):
        for layer, (heads, _) in enumerate(LAYERS):
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
        for layer, (heads, _) in enumerate(LAYERS):
            mine = expected[layer][other.heads(rank, heads)]
            for i, block in enumerate(TABLE):
                assert (other.kv[rank][layer][block] == mine[:, i * PAGE : (i + 1) * PAGE]).all()
            others = [i for i in range(POOL) if i not in TABLE]
            assert not other.kv[rank][layer][others].any()


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


# The adapter


@pytest.fixture(scope="module")
def base(model: Path) -> Any:
    return vllm_config(model, blocks=8)


def group_of(*specs: Any) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, UniformTypeKVCacheSpecs

    named = {f"model.layers.{i}.self_attn.attn": spec for i, spec in enumerate(specs)}
    uniform = UniformTypeKVCacheSpecs.from_specs(named)
    assert uniform is not None, "vLLM puts them into one group"
    return KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(list(named), uniform)]
    )


def latent_and_indexer() -> list[Any]:
    """As DeepSeek-V3.2's layers: a latent, and an indexer of other bytes beside each."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    shape = {"block_size": 64, "num_kv_heads": 1, "max_tp_shards": 1}
    return [
        MLAAttentionSpec(head_size=576, dtype=torch.bfloat16, **shape),
        MLAAttentionSpec(head_size=132, dtype=torch.uint8, **shape),
    ]


def shapes(config: Any, workers: Any) -> list[Any]:
    """The scheduler's and a worker's, each with what vLLM tells it."""
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

    from connector.adapters.vllm.shape import engine_shape

    scheduler = generate_scheduler_kv_cache_config([workers])
    return [engine_shape(config, told, ConnectorSettings()) for told in (scheduler, workers)]


def on_gpus(base: Any, tp_size: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    from connector.adapters.vllm import shape as vllm_shape

    monkeypatch.setattr(vllm_shape.current_platform, "is_cpu", lambda: False, raising=False)
    config = copy.copy(base)
    config.parallel_config = copy.copy(base.parallel_config)
    config.parallel_config.tensor_parallel_size = tp_size
    return config


@pytest.mark.vllm
@pytest.mark.parametrize("tp_size", [1, 8])
@pytest.mark.covers("MLA + indexer (DeepSeek-V3.2, GLM-5)", "model")
def test_both_roles_take_a_latent_and_its_indexer(
    base: Any, monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    config = on_gpus(base, tp_size, monkeypatch)
    scheduler, worker = shapes(config, group_of(*latent_and_indexer()))
    namespaces = [s.layout(ConnectorSettings()).groups[0].namespaces for s in (scheduler, worker)]
    assert namespaces[0] == namespaces[1]
    assert len(namespaces[0]) == 1, "a latent is the same on every worker"
    assert worker.groups[0].geometry.runs == (LayerRun((0,), 1, 1152), LayerRun((1,), 1, 132))
    assert scheduler.groups[0].geometry.runs == ()


@pytest.mark.vllm
def test_trap_beside_a_latent_the_block_size_is_always_in_the_namespace(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler cannot know whether there is an indexer, whose bytes lie by the block."""
    scheduler, _ = shapes(on_gpus(base, 1, monkeypatch), group_of(*latent_and_indexer()))
    assert "64 tokens" in str(scheduler.groups[0].fields["within_block"])


@pytest.mark.vllm
def test_trap_layers_that_the_first_ones_word_is_not_true_of_are_refused(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    def spec(**changes: Any) -> Any:
        shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 4, "dtype": torch.bfloat16}
        return FullAttentionSpec(**{**shape, **changes})

    config = on_gpus(base, 2, monkeypatch)
    shapes(config, group_of(spec(), spec(num_kv_heads=4), spec(head_size=8)))
    for other in (
        spec(num_kv_heads=3),
        spec(num_kv_heads=4, num_head_slots=6),
        spec(state_content_bytes=20),
    ):
        with pytest.raises(UsageError, match=r"model\.layers\.1.*cannot be shared beside"):
            shapes(config, group_of(spec(), other))
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(UsageError, match="pipeline_parallel_size"):
        shapes(config, group_of(spec(), spec(head_size=8)))


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


@pytest.mark.vllm
def test_both_roles_take_states_of_several_shapes(
    base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.kv_cache_interface import MambaSpec

    def spec(*last: int) -> Any:
        return MambaSpec(
            block_size=16,
            shapes=((2, 4), last),
            dtypes=(torch.bfloat16, torch.float32),
            page_size_padded=64,
            mamba_cache_mode="align",
        )

    config, workers = on_gpus(base, 1, monkeypatch), group_of(spec(2, 2), spec(3, 2))
    scheduler, worker = shapes(config, workers)
    namespaces = [s.layout(ConnectorSettings()).groups[0].namespaces for s in (scheduler, worker)]
    assert namespaces[0] == namespaces[1]
    assert worker.groups[0].geometry.runs == (LayerRun((0,), 1, 32), LayerRun((1,), 1, 40))
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(UsageError, match="pipeline_parallel_size"):
        shapes(config, workers)
