"""Which heads a worker has and needs from engines of other sizes; compared with vLLM's own answers.

The expected values of the fake backends are those of the class of this name in vLLM 0.14 to 0.19.
"""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
from each_input import each
from hypothesis import given
from hypothesis import strategies as st

from connector.layout.topology import HeadRange, HeadRead, TpKVTopology, reads_of, shards_of
from kvstore import UsageError


def topology(
    rank: int, size: int, heads: int, *, block: int = 16, mla: bool = False, **more: Any
) -> TpKVTopology:
    more.setdefault("attn_backend", None)
    return TpKVTopology(
        tp_rank=rank,
        remote_tp_size={"here": size},
        is_mla=mla,
        total_num_kv_heads=heads,
        engine_id="here",
        remote_block_size={"here": block},
        **more,
    )


class TestPlaces:
    def test_trap_each_worker_of_a_model_with_enough_heads_has_a_shard(self) -> None:
        topology = TpKVTopology.of(tp_size=4, pp_size=2, total_num_kv_heads=8)
        assert [topology.at(rank).shard for rank in range(8)] == list(range(8))
        assert all(topology.at(rank).saves for rank in range(8))
        assert topology.workers == 8

    @pytest.mark.parametrize(("size", "stages", "heads"), [(8, 1, 2), (4, 2, 1)])
    def test_trap_workers_beyond_the_heads_hold_replicas_and_one_saves(
        self, size: int, stages: int, heads: int
    ) -> None:
        topology = TpKVTopology.of(size, stages, heads)
        assert [topology.at(rank).shard for rank in range(8)] == [0] * 4 + [1] * 4
        assert [rank for rank in range(8) if topology.at(rank).saves] == [0, 4]

    def test_latent_attention_is_one_shard_for_all_whatever_the_models_heads(self) -> None:
        assert [topology(rank, 4, 128, mla=True).shard for rank in range(4)] == [0] * 4
        assert [topology(rank, 4, 128, mla=True).saves for rank in range(4)] == [True, *[False] * 3]

    @each(
        ("rank", "size", "heads", "block"),
        [(2, 2, 8, 16), (-1, 2, 8, 16), (0, 4, 6, 16), (0, 4, 3, 16), (0, 1, 8, 0)],
    )
    def test_what_no_engine_could_have_is_refused(
        self, rank: int, size: int, heads: int, block: int
    ) -> None:
        with pytest.raises(UsageError):
            topology(rank, size, heads, block=block)

    def test_a_worker_beyond_the_last_is_refused(self) -> None:
        with pytest.raises(UsageError, match="pp_rank"):
            TpKVTopology.of(2, 2).at(4)


