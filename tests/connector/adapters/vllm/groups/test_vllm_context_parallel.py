"""Workers that share the tokens of blocks (DCP) or the computing (PCP): who saves and loads what.

vLLM's own scheduler, block tables, rank groups and allocation decide which token's KV is where on
which rank (context_parallel_engine.py); every token is compared on every rank.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from context_parallel_engine import LAYER_NAMES, ContextParallelEngine, Sizes, places
from vllm_model_config import vllm_config
from vllm_model_engine import prompt

from connector.build import EngineShape
from connector.layout.topology import TpKVTopology
from connector.settings import ConnectorSettings
from kvstore import UsageError
from kvstore.testing.blockstore import MemoryBlockStore

pytestmark = pytest.mark.vllm
BLOCK = 16
"""Tokens of a store block: a block of memory, 4 tokens, of 4 workers."""
TOKENS = 4 * BLOCK + 5


@pytest.fixture(scope="module")
def base(model: Path) -> Any:
    return vllm_config(model, blocks=8, block_tokens=BLOCK)


@pytest.fixture(autouse=True)
def token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connector.adapters.vllm.shape._within_block", lambda *_: "")


def with_sizes(base: Any, sizes: Sizes) -> Any:
    """vLLM's configuration of an engine of these sizes."""
    from transformers import PretrainedConfig
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    text = PretrainedConfig(
        num_hidden_layers=2,
        num_attention_heads=16,
        hidden_size=64,
        num_key_value_heads=sizes.heads or 16,
    )
    config = copy.copy(base)
    for name in ("parallel_config", "model_config", "cache_config"):
        setattr(config, name, copy.copy(getattr(base, name)))
    config.model_config.hf_text_config = text
    config.model_config.model_arch_config = ModelArchConfigConvertorBase(text, text).convert()
    config.cache_config.block_size = sizes.block
    config.cache_config.kv_cache_layout = "LBNHC"
    parallel = config.parallel_config
    parallel.tensor_parallel_size = sizes.tp
    parallel.prefill_context_parallel_size = sizes.pcp
    parallel.decode_context_parallel_size = sizes.dcp
    parallel.cp_kv_cache_interleave_size = sizes.interleave
    parallel.world_size = sizes.tp * sizes.pcp
    return config


def spec_of(sizes: Sizes, **more: Any) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    shape = {"block_size": sizes.block, "num_kv_heads": 1, "dtype": torch.bfloat16, **more}
    if sizes.heads is None:
        return MLAAttentionSpec(head_size=8, max_tp_shards=1, **shape)
    return FullAttentionSpec(head_size=4, **shape)


def specs_of(sizes: Sizes) -> dict[str, Any]:
    """By layer: every other one is an indexer where the model has them."""
    own = spec_of(sizes)
    indexer = own
    if sizes.indexer_bytes:
        indexer = dataclasses.replace(own, head_size=sizes.indexer_bytes, dtype=torch.uint8)
    return {name: (own, indexer)[i % 2] for i, name in enumerate(LAYER_NAMES)}


def shape_of(config: Any, spec: Any, **more: Any) -> EngineShape:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from connector.adapters.vllm.shape import engine_shape

    groups = [KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec)]
    kv_cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    return engine_shape(config, kv_cache, ConnectorSettings(block_tokens=BLOCK, **more))


Make = Callable[..., ContextParallelEngine]


