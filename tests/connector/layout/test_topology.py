"""Which heads a worker needs from engines of other sizes; compared with vLLM's own answers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.layout.topology import HeadRange, HeadRead, RegionRange, TpKVTopology, shards_of
from kvstore import UsageError


def topology(
    rank: int, size: int, heads: int, *, block: int = 16, mla: bool = False, packed: bool = True
) -> TpKVTopology:
    return TpKVTopology(
        tp_rank=rank,
        tp_size=size,
        total_kv_heads=heads,
        block_tokens=block,
        is_mla=mla,
        packed=packed,
    )


def test_trap_a_small_reader_takes_all_heads_of_several_writers() -> None:
    assert topology(1, 2, 8).reads(4) == (HeadRead(2, 2, 0, 0, 2), HeadRead(3, 3, 0, 2, 2))
    assert topology(1, 2, 8).tp_ratio(4) == -2


def test_trap_a_large_reader_takes_its_part_of_one_writer() -> None:
    assert topology(3, 4, 8).reads(2) == (HeadRead(1, 1, 2, 0, 2),)
    assert topology(3, 4, 8).tp_ratio(2) == 2


def test_sizes_that_do_not_divide_one_another_still_share_heads() -> None:
    assert topology(0, 2, 6).reads(3) == (HeadRead(0, 0, 0, 0, 2), HeadRead(1, 1, 0, 2, 1))
    with pytest.raises(UsageError, match="one must divide the other"):
        topology(0, 2, 6).tp_ratio(3)


def test_trap_a_replicated_head_is_read_once_and_saved_once() -> None:
    assert topology(0, 1, 2).reads(8) == (HeadRead(0, 0, 0, 0, 1), HeadRead(4, 1, 0, 1, 1))
    assert [topology(rank, 8, 2).saves for rank in range(8)] == [True, *[False] * 3] * 2
    assert [topology(rank, 8, 2).mine for rank in (3, 4)] == [HeadRange(0, 1), HeadRange(1, 1)]


def test_trap_readers_spread_over_replicas() -> None:
    assert [topology(rank, 4, 2).target_remote_ranks(8) for rank in range(4)] == [
        [0],
        [2],
        [4],
        [6],
    ]


def test_latent_attention_is_one_head_that_all_hold_and_the_first_saves() -> None:
    for size in (1, 2, 4):
        for remote in (1, 2, 4, 8):
            for rank in range(size):
                reads = topology(rank, size, 128, mla=True).reads(remote)
                assert [read[2:] for read in reads] == [(0, 0, 1)]
    assert [topology(rank, 4, 128, mla=True).saves for rank in range(4)] == [True, *[False] * 3]


@pytest.mark.parametrize(("mine", "theirs", "ratio"), [(32, 16, 2), (16, 64, -4), (16, 16, 1)])
def test_block_size_ratio_goes_both_ways(mine: int, theirs: int, ratio: int) -> None:
    assert topology(0, 1, 1, block=mine).block_size_ratio(theirs) == ratio
    with pytest.raises(UsageError, match="one must divide the other"):
        topology(0, 1, 1, block=48).block_size_ratio(32)


def test_trap_split_k_and_v_are_two_regions_of_half_the_bytes() -> None:
    read = HeadRead(0, 0, 3, 0, 2)
    assert topology(0, 1, 8).regions(read, 100) == (RegionRange(0, 300, 200),)
    assert topology(0, 1, 8, packed=False).regions(read, 100) == (
        RegionRange(0, 150, 100),
        RegionRange(1, 150, 100),
    )
    latent = topology(0, 1, 8, mla=True, packed=False)
    assert not latent.split_k_and_v
    with pytest.raises(UsageError, match="multiple of 2"):
        topology(0, 1, 8, packed=False).regions(read, 101)


@pytest.mark.parametrize(
    ("rank", "size", "heads", "block"), [(2, 2, 8, 16), (-1, 2, 8, 16), (0, 4, 6, 16), (0, 1, 8, 0)]
)
def test_what_no_engine_could_have_is_refused(rank: int, size: int, heads: int, block: int) -> None:
    with pytest.raises(UsageError):
        topology(rank, size, heads, block=block)


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])


@given(SIZES, SIZES, SIZES)
def test_every_head_of_a_worker_comes_from_where_it_is_and_exactly_once(
    size: int, remote: int, heads: int
) -> None:
    for tp_size in (size, remote):
        if max(tp_size, heads) % min(tp_size, heads):
            with pytest.raises(UsageError):
                shards_of(tp_size, heads)
            return
    for rank in range(size):
        one = topology(rank, size, heads)
        got: dict[int, int] = {}
        for read in one.reads(remote):
            theirs = one.heads_of(read.rank, remote)
            for i in range(read.heads):
                assert read.target + i not in got
                assert read.source + i < theirs.heads
                got[read.target + i] = theirs.first + read.source + i
        assert got == {i: one.mine.first + i for i in range(one.mine.heads)}


@pytest.mark.vllm
def test_vllms_own_topology_gives_the_same_answers() -> None:
    from vllm.distributed.kv_transfer.kv_connector.utils import (
        EngineTransferInfo,
        TransferTopology,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    rng = random.Random(0)
    compared = refused = 0
    for _ in range(3000):
        heads = rng.choice([1, 2, 4, 8, 16])
        size, remote = rng.choice([1, 2, 4, 8, 16]), rng.choice([1, 2, 4, 8, 16])
        rank, mla = rng.randrange(size), rng.random() < 0.25
        block, remote_block = rng.choice([16, 32, 48, 64]), rng.choice([16, 32, 48, 64])
        ours = topology(rank, size, heads, block=block, mla=mla)
        theirs = TransferTopology(rank, size, block, "here", mla, False, heads, [])
        theirs.register_remote_engine("there", EngineTransferInfo(remote, 1, remote_block, 1))
        mapping = compute_tp_mapping(theirs, remote, (FullAttentionSpec,))
        reads = ours.reads(remote)
        assert ours.tp_ratio(remote) == theirs.tp_ratio(remote)
        assert tuple(read.rank for read in reads) == mapping.source_ranks_per_group[0]
        if not mla and size < remote:
            count = reads[0].heads
            slots = [mapping.rank_to_attention_slot[read.rank] for read in reads]
            assert [read.target for read in reads] == [slot * count for slot in slots]
        else:
            unit = 1 if mla else theirs.local_physical_heads
            assert reads[0].source == mapping.rank_offset_factor * unit
        assert ours.is_kv_replicated(remote) == (
            theirs.replicates_kv_cache("there") and (remote > 1 or not mla)
        )
        try:
            ratio = theirs.block_size_ratio(remote_block)
        except AssertionError:
            refused += 1  # vLLM goes one way only
            if remote_block % block:
                with pytest.raises(UsageError):
                    ours.block_size_ratio(remote_block)
        else:
            assert ours.block_size_ratio(remote_block) == ratio
            compared += 1
    assert compared > 1000
    assert refused > 500