class TestReads:
    def test_trap_a_small_reader_takes_all_heads_of_several_writers(self) -> None:
        assert reads_of(HeadRange(4, 4), 4, 8) == [HeadRead(2, 0, 0, 2), HeadRead(3, 0, 2, 2)]

    def test_trap_a_large_reader_takes_its_part_of_one_writer(self) -> None:
        assert reads_of(HeadRange(6, 2), 2, 8) == [HeadRead(1, 2, 0, 2)]

    def test_sizes_that_do_not_divide_one_another_still_share_heads(self) -> None:
        assert reads_of(HeadRange(0, 3), 3, 6) == [HeadRead(0, 0, 0, 2), HeadRead(1, 0, 2, 1)]


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
    theirs = TpKVTopology.of(remote, 1, heads).tp_shards
    for rank in range(size):
        one = TpKVTopology.of(size, 1, heads).at(rank)
        mine = HeadRange(one.tp_shard * (heads // one.tp_shards), heads // one.tp_shards)
        got: dict[int, int] = {}
        for read in reads_of(mine, theirs, heads):
            for i in range(read.heads):
                assert read.target + i not in got
                assert read.source + i < heads // theirs
                got[read.target + i] = read.shard * (heads // theirs) + read.source + i
        assert got == {i: mine.first + i for i in range(mine.heads)}


class TestOfVllmsName:
    @pytest.mark.parametrize(("mine", "theirs", "ratio"), [(32, 16, 2), (16, 64, -4), (16, 16, 1)])
    def test_block_size_ratio_goes_both_ways(self, mine: int, theirs: int, ratio: int) -> None:
        one = topology(0, 1, 1, block=mine)
        one.remote_block_size["there"] = theirs
        assert one.block_size_ratio(theirs) == ratio
        assert one.block_size_ratio_from_engine_id("there") == ratio
        with pytest.raises(UsageError, match="one must divide the other"):
            topology(0, 1, 1, block=48).block_size_ratio(32)

    def test_trap_an_engine_that_is_met_later_counts(self) -> None:
        one = topology(1, 2, 4)
        one.remote_tp_size["there"] = 8
        assert one.tp_ratio_from_engine_id("there") == -4
        assert one.get_target_remote_ranks_from_engine_id("there") == [4, 5, 6, 7]
        assert one.is_kv_replicated("there")
        assert not one.is_kv_replicated("here")
        with pytest.raises(UsageError, match="get_target_remote_ranks"):
            one.get_target_remote_rank_from_engine_id("there")
        with pytest.raises(KeyError):
            one.tp_ratio_from_engine_id("elsewhere")

    def test_latent_attention_is_replicated_everywhere(self) -> None:
        one = topology(0, 1, 8, mla=True)
        assert one.replicates_kv_cache("here")
        assert not one.is_kv_replicated("here")

    @each(
        ("shape", "more", "blocks_first", "across", "split", "position"),
        [
            ((2, 1, 16, 1, 1), {}, False, False, True, -3),  # FlashAttention, FlexAttention
            ((1, 2, 16, 1, 1), {}, True, False, False, -3),  # FlashInfer, Triton
            ((1, 16, 1), {"mla": True}, False, False, False, -2),
            ((1, 2, 16, 1, 1), {"tensor_shape": (9, 9, 2, 16, 4, 8)}, True, True, False, -3),
            ((2, 1, 16, 1, 1), {"tensor_shape": (2, 9, 16, 4, 8)}, False, False, True, -3),
            ((2, 1, 16, 1, 1), {"is_mamba": True}, True, False, False, -3),
        ],
    )
    def test_how_kv_lies_follows_from_the_attention_backend(
        self,
        shape: tuple[int, ...],
        more: dict[str, Any],
        blocks_first: bool,
        across: bool,
        split: bool,
        position: int,
    ) -> None:
        backend = SimpleNamespace(get_kv_cache_shape=lambda **_: shape)
        for backends in (backend, [backend]):
            one = topology(0, 1, 8, attn_backend=backends, **more)
            assert one.is_kv_layout_blocks_first == blocks_first
            assert one.cross_layers_blocks == across
            assert one.split_k_and_v == split
            assert one.block_size_position == position

    def test_a_backends_own_order_in_memory_moves_the_tokens(self) -> None:
        backend = SimpleNamespace(
            get_kv_cache_shape=lambda **_: (1, 2, 16, 1, 1),
            get_kv_cache_stride_order=lambda include_num_layers_dimension: (1, 2, 0, 4, 3, 5),
        )
        shape = (9, 2, 80, 4, 16, 8)
        one = topology(0, 1, 8, attn_backend=backend, tensor_shape=shape)
        assert one.block_size_position == -2


SIZES = (1, 2, 3, 4, 6, 8, 12, 16)


def test_the_class_of_this_name_gives_the_same_answers() -> None:
    """That of vLLM 0.14, for all sizes and ranks: what it asserts is refused here, and what it
    answers is the same, but that there is an answer here too where the other engine is larger."""
    compared = refused = 0
    for heads in SIZES:
        for size in (size for size in SIZES if max(size, heads) % min(size, heads) == 0):
            for rank, remote, mla in itertools.product(range(size), SIZES, (False, True)):
                one = topology(rank, size, heads, mla=mla)
                one.remote_tp_size["there"] = remote
                replicated = remote // heads >= 1
                assert one.is_kv_replicated("there") == replicated
                assert one.replicates_kv_cache("there") == (mla or replicated)
                if size % remote == 0:
                    assert one.tp_ratio_from_engine_id("there") == one.tp_ratio(remote)
                    assert one.tp_ratio(remote) == size // remote
                    there = one.get_target_remote_rank(remote)
                    assert there == rank // (size // remote)
                    assert one.get_target_remote_rank_from_engine_id("there") == there
                    assert one.get_target_remote_ranks(remote) == [there]
                    compared += 1
                    continue
                refused += 1
                for ask in (
                    lambda: one.get_target_remote_rank(remote),  # noqa: B023
                    lambda: one.get_target_remote_rank_from_engine_id("there"),  # noqa: B023
                ):
                    with pytest.raises(UsageError):
                        ask()
                if remote % size == 0:
                    assert one.tp_ratio(remote) == -(remote // size)
                else:
                    with pytest.raises(UsageError):
                        one.tp_ratio(remote)
    assert compared > 500
    assert refused > 500


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
        ours.remote_tp_size["there"] = remote
        theirs = TransferTopology(rank, size, block, "here", mla, False, heads, [])
        theirs.register_remote_engine("there", EngineTransferInfo(remote, 1, remote_block, 1))
        assert ours.tp_ratio(remote) == theirs.tp_ratio(remote)
        ranks = theirs.target_remote_ranks("there")
        assert ours.get_target_remote_ranks_from_engine_id("there") == ranks
        if remote <= size:
            assert [ours.get_target_remote_rank_from_engine_id("there")] == ranks
        # The class that has followed the one of this name counts equal numbers otherwise.
        if remote != heads:
            assert ours.is_kv_replicated("there") == theirs.is_kv_replicated("there")
            assert ours.replicates_kv_cache("there") == theirs.replicates_kv_cache("there")
        if size != heads:
            assert ours.replicates_kv_cache("here") == theirs.local_replicates_kv_cache
        if not mla:
            assert ours.heads // ours.tp_shards == theirs.local_physical_heads
        mapping = compute_tp_mapping(theirs, remote, (FullAttentionSpec,))
        count = ours.heads // ours.tp_shards
        shards = shards_of(remote, ours.heads)
        reads = reads_of(HeadRange(ours.tp_shard * count, count), shards, ours.heads)
        sources = mapping.source_ranks_per_group[0]
        assert [read.shard for read in reads] == [r // (remote // shards) for r in sources]
        if not mla and size < remote:
            slots = [mapping.rank_to_attention_slot[r] for r in sources]
            assert [read.target for read in reads] == [slot * reads[0].heads for slot in slots]
        else:
            assert reads[0].source == mapping.rank_offset_factor * count
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
