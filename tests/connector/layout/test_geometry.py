"""Sizes, shards and namespaces."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from each_input import each

from connector.layout.geometry import (
    KVGeometry,
    check_block_tokens,
    default_block_tokens,
    splits_of,
)
from connector.layout.topology import TpKVTopology
from kvstore import UsageError


def geometry(**changes: int) -> KVGeometry:
    base = {"layers": 32, "heads": 8, "channel_bytes": 512, "engine_block_tokens": 16}
    return KVGeometry(**{**base, **changes})


@each(
    ("changes", "tokens"),
    [
        ({}, 64),  # 16 KiB a token and head, and up to 8 workers share the heads
        ({"heads": 1}, 64),
        ({"heads": 32}, 16),  # 64 KiB a token of the smallest shard
        ({"layers": 2, "heads": 1}, 64),  # would be 1024
        ({"layers": 2, "heads": 1, "engine_block_tokens": 24}, 48),  # a multiple, below 64
        ({"layers": 1, "heads": 1, "engine_block_tokens": 512}, 512),  # never below one
    ],
)
def test_default_block_is_a_mebibyte_or_64_tokens(changes: dict[str, int], tokens: int) -> None:
    assert default_block_tokens([(geometry(**changes), TpKVTopology.of(), None)]) == tokens


@each("tp_size", [1, 2, 4, 8, 16])
def test_trap_the_default_block_is_the_same_for_every_tensor_parallel_size(tp_size: int) -> None:
    own = geometry(heads=max(1, 8 // tp_size))
    topology = TpKVTopology.of(tp_size, 1, 8)
    assert default_block_tokens([(own, topology, None)]) == 64


def test_the_default_block_counts_what_a_worker_has_of_its_tokens() -> None:
    """Entries of several tokens, as of a worker that has every other one."""
    own = geometry(channel_bytes=4096, layers=8, heads=8, engine_block_tokens=8)
    assert default_block_tokens([(own, TpKVTopology.of(), None)]) == 32
    half = replace(own, tokens_per_slot=Fraction(2))
    assert default_block_tokens([(half, TpKVTopology.of(), None)]) == 64


def test_the_default_block_fits_into_a_window_and_holds_every_groups_blocks() -> None:
    small = geometry(layers=2, heads=1)
    large = geometry(layers=2, heads=1, engine_block_tokens=64)
    assert default_block_tokens([(small, TpKVTopology.of(), None)]) == 64
    assert default_block_tokens([(small, TpKVTopology.of(), 50)]) == 32
    assert (
        default_block_tokens([(small, TpKVTopology.of(), 20), (large, TpKVTopology.of(), None)])
        == 64
    )


@pytest.mark.parametrize("tokens", [0, 8, 24, 1 << 17])
def test_block_tokens_must_be_a_multiple_of_the_engines(tokens: int) -> None:
    with pytest.raises(UsageError, match="multiple of the engine's block size 16"):
        check_block_tokens(tokens, 16)


MODEL = {"model": "m", "hash_algorithm": "sha256_cbor", "hash_seed": "unset"}


class TestSplits:
    def heads(self, topology: TpKVTopology, heads: int, *tp_sizes: int) -> list[list[object]]:
        splits = splits_of(MODEL, geometry(heads=heads), topology, 64, tp_sizes)
        return [
            [(ns.fields["head_first"], ns.fields["heads"]) for ns in s.namespaces] for s in splits
        ]

    def test_trap_an_engine_comes_first_and_others_by_their_heads(self) -> None:
        topology = TpKVTopology.of(2, 1, 4)
        assert self.heads(topology, 2, 1, 2, 4, 8) == [
            [(0, 2), (2, 2)],
            [(0, 4)],
            [(0, 1), (1, 1), (2, 1), (3, 1)],  # also of 8 workers: pairs of replicas
        ]

    def test_sizes_that_cannot_run_the_model_are_left_out(self) -> None:
        assert self.heads(TpKVTopology.of(3, 1, 6), 2, 4, 2) == [
            [(0, 2), (2, 2), (4, 2)],
            [(0, 3), (3, 3)],
        ]

    def test_trap_a_shard_has_one_name_whatever_the_readers_size(self) -> None:
        own = {}
        for tp_size in (1, 2, 4, 8):
            topology = TpKVTopology.of(tp_size, 1, 4)
            splits = splits_of(
                MODEL, geometry(heads=max(1, 4 // tp_size)), topology, 64, (1, 2, 4, 8)
            )
            own[tp_size] = splits[0]
            assert {s.tp_shards for s in splits} == {1, 2, 4}
            for split in splits:
                for other in own.values():
                    if other.tp_shards == split.tp_shards:
                        assert other.namespaces == split.namespaces


class TestNamespaces:
    def one(self, model: dict[str, str] | None = None, tokens: int = 64, **changes: int):
        (own,) = splits_of(model or MODEL, geometry(**changes), TpKVTopology.of(), tokens)
        return own.namespaces[0]

    def test_every_shard_has_its_own(self) -> None:
        topology = TpKVTopology.of(4, 2)
        (own,) = splits_of(MODEL, geometry(), topology, 64)
        assert len({namespace.fingerprint for namespace in own.namespaces}) == 8

    def test_trap_hash_algorithm_and_seed_are_part_of_it(self) -> None:
        for name in ("hash_algorithm", "hash_seed"):
            assert self.one({**MODEL, name: "other"}) != self.one()

    def test_trap_layout_is_part_of_it(self) -> None:
        fields = self.one().fields
        assert (fields["layout"], fields["layout_version"]) == ("LHNC", 1)

    @pytest.mark.parametrize(
        "changes", [{"heads": 4}, {"channel_bytes": 256}, {"engine_block_tokens": 32}]
    )
    def test_what_changes_the_bytes_or_the_hashes_changes_it(self, changes: dict[str, int]) -> None:
        assert self.one(**changes) != self.one()

    def test_block_tokens_are_part_of_it(self) -> None:
        assert self.one(tokens=128) != self.one()
