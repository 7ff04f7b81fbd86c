"""Engines with other tensor-parallel sizes, block sizes and memory layouts share blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tp_engine import Model, TpEngine

from connector.layout.geometry import GroupLayout, KVGeometry, splits_of
from connector.layout.shard_reads import GroupReads
from connector.layout.topology import TpKVTopology
from kvstore.testing.blockstore import MemoryBlockStore

pytest.importorskip("torch")
BLOCK = 8
Make = Callable[..., TpEngine]


@pytest.fixture
def make(store: MemoryBlockStore) -> Iterator[Make]:
    engines: list[TpEngine] = []

    def one(tp_size: int, model: Model | None = None, **changes: object) -> TpEngine:
        engines.append(TpEngine(store, model or Model(), tp_size, **changes))  # type: ignore[arg-type]
        return engines[-1]

    yield one
    for engine in engines:
        engine.close()


def prompt(blocks: int, seed: int = 0, extra: int = 3) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(32000) for _ in range(blocks * BLOCK + extra)]


@pytest.mark.parametrize("reader", [1, 2, 4, 8])
@pytest.mark.parametrize("writer", [1, 2, 4, 8])
def test_what_engines_of_one_size_save_engines_of_any_size_load(
    make: Make, writer: int, reader: int
) -> None:
    """With 4 KV heads, so that 8 workers hold pairs of replicas."""
    tokens = prompt(3)
    make(writer, seed=1).save(tokens)
    engine = make(reader, seed=2)
    offered, tables, _, report = engine.load(tokens)
    assert offered == 3 * BLOCK
    assert report.failed_requests == set()
    engine.check(tokens, offered, tables)


@pytest.mark.parametrize("reader", [1, 2, 8])
@pytest.mark.parametrize("writer", [1, 2, 8])
@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_layer_by_layer_sizes_share_as_well(
    make: Make, store: MemoryBlockStore, writer: int, reader: int, order: str
) -> None:
    tokens = prompt(3)
    make(writer, seed=1, layerwise=True).save(tokens)
    engine = make(reader, seed=2, order=order, layerwise=True)
    offered, tables, _, report = engine.load(tokens)
    assert offered == 3 * BLOCK
    assert report.ended_loads == {0: reader}
    assert report.failed_requests == set()
    engine.check(tokens, offered, tables)


def test_trap_only_one_replica_saves(make: Make, store: MemoryBlockStore) -> None:
    make(8, Model(heads=2)).save(prompt(3))
    assert len(store.sealed()) == 2 * 3
    assert store.reserve_calls == 2


def test_latent_attention_is_saved_once_and_loaded_by_all(
    make: Make, store: MemoryBlockStore
) -> None:
    tokens, model = prompt(3), Model(heads=1, channel_bytes=24)
    make(4, model).save(tokens)
    assert len(store.sealed()) == 3
    engine = make(2, model, seed=5)
    offered, tables, _, _ = engine.load(tokens)
    assert offered == 3 * BLOCK
    engine.check(tokens, offered, tables)


def test_trap_a_worker_reads_only_the_shards_that_hold_its_heads(
    make: Make, store: MemoryBlockStore
) -> None:
    tokens = prompt(1)
    make(4).save(tokens)
    views: list[int] = []
    store.on_view = lambda: views.append(1)
    make(2).load(tokens)
    assert len(views) == 2 * 2, "two workers, two of the four shards each"
    del views[:]
    make(1).load(tokens)
    assert len(views) == 4


def test_trap_the_engines_own_size_is_preferred(make: Make) -> None:
    tokens = prompt(2)
    for writer in (1, 2, 4):
        make(writer).save(tokens)
    for reader in (1, 2, 4):
        _, _, (job,), _ = make(reader).load(tokens)
        assert [(block.split, len(block.found)) for block in job.blocks] == [(0, reader)] * 2


def test_trap_a_missing_shard_of_another_size_ends_the_run(
    make: Make, store: MemoryBlockStore
) -> None:
    tokens = prompt(4)
    writer = make(4)
    writer.save(tokens)
    hashes = writer.request("r", tokens).block_hashes
    keys = writer.layout.groups[0].namespaces[2].engine_keys(hashes)
    store.evict(keys[2])
    assert make(2).load(tokens)[0] == 2 * BLOCK


def test_a_prefix_may_come_from_several_writers_block_by_block(make: Make) -> None:
    """An engine that loads a prefix from another size saves only what comes after it."""
    tokens = prompt(5)
    make(4, seed=1).save(tokens[: 2 * BLOCK])
    second = make(2, seed=2)
    assert second.match(second.request("save", tokens)) == 2 * BLOCK
    second.save(tokens)
    for reader in (1, 2, 4):
        engine = make(reader, seed=3)
        offered, tables, (job,), _ = engine.load(tokens)
        assert offered == 5 * BLOCK
        assert [len(block.found) for block in job.blocks] == [4, 4, 2, 2, 2]
        engine.check(tokens, offered, tables)


def test_trap_one_question_to_the_index_unless_another_size_may_fill_a_gap(
    make: Make, store: MemoryBlockStore
) -> None:
    def questions(reader: int, tokens: list[int]) -> int:
        engine = make(reader)
        request = engine.request("r", tokens)
        engine.match(request)
        before = store.match_calls
        other = engine.request("s", [*tokens, 1])
        engine.match(other)
        return store.match_calls - before

    own, foreign, unknown = prompt(3, 1), prompt(3, 2), prompt(3, 3)
    make(2).save(own)
    make(4).save(own)
    make(4).save(foreign)
    assert questions(2, own) == 1
    assert questions(2, unknown) == 1
    assert questions(2, foreign) == 2
    make(1).save(prompt(2, 4))
    assert questions(2, prompt(2, 4)) == 1, "all of one shard is known at once"


def test_sizes_that_are_not_looked_for_are_not_found(make: Make) -> None:
    tokens = prompt(2)
    make(4).save(tokens)
    assert make(2, tp_sizes=[1]).load(tokens)[0] == 0
    assert make(2, tp_sizes=[4]).load(tokens)[0] == 2 * BLOCK


def test_trap_a_shard_that_vanishes_fails_the_load_from_its_block_on(
    make: Make, store: MemoryBlockStore
) -> None:
    tokens = prompt(3)
    writer = make(4)
    writer.save(tokens)
    keys = (
        writer.layout.groups[0].namespaces[3].engine_keys(writer.request("r", tokens).block_hashes)
    )
    store.evict(keys[1], forget=False)
    engine = make(2)
    offered, tables, (job,), report = engine.load(tokens)
    assert offered == 3 * BLOCK
    assert report.failed_blocks == {job.job_id: 1}
    bad = tables[0][BLOCK // 4 : 3 * BLOCK // 4]
    assert report.invalid_block_ids == set(bad)


def test_trap_a_shard_that_changes_while_it_is_read_fails_the_load(
    make: Make, store: MemoryBlockStore
) -> None:
    """Any of them, not only the first."""
    tokens = prompt(1)
    writer = make(4)
    writer.save(tokens)
    (key,) = (
        writer.layout.groups[0].namespaces[3].engine_keys(writer.request("r", tokens).block_hashes)
    )
    store.on_check = lambda: store.evict(key, forget=False) and None
    _, tables, (job,), report = make(1).load(tokens)
    assert report.failed_blocks == {job.job_id: 0}
    assert report.invalid_block_ids == set(tables[0][:2])


def test_a_pipeline_stage_reads_the_shards_of_its_own_layers() -> None:
    topology = TpKVTopology.of(2, 2, 4)
    geometry = KVGeometry(layers=3, heads=2, channel_bytes=8, engine_block_tokens=4)
    splits = splits_of({}, geometry, topology, BLOCK, (1, 4))
    group = GroupLayout(geometry=geometry, topology=topology, splits=splits)
    own, one, four = ([p.shard for p in GroupReads(group, 3, BLOCK).pieces(i)] for i in range(3))
    assert (own, one, four) == ([3], [1], [6, 7])
    for split, shards in zip(splits, (own, one, four), strict=True):
        assert {split.namespaces[shard].fields["pp_rank"] for shard in shards} == {1}


def test_trap_prompts_that_differ_in_more_than_tokens_never_share(make: Make) -> None:
    tokens = prompt(2)
    make(2).save(tokens, salt="a")
    for salt, offered in (("a", 2 * BLOCK), ("b", 0), (None, 0)):
        assert make(4).load(tokens, salt)[0] == offered


def test_reset_clears_what_engines_of_other_sizes_saved_here(
    make: Make, store: MemoryBlockStore
) -> None:
    for writer in (1, 2, 4):
        make(writer).save(prompt(2))
    engine = make(2)
    engine.load(prompt(2))
    assert engine.scheduler.reset() is True
    assert store.sealed() == []


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_geometry_any_pair_of_engines_byte_for_byte(data: st.DataObject) -> None:
    dtype, size = data.draw(
        st.sampled_from([("bfloat16", 2), ("float32", 4), ("float8_e4m3fn", 1), ("uint8", 1)])
    )
    heads = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8]), "heads")
    model = Model(
        layers=data.draw(st.integers(1, 3), "layers"),
        heads=heads,
        channel_bytes=size * data.draw(st.integers(1, 9), "channels"),
        dtype=dtype,
    )
    sizes = [s for s in (1, 2, 3, 4, 6, 8) if not max(s, heads) % min(s, heads)]
    block_tokens = data.draw(st.sampled_from([8, 16, 24]), "block tokens")
    blocks = [b for b in (2, 4, 8, 12, 16) if not block_tokens % b]
    orders = st.sampled_from(["HND", "NHD"])
    rng = random.Random(data.draw(st.integers(0, 1 << 16), "seed"))
    tokens = [rng.randrange(32000) for _ in range(rng.randrange(block_tokens, 3 * block_tokens))]
    store = MemoryBlockStore()
    engines = [
        TpEngine(
            store,
            model,
            data.draw(st.sampled_from(sizes), "tp"),
            engine_block=data.draw(st.sampled_from(blocks), "engine block"),
            block_tokens=block_tokens,
            order=data.draw(orders, "order"),
            tp_sizes=sizes,
            seed=i,
        )
        for i in (1, 2)
    ]
    try:
        engines[0].save(tokens)
        offered, tables, _, report = engines[1].load(tokens)
        assert offered == len(tokens) // block_tokens * block_tokens
        assert report.invalid_block_ids == set()
        engines[1].check(tokens, offered, tables)
    finally:
        for engine in engines:
            engine.close()
