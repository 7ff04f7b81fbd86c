"""Computes which KV heads each worker holds, and where engines of other sizes keep them.

Pure arithmetic. Heads go to tensor-parallel workers in order. With more workers than heads,
neighbours hold replicas of one head: all of them load, the first of them saves. Latent attention
(MLA) is one head that all hold. Workers that hold the same heads may share the tokens of a block
instead (decode context parallelism): then each has a part of them, and only those of the same part
are replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvstore import UsageError


class HeadRange(NamedTuple):
    """Names KV heads `first` to `first + heads - 1`."""

    first: int
    heads: int

    @property
    def end(self) -> int:
        return self.first + self.heads


class HeadRead(NamedTuple):
    """Says which heads a worker takes from one shard of a writer's."""

    shard: int
    """Number of the writer's distinct part of the heads."""
    source: int
    """First head, counted within the shard's heads."""
    target: int
    """First head at the target, counted within the reader's heads."""
    heads: int


def shards_of(tp_size: int, total_kv_heads: int) -> int:
    """Return how many distinct parts of the KV there are among `tp_size` workers.

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
    """Return where heads `mine` are when `total_kv_heads` are split evenly into `shards`."""
    per_shard = total_kv_heads // shards
    reads: list[HeadRead] = []
    for shard in range(mine.first // per_shard, -(-mine.end // per_shard)):
        first = max(mine.first, shard * per_shard)
        end = min(mine.end, (shard + 1) * per_shard)
        reads.append(HeadRead(shard, first - shard * per_shard, first - mine.first, end - first))
    return reads


_PROBE_BLOCK_TOKENS = 16
"""Block size that an attention backend is asked about; no other dimension asked for has it."""
_PROBE_LAYERS = 80


@dataclass(frozen=True, slots=True)
class TpKVTopology:
    """Describes one worker's place in its engine, towards engines of other tensor-parallel sizes.

    Fields, properties and methods are those of the class of this name in earlier versions of
    vLLM (`kv_transfer/kv_connector/utils.py`); what follows `is_mamba` is ours. `of` makes one
    without an attention backend and tables of engines. Raises `UsageError` for ranks outside
    their sizes and for heads that the workers cannot share evenly.
    """

    tp_rank: int
    remote_tp_size: dict[str, int]
    """Tensor-parallel size by engine id, this engine's among them. May grow later."""
    is_mla: bool
    total_num_kv_heads: int
    """KV heads of the whole model; counts as 1 with `is_mla`."""
    attn_backend: object
    """vLLM's class of the attention backend, or several, of which the first counts. None: K and V
    of a block lie together."""
    engine_id: str
    remote_block_size: dict[str, int]
    """Tokens of a block by engine id, this engine's among them. May grow later."""
    tensor_shape: Sequence[int] | None = None
    """Shape of the tensor with the KV of all layers, where there is one."""
    is_mamba: bool = False
    pp_rank: int = 0
    pp_size: int = 1
    pcp_rank: int = 0
    pcp_size: int = 1
    """Size of prefill context parallelism: it multiplies the workers, each of which has all the KV
    that one has."""
    dcp_size: int = 1
    """Size of decode context parallelism: workers with the same heads divide the tokens of each
    block into this many parts."""

    def __post_init__(self) -> None:
        for name, rank, size in (
            ("tp_rank", self.tp_rank, self.tp_size),
            ("pcp_rank", self.pcp_rank, self.pcp_size),
            ("pp_rank", self.pp_rank, self.pp_size),
        ):
            if not 0 <= rank < size:
                raise UsageError(name, rank, f"must be from 0 to below its size {size}")
        if self.remote_block_size and self.block_size < 1:
            raise UsageError("block_size", self.block_size, "must be at least 1")
        shards_of(self.tp_size, self.heads)
        if self.dcp_size < 1 or self._same_heads % self.dcp_size:
            raise UsageError(
                "dcp_size", self.dcp_size, f"must divide the {self._same_heads} workers of a head"
            )

    @classmethod
    def of(
        cls,
        tp_size: int = 1,
        pp_size: int = 1,
        total_num_kv_heads: int | None = None,
        *,
        pcp_size: int = 1,
        dcp_size: int = 1,
    ) -> TpKVTopology:
        """Make the topology of the first worker of an engine that knows no other.

        `total_num_kv_heads` None: every tensor-parallel worker has heads of its own.
        """
        heads = tp_size if total_num_kv_heads is None else total_num_kv_heads
        one = cls(0, {"": tp_size}, False, heads, None, "", {})
        return replace(one, pp_size=pp_size, pcp_size=pcp_size, dcp_size=dcp_size)

    def at(self, rank: int) -> TpKVTopology:
        """Make the same for another worker; workers are counted by stage, then by prefill context
        rank, then by tensor-parallel rank."""
        pp_rank, within = divmod(rank, self.pcp_size * self.tp_size)
        pcp_rank, tp_rank = divmod(within, self.tp_size)
        return replace(self, tp_rank=tp_rank, pcp_rank=pcp_rank, pp_rank=pp_rank)

    @property
    def heads(self) -> int:
        """Return the number of distinct KV heads of the model."""
        return 1 if self.is_mla else self.total_num_kv_heads

    @property
    def workers(self) -> int:
        return self.tp_size * self.pcp_size * self.pp_size

    @property
    def tp_shards(self) -> int:
        """Return how many distinct parts of the KV the tensor-parallel workers of one stage
        have."""
        return shards_of(self.tp_size, self.heads)

    @property
    def tp_shard(self) -> int:
        """Return the number of the part that this worker holds, from 0."""
        return self.tp_rank // (self.tp_size // self.tp_shards)

    @property
    def _same_heads(self) -> int:
        """Return how many workers of one stage hold the heads that this one holds."""
        return self.tp_size // self.tp_shards * self.pcp_size

    @property
    def _among_same(self) -> int:
        """Return this worker's place among those: prefill context ranks of a tensor-parallel rank
        come one after another, as decode context parallelism counts them."""
        return self.tp_rank % (self.tp_size // self.tp_shards) * self.pcp_size + self.pcp_rank

    @property
    def dcp_rank(self) -> int:
        """Return which part of a block's tokens this worker holds."""
        return self._among_same % self.dcp_size

    @property
    def shard(self) -> int:
        """Return the number of its part among those of all stages, as `shard_of` counts them."""
        return self.shard_of(self.tp_shards, self.tp_shard)

    def shard_of(self, tp_shards: int, tp_shard: int) -> int:
        """Return the number of the shard with this worker's layers and tokens, where heads are in
        `tp_shards` parts: by stage, then by heads, then by tokens."""
        return (self.pp_rank * tp_shards + tp_shard) * self.dcp_size + self.dcp_rank

    @property
    def saves(self) -> bool:
        """Return whether this worker is the replica that saves its shard: the first."""
        return self._among_same < self.dcp_size

    @property
    def tp_size(self) -> int:
        return self.remote_tp_size[self.engine_id]

    @property
    def block_size(self) -> int:
        """Return the tokens of one of this engine's blocks."""
        return self.remote_block_size[self.engine_id]

    @property
    def is_kv_layout_blocks_first(self) -> bool:
        """Return whether a layer's cache counts blocks first, so that K and V of a block lie
        together."""
        if self.is_mamba or self.attn_backend is None:
            return True
        shape = self._cache_shape()
        return len(shape) == 5 and shape[0] == 1

    @property
    def cross_layers_blocks(self) -> bool:
        """Return whether one tensor holds the blocks of all layers."""
        if self.tensor_shape is None or self.attn_backend is None:
            return False
        return len(self.tensor_shape) == len(self._cache_shape()) + 1

    @property
    def split_k_and_v(self) -> bool:
        """Return whether K and V are in regions of their own."""
        return not (self.cross_layers_blocks or self.is_mla or self.is_kv_layout_blocks_first)

    @property
    def block_size_position(self) -> int:
        """Return the dimension of the cache that counts a block's tokens, from the end: -1 is the
        last.

        It is that in memory where `tensor_shape` is known, else as the backend names it.
        """
        shape = self._cache_shape()
        if self.tensor_shape is not None:
            across = self.cross_layers_blocks
            shape = (_PROBE_LAYERS, *shape) if across else shape
            try:
                order = self._backend.get_kv_cache_stride_order(include_num_layers_dimension=across)
            except (AttributeError, NotImplementedError):  # it has no order of its own
                order = range(len(shape))
            shape = tuple(shape[i] for i in order)
        return shape.index(_PROBE_BLOCK_TOKENS) - len(shape)

    @property
    def _backend(self) -> Any:
        found = self.attn_backend
        return found[0] if isinstance(found, list | tuple) else found

    def _cache_shape(self) -> tuple[int, ...]:
        return tuple(
            self._backend.get_kv_cache_shape(
                num_blocks=1, block_size=_PROBE_BLOCK_TOKENS, num_kv_heads=1, head_size=1
            )
        )

    def tp_ratio(self, remote_tp_size: int) -> int:
        """Return how many workers here make one there; negative: workers there for one here.

        Raises `UsageError` when neither size divides the other.
        """
        return _ratio("tp_size", self.tp_size, remote_tp_size)

    def block_size_ratio(self, remote_block_size: int) -> int:
        """Return how many remote blocks make one here; negative, unlike vLLM's: the inverse.

        Raises `UsageError` when neither size divides the other.
        """
        return _ratio("block_size", self.block_size, remote_block_size)

    def tp_ratio_from_engine_id(self, remote_engine_id: str) -> int:
        """Return `tp_ratio` to an engine of `remote_tp_size`; raise `KeyError` for another, here
        and below."""
        return self.tp_ratio(self.remote_tp_size[remote_engine_id])

    def block_size_ratio_from_engine_id(self, remote_engine_id: str) -> int:
        """Return `block_size_ratio` to an engine of `remote_block_size`."""
        return self.block_size_ratio(self.remote_block_size[remote_engine_id])

    def is_kv_replicated(self, engine_id: str) -> bool:
        """Return whether that engine has at least as many workers as the model has KV heads."""
        return self.remote_tp_size[engine_id] >= self.total_num_kv_heads

    def replicates_kv_cache(self, remote_engine_id: str) -> bool:
        """Return whether workers of that engine hold the same KV; with `is_mla` always."""
        return self.is_mla or self.is_kv_replicated(remote_engine_id)

    def get_target_remote_rank(self, remote_tp_size: int) -> int:
        """Return the worker of an engine that is not larger which has this one's heads."""
        if remote_tp_size > self.tp_size:
            must = f"must divide {self.tp_size}, or ask get_target_remote_ranks"
            raise UsageError("remote_tp_size", remote_tp_size, must)
        return self.tp_rank // self.tp_ratio(remote_tp_size)

    def get_target_remote_rank_from_engine_id(self, remote_engine_id: str) -> int:
        """Return `get_target_remote_rank` of an engine of `remote_tp_size`."""
        return self.get_target_remote_rank(self.remote_tp_size[remote_engine_id])

    def get_target_remote_ranks(self, remote_tp_size: int) -> list[int]:
        """Return the workers of such an engine whose heads this one's are among; replicas too."""
        ratio = self.tp_ratio(remote_tp_size)
        if ratio > 0:
            return [self.tp_rank // ratio]
        return list(range(self.tp_rank * -ratio, (self.tp_rank + 1) * -ratio))

    def get_target_remote_ranks_from_engine_id(self, remote_engine_id: str) -> list[int]:
        """Return `get_target_remote_ranks` of an engine of `remote_tp_size`."""
        return self.get_target_remote_ranks(self.remote_tp_size[remote_engine_id])


def _ratio(name: str, mine: int, theirs: int) -> int:
    if theirs < 1 or max(mine, theirs) % min(mine, theirs):
        raise UsageError(name, (mine, theirs), "one must divide the other")
    return mine // theirs if mine >= theirs else -(theirs // mine)
