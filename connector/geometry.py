"""Shape of one shard's KV, the store block built from it, and its namespace.

Payload of a store block, one shard: `[layer][head][token][C]`, C being the
engine's packed bytes of one token and head (K, then V). Head ranges are
contiguous in every layer, the token run covers all of `block_tokens`, so
neither the engine's block size nor its memory layout shows in the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from connector.limits import (
    BLOCK_BYTES_MIN_DEFAULT,
    BLOCK_TOKENS_MAX,
    BLOCK_TOKENS_MAX_DEFAULT,
)
from kvstore import Namespace, UsageError

Field = str | int | float | bool | None
"""What a namespace field may hold."""

LAYOUT = "LHNC"
LAYOUT_VERSION = 1
"""Grows when the same fields come to mean other bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """KV of one shard: what one worker holds of one KV cache group."""

    layers: int
    heads: int
    """KV heads (or head slots) of this shard."""
    channel_bytes: int
    """C: bytes of one token of one head, K and V packed."""
    engine_block_tokens: int

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise UsageError(f"geometry.{name}", getattr(self, name), "must be at least 1")

    @property
    def token_bytes(self) -> int:
        return self.layers * self.heads * self.channel_bytes

    def default_block_tokens(self) -> int:
        """The smallest power-of-two multiple of the engine block with 1 MiB a shard.

        At most 256 tokens, but never less than one engine block.
        """
        tokens = self.engine_block_tokens
        while (
            tokens * self.token_bytes < BLOCK_BYTES_MIN_DEFAULT
            and tokens * 2 <= BLOCK_TOKENS_MAX_DEFAULT
        ):
            tokens *= 2
        return tokens

    def check_block_tokens(self, block_tokens: int) -> int:
        """`block_tokens` when the engine's blocks fit into it, else `UsageError`."""
        if block_tokens % self.engine_block_tokens or not 0 < block_tokens <= BLOCK_TOKENS_MAX:
            raise UsageError(
                "block_tokens",
                block_tokens,
                f"must be a multiple of the engine's block size {self.engine_block_tokens}, "
                f"at most {BLOCK_TOKENS_MAX}",
            )
        return block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTopology:
    """Which distinct part of the KV each worker holds.

    Workers are numbered pipeline-major (`rank = pp_rank * tp_size + tp_rank`).
    With fewer KV heads than tensor-parallel workers (`tp_shards < tp_size`)
    neighbours hold replicas: all of them load, the first of them saves.
    """

    tp_size: int = 1
    pp_size: int = 1
    tp_shards: int = 1

    def __post_init__(self) -> None:
        if self.tp_size < 1 or self.pp_size < 1:
            raise UsageError("tp_size, pp_size", (self.tp_size, self.pp_size), "at least 1")
        if self.tp_shards < 1 or self.tp_size % self.tp_shards:
            raise UsageError(
                "tp_shards", self.tp_shards, f"must divide the tensor-parallel size {self.tp_size}"
            )

    @classmethod
    def of(cls, tp_size: int, pp_size: int, total_kv_heads: int) -> ShardTopology:
        """`total_kv_heads` of the whole model; 1 for latent attention (MLA)."""
        return cls(tp_size=tp_size, pp_size=pp_size, tp_shards=min(tp_size, total_kv_heads))

    @property
    def workers(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def shards(self) -> int:
        return self.tp_shards * self.pp_size

    def shard_of(self, rank: int) -> int:
        pp_rank, tp_rank = divmod(rank, self.tp_size)
        return pp_rank * self.tp_shards + tp_rank // (self.tp_size // self.tp_shards)

    def saves(self, rank: int) -> bool:
        """Whether this worker is the one that saves its shard."""
        return rank % (self.tp_size // self.tp_shards) == 0


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """What both sides must agree on: sizes and one namespace per shard."""

    engine_block_tokens: int
    """Tokens of one engine block, which is also what one engine hash covers."""
    block_tokens: int
    namespaces: tuple[Namespace, ...]

    @property
    def blocks_per_key(self) -> int:
        return self.block_tokens // self.engine_block_tokens


def shard_namespaces(
    model: dict[str, Field],
    geometry: KVGeometry,
    topology: ShardTopology,
    block_tokens: int,
    group: int = 0,
) -> tuple[Namespace, ...]:
    """One namespace per shard.

    `model` carries what the geometry does not know: model, revision, dtype,
    quantisation, KV cache dtype, head counts, and how the engine hashes.
    """
    return tuple(
        Namespace(
            {
                **model,
                "heads": geometry.heads,
                "channel_bytes": geometry.channel_bytes,
                "hash_block_tokens": geometry.engine_block_tokens,
                "block_tokens": block_tokens,
                "layout": LAYOUT,
                "layout_version": LAYOUT_VERSION,
                "kv_group": group,
                "tp_shard": shard % topology.tp_shards,
                "tp_shards": topology.tp_shards,
                "pp_rank": shard // topology.tp_shards,
                "pp_size": topology.pp_size,
            }
        )
        for shard in range(topology.shards)
    )