@pytest.fixture
def make(base: Any, store: MemoryBlockStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[ContextParallelEngine] = []

    def one(sizes: Sizes, blocks: int = 96, **extra: Any) -> ContextParallelEngine:
        config, specs = with_sizes(base, sizes), specs_of(sizes)
        config.kv_transfer_config = copy.deepcopy(base.kv_transfer_config)
        config.kv_transfer_config.kv_connector_extra_config.update(extra)
        made.append(ContextParallelEngine(config, specs, sizes, store, monkeypatch, blocks))
        return made[-1]

    yield one
    for each in made:
        each.close()


SIZES = {
    "2 heads, TP 4, DCP 2": Sizes(4, 2, heads=2),
    "2 heads, TP 4, DCP 2, runner V1": Sizes(4, 2, heads=2, interleave=2, runner="V1"),
    "2 heads, TP 8, DCP 4, runs of a block": Sizes(8, 4, heads=2, interleave=4),
    "2 heads, TP 8, DCP 2, replicas": Sizes(8, 2, heads=2),
    "latents, TP 2, DCP 2": Sizes(2, 2),
    "latents, TP 4, DCP 2, replicas, runs of a block": Sizes(4, 2, interleave=4),
    "latents, TP 4, DCP 4, runner V1": Sizes(4, 4, runner="V1"),
    "latents and indexers, TP 2, DCP 2": Sizes(2, 2, indexer_bytes=6),
    "latents and indexers, TP 4, DCP 2, runs of a block": Sizes(
        4, 2, interleave=4, indexer_bytes=6
    ),
    "latents and indexers, TP 2, PCP 2, DCP 2": Sizes(2, 2, 2, indexer_bytes=6),
    "latents, PCP 2": Sizes(1, pcp=2),
    "latents, TP 2, PCP 2": Sizes(2, pcp=2),
    "latents, TP 2, PCP 2, DCP 2": Sizes(2, 2, 2, interleave=2),
    "latents, TP 2, PCP 2, DCP 4, runs of a block": Sizes(2, 4, 2, interleave=4),
}


TRANSFERS = [
    (name, layerwise)
    for name, sizes in SIZES.items()
    for layerwise in (False, True)
    if not (layerwise and sizes.indexer_bytes)  # there is none: see below
]


@pytest.mark.covers("decode context parallel", "memory")
@pytest.mark.covers("prefill context parallel", "memory")
@pytest.mark.parametrize(("name", "layerwise"), TRANSFERS)
def test_every_token_is_loaded_to_where_vllm_looks_for_it_on_every_rank(
    make: Make, store: MemoryBlockStore, name: str, layerwise: bool
) -> None:
    sizes, tokens = SIZES[name], prompt(TOKENS)
    writer = make(sizes, layerwise=layerwise)
    writer.add("a", tokens)
    writer.run()
    parts = (sizes.heads or 1) * sizes.dcp
    assert len(store.sealed()) == parts * (TOKENS // BLOCK), "each part of each block once"
    reader = make(sizes, layerwise=layerwise)
    reader.add("a", tokens)
    reader.run()
    assert (writer.loaded_tokens, reader.loaded_tokens) == ({"a": 0}, {"a": 4 * BLOCK})
    assert reader.outputs == writer.outputs
    assert len(store.sealed()) == parts * (TOKENS // BLOCK), "nothing is saved again"


def test_trap_layer_by_layer_beside_indexers_every_worker_stands_aside(
    make: Make, store: MemoryBlockStore
) -> None:
    """vLLM's scheduler is not told of them, so it cannot refuse: the engine runs, and computes."""
    from connector.adapters.vllm.bystander import Bystander

    for name in ("a", "b"):
        engine = make(Sizes(2, 2, indexer_bytes=6), layerwise=True)
        assert all(isinstance(rank.connector._worker, Bystander) for rank in engine.ranks)
        engine.add(name, prompt(TOKENS))
        engine.run()
        assert (len(engine.outputs[name]), engine.loaded_tokens) == (3, {name: 0})
    assert not store.sealed()


SHARE = {
    "other replicas": (Sizes(4, 2, heads=2), Sizes(8, 2, heads=2)),
    "latents of other TP sizes": (Sizes(2, 2), Sizes(4, 2)),
    "other memory blocks": (Sizes(2, 2), Sizes(2, 2, block=8)),
    "the other axis": (Sizes(4, 4), Sizes(2, 4, 2)),
    "PCP keeps all on each worker": (Sizes(1), Sizes(2, pcp=2)),
}


@pytest.mark.parametrize("name", SHARE)
def test_engines_that_share_tokens_in_the_same_way_share_blocks(make: Make, name: str) -> None:
    writer, reader = (make(sizes) for sizes in SHARE[name])
    tokens = prompt(TOKENS)
    for engine in (writer, reader):
        engine.add("a", tokens)
        engine.run()
    assert reader.loaded_tokens == {"a": 4 * BLOCK}
    assert reader.outputs == writer.outputs


APART = [
    Sizes(8, heads=2),
    *(Sizes(8, dcp, heads=2, interleave=run) for dcp in (2, 4) for run in (1, 2, 4)),
]


@pytest.mark.parametrize("heads", [2, None])
def test_trap_engines_that_share_tokens_otherwise_share_no_key(
    base: Any, heads: int | None
) -> None:
    names: list[str] = []
    for sizes in APART:
        own = dataclasses.replace(sizes, heads=heads)
        (group,) = (
            shape_of(with_sizes(base, own), spec_of(own))
            .layout(ConnectorSettings(block_tokens=BLOCK))
            .groups
        )
        names += [str(one.id) for split in group.splits for one in split.namespaces]
        assert len(group.namespaces) == (heads or 1) * own.dcp
        assert own.dcp == 1 or len(group.splits) == 1, "no engine shares heads otherwise then"
    assert len(set(names)) == len(names)


def test_trap_one_that_shares_tokens_otherwise_loads_nothing(make: Make) -> None:
    tokens = prompt(TOKENS)
    for sizes in (Sizes(4, 2), Sizes(4, 2, interleave=4), Sizes(4, 4), Sizes(4)):
        engine = make(sizes)
        engine.add("a", tokens)
        engine.run()
        assert engine.loaded_tokens == {"a": 0}, sizes


def test_no_token_is_wrong_under_pressure(make: Make) -> None:
    """Prompts with common beginnings, more than fit: requests are preempted and come again."""
    sizes, rng = Sizes(4, 2, heads=2), random.Random(5)
    engines = [make(sizes, blocks=24) for _ in range(2)]
    free = [e.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() for e in engines]
    begins = [prompt(4 * BLOCK, seed=i) for i in range(2)]
    for i in range(16):
        tokens = rng.choice(begins)[: rng.randrange(8, 4 * BLOCK)] + prompt(3, seed=50 + i)
        engines[i % 2].add(f"r{i}", tokens, max_tokens=rng.randrange(1, 40))
        for _ in range(rng.randrange(4)):
            rng.choice(engines).step()
    for engine in engines:
        engine.run()
    assert sum(sum(engine.loaded_tokens.values()) for engine in engines) > 0
    assert sum(engine.preemptions for engine in engines) > 0
    assert free == [e.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() for e in engines]


def test_every_rank_is_placed_as_vllm_places_it(base: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sizes that vLLM takes, of up to 8 ranks: the part of the tokens, and one saver a part."""
    for tp, pcp in itertools.product((1, 2, 4, 8), (1, 2, 4)):
        allowed = {1, pcp, tp * pcp} if pcp > 1 else {n for n in (1, 2, 4, 8) if tp % n == 0}
        for dcp in allowed if tp * pcp <= 8 else ():
            sizes = Sizes(tp, dcp, pcp)
            mine = TpKVTopology.of(tp, 2, 1, pcp_size=pcp, dcp_size=dcp)
            found = places(sizes, with_sizes(base, sizes), monkeypatch)
            for stage in range(2):
                ranks = [mine.at(stage * len(found) + place.rank) for place in found]
                assert [r.dcp_rank for r in ranks] == [place.dcp_rank for place in found], sizes
                assert [r.tp_rank for r in ranks] == [place.tp_rank for place in found]
                assert [r.shard for r in ranks] == [stage * dcp + p.dcp_rank for p in found]
                savers = [r.shard for r in ranks if r.saves]
                assert sorted(savers) == list(range(stage * dcp, (stage + 1) * dcp)), sizes


def test_trap_heads_that_may_be_others_are_a_part_of_their_own_on_each_worker(base: Any) -> None:
    """12 workers, 2 heads, DCP 4: vLLM's second group of workers has both heads."""
    sizes = Sizes(12, 4, heads=2)
    (group,) = shape_of(with_sizes(base, sizes), spec_of(sizes)).groups
    assert group.topology.tp_shards == 12
    assert all(group.topology.at(rank).saves for rank in range(12))
    assert group.fields["cp_workers"] == "4 of 12"
    with pytest.raises(UsageError, match="decode_context_parallel_size"):
        shape_of(with_sizes(base, Sizes(12, 48, 4, heads=2)), spec_of(sizes))


@pytest.mark.parametrize(("run", "per_state"), [(3, 1), (8, 1), (2, 4)])
def test_trap_runs_that_do_not_fit_blocks_or_entries_are_refused(
    base: Any, run: int, per_state: int
) -> None:
    config = with_sizes(base, Sizes(4, 2, interleave=run))
    spec = spec_of(Sizes(4, 2), tokens_per_state=per_state)
    with pytest.raises(UsageError, match="cp_kv_cache_interleave_size"):
        shape_of(config, spec)
    shape_of(config, dataclasses.replace(spec, dcp_sharded=False))  # whole on every worker


def test_a_group_that_is_not_sharded_is_as_without_context_parallelism(base: Any) -> None:
    sizes = Sizes(4, 2, heads=2)
    spec = dataclasses.replace(spec_of(sizes), dcp_sharded=False)
    (sharded,), (alone,) = (
        shape_of(with_sizes(base, one), spec).groups for one in (sizes, Sizes(4, heads=2))
    )
    assert (sharded.geometry, sharded.fields) == (alone.geometry, alone.fields)
    assert sharded.topology == alone.topology


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_trap_states_beside_context_parallelism_are_refused(which: str) -> None:
    from connector.adapters.vllm.groups.states import state_topology

    sizes = {f"{name}_context_parallel_size": 1 for name in ("prefill", "decode")}
    sizes[f"{which}_context_parallel_size"] = 2
    parallel = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1, **sizes)
    with pytest.raises(UsageError, match=f"{which}_context_parallel_size"):
        state_topology(SimpleNamespace(tp_replicated=False), parallel)  # type: ignore[arg-type]


class TestInterleave:
    """What vLLM's workers use, whatever the scheduler's configuration says."""

    @pytest.fixture
    def vllms(self, base: Any) -> Any:
        return with_sizes(base, Sizes(4, 2))

    def test_trap_the_older_name_counts(self, vllms: Any) -> None:
        from connector.adapters.vllm.groups.context import interleave

        vllms.parallel_config.dcp_kv_cache_interleave_size = 2
        changes = hasattr(type(vllms), "adjust_dcp_kv_cache_interleave_size")
        groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec_of(Sizes(4)))])
        assert changes
        assert interleave(vllms, groups) == (2 if in_workers(vllms) else 1)
        assert vllms.parallel_config.cp_kv_cache_interleave_size == 1, "left as it was"

    def test_trap_beside_nixl_it_is_a_block(self, vllms: Any) -> None:
        """vLLM gives a child of its MultiConnector the child's settings alone."""
        from vllm.config import KVTransferConfig

        from connector.adapters.vllm.groups.context import interleave

        groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec_of(Sizes(4)))])
        parent = copy.copy(vllms)
        children = [{"kv_connector": name} for name in ("NixlConnector", "KVStoreConnector")]
        parent.kv_transfer_config = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"connectors": children},
        )

        class MultiConnector:
            def __init__(self) -> None:
                self._vllm_config = parent
                self.found = interleave(vllms, groups)

        assert MultiConnector().found == (4 if in_workers(vllms) else 1)
        assert interleave(vllms, groups) == 1


def in_workers(config: Any) -> bool:
    """Whether this vLLM changes it in its workers alone."""
    from inspect import signature

    return "kv_cache_config" in signature(config.adjust_dcp_kv_cache_interleave_size).parameters


def test_lock_step_counts_all_workers_of_a_scheduler(base: Any) -> None:
    from connector.adapters.vllm.launcher import in_lock_step

    for sizes, expected in ((Sizes(1), False), (Sizes(1, pcp=2), True), (Sizes(2, 2), True)):
        config = with_sizes(base, sizes)
        config.parallel_config.distributed_executor_backend = "external_launcher"
        assert in_lock_step(config) is expected
        assert shape_of(config, spec_of(sizes)).workers == sizes.tp * sizes.pcp
