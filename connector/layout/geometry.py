"""Describes the shape of one shard's KV, the store block built from it, and its namespace.

The payload of one shard's store block is `[layer][head][token][C]`, C being the engine's packed
bytes of one token and head (K, then V); of state-space layers it is `[layer][C]`, C being all of a
layer's state after the block's last token. Head ranges are contiguous in every layer; where layers
have several shapes, runs of one shape each follow one another. The token run covers all of
`block_tokens`, so neither the engine's block size nor its memory layout shows in the bytes. Where
the setting `payload_order` is `tokens` it is `[layer][token][head][C]`, which is the same as that
of one head with all heads' C: see `KVGeometry.in_token_order`. The
namespace of a shard names its heads and not its writer's tensor-parallel size, so that any reader
can compute who may have saved what it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from connector.layout.topology import TpKVTopology, shards_of
from connector.limits import (
    BLOCK_BYTES_MIN_DEFAULT,
    BLOCK_TOKENS_MAX,
    BLOCK_TOKENS_MAX_DEFAULT,
    TP_SIZES_DEFAULT,
)
from kvstore import Namespace, UsageError

Field = str | int | float | bool | None
"""What a namespace field may hold."""

LAYOUT = "LHNC"
TOKEN_ORDER_LAYOUT = "LNHC"
"""The layout with the heads within a token."""
LAYOUT_VERSION = 1
"""Grows when the same fields come to mean other bytes."""


class LayerRun(NamedTuple):
    """Names layers of one shape among those of a group."""

    layers: tuple[int, ...]
    """Positions among the group's layers."""
    heads: int
    channel_bytes: int
    tokens_per_slot: Fraction = Fraction(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """Describes the KV of one shard: what one worker holds of one KV cache group."""

    layers: int
    heads: int
    """KV heads (or head slots) of this shard."""
    channel_bytes: int
    """C: bytes of one token of one head, K and V packed."""
    engine_block_tokens: int
    recurrent: bool = False
    """Whether the layers are state-space layers: an engine block holds no KV but one state, after
    its last token. `channel_bytes` are those of one layer's state, `heads` is 1."""
    runs: tuple[LayerRun, ...] = ()
    """The runs of layers with one shape each, where there are several shapes; `heads` and
    `channel_bytes` are the first's. Payloads hold one run after another. Only workers know them; no
    namespace does."""
    tokens_per_slot: Fraction = Fraction(1)
    """Tokens for which one entry of C bytes stands: more than one where a model keeps one entry for
    several tokens, and where this worker has one of several tokens (decode context parallelism)."""
    folded_heads: int = 1
    """KV heads that lie side by side in C, in the order of tokens. `heads` is then 1, and copiers
    see a single head."""

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "channel_bytes", "engine_block_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"geometry.{name}", getattr(self, name), "must be at least 1")
        for one in self.each_shape():
            if Fraction(self.engine_block_tokens) % one.tokens_per_slot:
                raise UsageError(
                    "geometry.tokens_per_slot",
                    str(one.tokens_per_slot),
                    f"must divide the engine's block of {self.engine_block_tokens} tokens",
                )

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token, or of one state, in all layers and heads; where entries
        stand for several tokens see `payload_bytes`."""
        return self.payload_bytes(1)

    def in_token_order(self) -> KVGeometry:
        """Return the same KV with the heads within a token. With one head, as of a latent or a
        state, both orders are the same bytes, and so is the geometry."""
        if self.heads == 1:
            return self
        if self.runs:
            raise UsageError(
                "payload_order",
                "tokens",
                "must be heads where layers of one KV cache group differ in shape",
            )
        return replace(
            self,
            heads=1,
            channel_bytes=self.heads * self.channel_bytes,
            folded_heads=self.heads,
        )

    def each_shape(self) -> tuple[LayerRun, ...]:
        """Return the runs; of layers that are all alike the one that they are."""
        own = LayerRun(
            tuple(range(self.layers)), self.heads, self.channel_bytes, self.tokens_per_slot
        )
        return self.runs or (own,)

    def run_bytes(self, run: LayerRun, block_tokens: int) -> int:
        """Return bytes of one layer and head of `run` in a store block."""
        return run.channel_bytes * self.payload_slots(block_tokens, run.tokens_per_slot)

    def payload_bytes(self, block_tokens: int) -> int:
        """Return bytes of `block_tokens` tokens, or of one state, in all layers and heads."""
        return sum(
            len(run.layers) * run.heads * self.run_bytes(run, block_tokens)
            for run in self.each_shape()
        )

    def payload_slots(self, block_tokens: int, tokens_per_slot: Fraction | None = None) -> int:
        """Return how many entries a store block has of each head: one a token, or the one state."""
        per_slot = self.tokens_per_slot if tokens_per_slot is None else tokens_per_slot
        return 1 if self.recurrent else int(block_tokens / per_slot)


@dataclass(frozen=True, slots=True)
class Split:
    """Describes one way in which a writer's workers share the heads of a group."""

    tp_shards: int
    heads: int
    """Heads of each shard."""
    namespaces: tuple[Namespace, ...]
    """One per shard, as `TpKVTopology.shard_of` counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayout:
    """Describes one KV cache group: how this engine holds it and how it is stored."""

    geometry: KVGeometry
    topology: TpKVTopology
    """The topology of the engine's first worker; `at` makes another's."""
    splits: tuple[Split, ...]
    """Ways to split the heads. The first is the engine's own: it saves in it, and prefers it."""
    window_tokens: int | None = None
    """Sliding window: a token needs the KV of the `window_tokens - 1` before it; None: of all."""
    chunk_tokens: int | None = None
    """Attention within chunks: a token needs the KV of those before it in its own chunk alone."""
    opaque: bool = False
    """The bytes of an engine block do not lie token by token."""

    @property
    def forgetful(self) -> bool:
        """Return whether a token does not need the KV of all before it."""
        return self.geometry.recurrent or bool(self.window_tokens or self.chunk_tokens)

    def needed_from(self, end_token: int) -> int:
        """Return the first token before `end_token` for which the token at `end_token` needs this
        group."""
        if self.geometry.recurrent:
            return max(0, end_token - 1)  # the block with that token holds the state after it
        if self.chunk_tokens is not None:
            return end_token // self.chunk_tokens * self.chunk_tokens
        return 0 if self.window_tokens is None else max(0, end_token - self.window_tokens + 1)

    @property
    def namespaces(self) -> tuple[Namespace, ...]:
        return self.splits[0].namespaces


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLayout:
    """Holds what both sides must agree on: sizes, groups and their namespaces."""

    block_tokens: int
    hash_block_tokens: int
    """Tokens that one hash of a request covers."""
    groups: tuple[GroupLayout, ...]
    engine_groups: int = 1
    """KV cache groups of the engine, those that are not stored included."""
    boundary_tokens: int = 1
    """Loads end at multiples of this for the sake of groups that are not stored."""

    @property
    def engine_block_tokens(self) -> int:
        """Return the tokens from one boundary to the next at which blocks of every group begin."""
        blocks = (group.geometry.engine_block_tokens for group in self.groups)
        return math.lcm(self.boundary_tokens, *blocks)

    @property
    def hashes_per_key(self) -> int:
        return self.block_tokens // self.hash_block_tokens

    @property
    def forgetful(self) -> bool:
        """Return whether some group has only the end of a prefix: it cannot go back by one
        token."""
        return any(group.forgetful for group in self.groups)

    @property
    def recurrent(self) -> bool:
        """Return whether some group has states, which exist at some tokens only."""
        return any(group.geometry.recurrent for group in self.groups)

    @property
    def takes_parts(self) -> bool:
        """Return whether a load may end within a block: not where there are states, where an entry
        stands for several tokens, or where a group that is not stored needs another boundary."""
        return self.boundary_tokens == 1 and all(
            not group.geometry.recurrent and group.geometry.tokens_per_slot == 1
            for group in self.groups
        )

    @property
    def opaque(self) -> bool:
        """Return whether some group's engine blocks do not lie token by token."""
        return any(group.opaque for group in self.groups)

    @property
    def fails_by_request(self) -> bool:
        """Return whether a failed load is reported by request. With several groups, each of which
        has block tables of its own, a block id does not name a block; with states all tokens before
        a failed block are lost too."""
        return max(self.engine_groups, len(self.groups)) > 1 or self.recurrent

    def blocks_per_key(self, group: int = 0) -> int:
        """Return the engine blocks in one store block of `group`."""
        return self.block_tokens // self.groups[group].geometry.engine_block_tokens

    def all_namespaces(self) -> Iterable[Namespace]:
        """Return the namespaces of all groups and shards that this engine may load, whoever saved
        them."""
        return (
            namespace
            for group in self.groups
            for split in group.splits
            for namespace in split.namespaces
        )


def default_block_tokens(
    groups: Sequence[tuple[KVGeometry, TpKVTopology, int | None]], boundary_tokens: int = 1
) -> int:
    """Return the smallest power-of-two multiple of the engine block with 1 MiB a shard.

    At most 64 tokens and at most a sliding window, but never less than one
    engine block. The shard is that of the largest usual tensor-parallel size,
    so that engines of all sizes come to the same answer. With states it is the
    engine's block: states exist at few tokens, and a larger block would miss
    some of them. Each of `groups` is geometry, topology and window or chunk.
    """
    tokens = math.lcm(boundary_tokens, *(one.engine_block_tokens for one, _, _ in groups))
    if any(geometry.recurrent for geometry, _, _ in groups):
        return tokens
    token_bytes = min(
        geometry.layers
        * max(1, geometry.heads * topology.tp_shards // max(TP_SIZES_DEFAULT))
        * geometry.channel_bytes
        / geometry.tokens_per_slot
        for geometry, topology, _ in groups
    )
    most = min([BLOCK_TOKENS_MAX_DEFAULT, *(window for _, _, window in groups if window)])
    while tokens * token_bytes < BLOCK_BYTES_MIN_DEFAULT and tokens * 2 <= most:
        tokens *= 2
    return tokens


def check_block_tokens(block_tokens: int, engine_block_tokens: int) -> int:
    """Return `block_tokens` when the engine's blocks fit into it, else raise `UsageError`."""
    if block_tokens % engine_block_tokens or not 0 < block_tokens <= BLOCK_TOKENS_MAX:
        raise UsageError(
            "block_tokens",
            block_tokens,
            f"must be a multiple of the engine's block size {engine_block_tokens}, "
            f"at most {BLOCK_TOKENS_MAX}",
        )
    return block_tokens


def splits_of(
    model: dict[str, Field],
    geometry: KVGeometry,
    topology: TpKVTopology,
    block_tokens: int,
    tp_sizes: Sequence[int] = (),
    group: int | str = 0,
    hash_block_tokens: int | None = None,
    salt: bytes = b"",
) -> tuple[Split, ...]:
    """Return the engine's own split, then those of writers with `tp_sizes` as far as heads allow.

    States have no heads that could be told apart, nor has a payload in the order of tokens a range
    of heads in one piece: only engines of one size share them. Where workers share the tokens of a
    block, each has one head, whatever the engine's size.
    """
    folded = geometry.folded_heads
    total = geometry.heads * topology.tp_shards
    shards = [topology.tp_shards]
    alone = geometry.recurrent or folded > 1 or topology.dcp_size > 1
    for tp_size in () if alone else tp_sizes:
        try:
            count = shards_of(tp_size, total)
        except UsageError:
            continue  # no engine of that size runs this model
        if count not in shards:
            shards.append(count)
    return tuple(
        Split(
            count,
            total // count,
            _namespaces(
                {
                    **model,
                    "channel_bytes": geometry.channel_bytes // folded,
                    "total_heads": total * folded,
                    "hash_block_tokens": hash_block_tokens or geometry.engine_block_tokens,
                    "block_tokens": block_tokens,
                    "kv_group": group,
                    "layout": LAYOUT if folded == 1 else TOKEN_ORDER_LAYOUT,
                },
                count,
                total // count * folded,
                topology,
                salt,
            ),
        )
        for count in shards
    )


def _namespaces(
    common: dict[str, Field], tp_shards: int, heads: int, topology: TpKVTopology, salt: bytes
) -> tuple[Namespace, ...]:
    pp_size, dcp_size = topology.pp_size, topology.dcp_size
    tokens: list[dict[str, Field]] = [{}]
    if dcp_size > 1:
        tokens = [{"dcp_rank": rank, "dcp_size": dcp_size} for rank in range(dcp_size)]
    return tuple(
        Namespace(
            {
                **common,
                "layout_version": LAYOUT_VERSION,
                "head_first": tp_shard * heads,
                "heads": heads,
                "pp_rank": pp_rank,
                "pp_size": pp_size,
                **part,
            },
            salt=salt,
        )
        for pp_rank in range(pp_size)
        for tp_shard in range(tp_shards)
        for part in tokens
    )
