"""Sizes, shards and namespaces."""

from __future__ import annotations

import pytest

from connector.geometry import KVGeometry, ShardTopology, shard_namespaces
from kvstore import UsageError


def geometry(**changes: int) -> KVGeometry:
    base = {"layers": 32, "heads": 8, "channel_bytes": 512, "engine_block_tokens": 16}
    return KVGeometry(**{**base, **changes})


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, 16),  # 2 MiB in one engine block
        ({"heads": 1}, 64),  # 16 KiB a token
        ({"layers": 2, "heads": 1}, 256),  # would be 1024
        ({"layers": 2, "heads": 1, "engine_block_tokens": 24}, 192),  # a multiple, below 256
        ({"layers": 1, "heads": 1, "engine_block_tokens": 512}, 512),  # never below one
    ],
)
def test_default_block_is_a_mebibyte_or_256_tokens(changes: dict[str, int], tokens: int) -> None:
    assert geometry(**changes).default_block_tokens() == tokens


@pytest.mark.parametrize("tokens", [0, 8, 24, 1 << 17])
def test_block_tokens_must_be_a_multiple_of_the_engines(tokens: int) -> None:
    with pytest.raises(UsageError, match="multiple of the engine's block size 16"):
        geometry().check_block_tokens(tokens)


class TestTopology:
    def test_trap_each_worker_of_a_model_with_enough_heads_has_a_shard(self) -> None:
        topology = ShardTopology.of(tp_size=4, pp_size=2, total_kv_heads=8)
        assert [topology.shard_of(rank) for rank in range(8)] == list(range(8))
        assert all(topology.saves(rank) for rank in range(8))

    def test_trap_workers_beyond_the_heads_hold_replicas_and_one_saves(self) -> None:
        topology = ShardTopology.of(tp_size=8, pp_size=1, total_kv_heads=2)
        assert [topology.shard_of(rank) for rank in range(8)] == [0] * 4 + [1] * 4
        assert [rank for rank in range(8) if topology.saves(rank)] == [0, 4]

    def test_latent_attention_is_one_shard_for_all(self) -> None:
        topology = ShardTopology.of(tp_size=4, pp_size=2, total_kv_heads=1)
        assert [topology.shard_of(rank) for rank in range(8)] == [0] * 4 + [1] * 4
        assert [rank for rank in range(8) if topology.saves(rank)] == [0, 4]

    def test_heads_that_cannot_be_split_evenly_are_refused(self) -> None:
        with pytest.raises(UsageError, match="tp_shards"):
            ShardTopology.of(tp_size=4, pp_size=1, total_kv_heads=3)


MODEL = {"model": "m", "hash_algorithm": "sha256_cbor", "hash_seed": "unset"}


class TestNamespaces:
    def one(self, model: dict[str, str] | None = None, tokens: int = 64, **changes: int):
        return shard_namespaces(model or MODEL, geometry(**changes), ShardTopology(), tokens)[0]

    def test_every_shard_has_its_own(self) -> None:
        topology = ShardTopology(tp_size=4, pp_size=2, tp_shards=4)
        namespaces = shard_namespaces(MODEL, geometry(), topology, 64)
        assert len({namespace.fingerprint for namespace in namespaces}) == 8

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
