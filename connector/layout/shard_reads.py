"""Maps store blocks to the parts that one worker reads and writes, per KV cache group."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from connector.copiers.base import HeadPart
from connector.layout.topology import HeadRange, reads_of
from kvstore.spi import in_batches

if TYPE_CHECKING:
    from connector.layout.geometry import GroupLayout, KVGeometry
    from connector.messages import LoadBlock
    from kvstore import Namespace
    from kvstore.spi import BlockRef


class ShardRead(NamedTuple):
    """Describes one shard of a writer's, as far as this worker needs it."""

    shard: int
    """Its number among the split's shards."""
    payload_bytes: int
    """Size of the whole shard's payload."""
    part: HeadPart


class GroupReads:
    """Computes one worker's share of one group. Knows sizes only; the bytes are `KVCopier`'
    business."""

    def __init__(self, layout: GroupLayout, rank: int, block_tokens: int) -> None:
        """`rank` counts this engine's workers as `TpKVTopology.at` does."""
        geometry, topology = layout.geometry, layout.topology.at(rank)
        self.geometry: KVGeometry = geometry
        self.opaque = layout.opaque
        self.block_tokens = block_tokens
        self.shard = topology.shard
        """The shard of the engine's own split that this worker holds."""
        self.saves = topology.saves
        self.namespace: Namespace = layout.namespaces[self.shard]
        self.block_bytes = geometry.payload_bytes(block_tokens)
        """Payload of the block that this worker saves."""
        self.engine_block_bytes = geometry.payload_bytes(geometry.engine_block_tokens)
        """Bytes of all layers together."""
        mine = HeadRange(topology.tp_shard * geometry.heads, geometry.heads)
        self._by_split: list[tuple[ShardRead, ...]] = []
        for split in layout.splits:
            reads = reads_of(mine, split.tp_shards, geometry.heads * topology.tp_shards)
            numbers = [split.heads, *(n for read in reads for n in read[1:])]
            if any(n * run.heads % geometry.heads for run in geometry.runs for n in numbers):
                self._by_split.append(())  # some layers' heads lie across shards of this split
                continue
            size = self.block_bytes * split.heads // geometry.heads
            self._by_split.append(
                tuple(
                    ShardRead(
                        topology.shard_of(split.tp_shards, read.shard),
                        size,
                        HeadPart(split.heads, read.source, read.target, read.heads),
                    )
                    for read in reads
                )
            )

        self.read_bytes_max = max(sum(p.payload_bytes for p in ps) for ps in self._by_split)
        """Payload of all the pieces of one block."""

    def pieces(self, split: int) -> tuple[ShardRead, ...]:
        """Return all heads of this worker, each once, from shards of `split`; () if impossible."""
        return self._by_split[split]


def found_in(groups: Sequence[GroupReads], blocks: Iterable[LoadBlock]) -> list[BlockRef]:
    """Return the shards that have some of this worker's heads, in the order of their blocks."""
    return [
        block.found[piece.shard]
        for block in blocks
        if block.found
        for piece in groups[block.group].pieces(block.split)
    ]


def windows(
    groups: Sequence[GroupReads], blocks: Sequence[LoadBlock], size_bytes_max: int
) -> Iterator[Sequence[LoadBlock]]:
    """Return runs of `blocks` that fit this much memory should all of them be on other hosts."""

    return in_batches(blocks, len(blocks), partial(bytes_of, groups), size_bytes_max)


def bytes_of(groups: Sequence[GroupReads], block: LoadBlock) -> int:
    """Return how much this worker reads for a block."""
    return sum(piece.payload_bytes for piece in groups[block.group].pieces(block.split))


def alike(blocks: Iterable[LoadBlock], count_max: int) -> Iterator[Sequence[LoadBlock]]:
    """Yield runs of at most `count_max` blocks of one group."""
    for _, run in itertools.groupby(blocks, lambda block: block.group):
        yield from in_batches(list(run), count_max)
