"""Computes which KV heads each tensor-parallel worker holds, and where another engine keeps them.

Pure arithmetic, the same for a peer that is read directly and for blocks that a
peer's workers have saved. Heads go to workers in order. With more workers than
heads, neighbours hold replicas of one head; latent attention (MLA) is one head
that all hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvstore import UsageError


class HeadRange(NamedTuple):
    """KV heads `first` to `first + heads - 1`."""

    first: int
    heads: int

    @property
    def end(self) -> int:
        return self.first + self.heads


class HeadRead(NamedTuple):
    """Heads that a worker takes from one worker of the other engine."""

    rank: int
    """Tensor-parallel rank of the other worker."""
    shard: int
    """Which distinct part of the other engine's heads it holds; replicas share one."""
    source: int
    """First head, counted within the other worker's heads."""
    target: int
    """Where it goes, counted within the reader's heads."""
    heads: int


class RegionRange(NamedTuple):
    """Consecutive bytes of one layer's block in one region of a worker's memory."""

    region: int
    """0: K, or K and V packed; 1: V."""
    offset_bytes: int
    length_bytes: int


def shards_of(tp_size: int, total_kv_heads: int) -> int:
    """Distinct parts of the KV among `tp_size` workers.

    Raises `UsageError` when heads and workers do not divide one another: no
    engine places them then in a way that this module knows.
    """
    if tp_size < 1 or total_kv_heads < 1:
        raise UsageError("tp_size, kv_heads", (tp_size, total_kv_heads), "must be at least 1")
    large, small = max(tp_size, total_kv_heads), min(tp_size, total_kv_heads)
    if large % small:
        raise UsageError(
            "tp_size",
            tp_size,
            f"must divide the {total_kv_heads} KV heads or be a multiple of them",
        )
    return small


def reads_of(mine: HeadRange, shards: int, total_kv_heads: int) -> list[HeadRead]:
    """Where heads `mine` are when `total_kv_heads` are split evenly into `shards`.

    `rank` is the shard's number: no replicas are considered.
    """
    per_shard = total_kv_heads // shards
    reads: list[HeadRead] = []
    for shard in range(mine.first // per_shard, -(-mine.end // per_shard)):
        first = max(mine.first, shard * per_shard)
        end = min(mine.end, (shard + 1) * per_shard)
        reads.append(
            HeadRead(shard, shard, first - shard * per_shard, first - mine.first, end - first)
        )
    return reads


@dataclass(frozen=True, slots=True, kw_only=True)
class TpKVTopology:
    """One worker's place among its engine's, towards engines of other sizes.

    Raises `UsageError` for a rank outside its size and for heads that the
    workers cannot share evenly.
    """

    tp_rank: int
    tp_size: int
    total_kv_heads: int
    """Of the whole model; counts as 1 with `is_mla`."""
    block_tokens: int
    """Tokens of one of this engine's blocks."""
    is_mla: bool = False
    packed: bool = True
    """K and V of a token lie side by side; otherwise in two regions."""

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size:
            raise UsageError("tp_rank", self.tp_rank, f"must be below tp_size {self.tp_size}")
        if self.block_tokens < 1:
            raise UsageError("block_tokens", self.block_tokens, "must be at least 1")
        shards_of(self.tp_size, self.heads)

    @property
    def heads(self) -> int:
        """Distinct KV heads of the model."""
        return 1 if self.is_mla else self.total_kv_heads

    @property
    def split_k_and_v(self) -> bool:
        """K and V are in regions of their own. A latent is one vector: nothing to split."""
        return not (self.packed or self.is_mla)

    @property
    def mine(self) -> HeadRange:
        """Heads that this worker holds."""
        return self.heads_of(self.tp_rank, self.tp_size)

    @property
    def saves(self) -> bool:
        """Whether this is the replica that saves: the first one."""
        return self.tp_rank % self.replicas(self.tp_size) == 0

    def heads_of(self, rank: int, tp_size: int) -> HeadRange:
        """Heads of worker `rank` in an engine of `tp_size` workers."""
        shards = shards_of(tp_size, self.heads)
        per_shard = self.heads // shards
        return HeadRange(rank // (tp_size // shards) * per_shard, per_shard)

    def replicas(self, tp_size: int) -> int:
        """How many workers of an engine of `tp_size` hold the same heads."""
        return tp_size // shards_of(tp_size, self.heads)

    def is_kv_replicated(self, tp_size: int) -> bool:
        """Whether several workers of an engine of `tp_size` hold the same heads."""
        return self.replicas(tp_size) > 1

    def tp_ratio(self, remote_tp_size: int) -> int:
        """Workers here per worker there; negative: workers there per worker here.

        Raises `UsageError` when neither size divides the other.
        """
        return _ratio("tp_size", self.tp_size, remote_tp_size)

    def block_size_ratio(self, remote_block_tokens: int) -> int:
        """Remote blocks in one of this engine's; negative: the other way round.

        Raises `UsageError` when neither size divides the other.
        """
        return _ratio("block_tokens", self.block_tokens, remote_block_tokens)

    def reads(self, remote_tp_size: int) -> tuple[HeadRead, ...]:
        """All this worker's heads, each once, from workers of an engine of `remote_tp_size`.

        Among replicas it takes the one nearest to its own place, so that the
        readers spread over them.
        """
        shards = shards_of(remote_tp_size, self.heads)
        replicas = remote_tp_size // shards
        near = self.tp_rank * remote_tp_size // self.tp_size
        return tuple(
            read._replace(rank=max(near, read.shard * replicas))
            for read in reads_of(self.mine, shards, self.heads)
        )

    def target_remote_ranks(self, remote_tp_size: int) -> list[int]:
        """Workers of the other engine that this one reads from, in the order of their heads."""
        return [read.rank for read in self.reads(remote_tp_size)]

    def regions(self, read: HeadRead, head_bytes: int) -> tuple[RegionRange, ...]:
        """What `read` covers in one layer's block of the other worker's memory.

        `head_bytes` is one head's share of the block, K and V together, with
        heads outside tokens: a range of heads is then one range of bytes in
        each region, two with K and V apart, one otherwise.
        """
        count = 2 if self.split_k_and_v else 1
        if head_bytes < 1 or head_bytes % count:
            raise UsageError("head_bytes", head_bytes, f"must be a multiple of {count}")
        each = head_bytes // count
        return tuple(
            RegionRange(region, read.source * each, read.heads * each) for region in range(count)
        )


def _ratio(name: str, mine: int, theirs: int) -> int:
    if theirs < 1 or max(mine, theirs) % min(mine, theirs):
        raise UsageError(name, (mine, theirs), "one must divide the other")
    return mine // theirs if mine >= theirs else -(theirs // mine)
