"""Checks, a few keys at a time and forever, whether the index still has the records of a node.

The index's incarnation tells of a loss as a whole. A shard that came back empty, keys
that Redis evicted, and records that another node with the same block overwrote and then
took out, or left when it died, show only when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from kvstore.core.memory.slots import SlotState
from kvstore.core.node import NodeCore
from kvstore.types import Key, Location


class Scrub:
    """Goes round over all sealed blocks of `core`, then over those on its disks, some at a time."""

    def __init__(self, core: NodeCore) -> None:
        self._core = core
        self._round: Iterator[list[Key]] = iter(())
        """What this round has not looked at."""

    def next(self, at_most: int) -> list[Key]:
        """Return the keys to look up now; none when there are none, or when other work is more
        important."""
        outbox = self._core.blocks.outbox
        if outbox.publications_pending or outbox.rounds_due:
            return []
        keys = next(self._round, None)
        if keys is None:
            self._round = self._parts(at_most)
            keys = next(self._round, [])
        return keys

    def _parts(self, at_most: int) -> Iterator[list[Key]]:
        in_memory = iter(list(self._core.blocks.by_key))
        while keys := list(islice(in_memory, at_most)):
            yield keys
        disk, start = self._core.disk, 0
        while disk is not None:
            blocks, start = disk.index.walk(start, at_most)
            yield [block.key for block in blocks]
            if not start:
                return

    def found(
        self,
        keys: Sequence[Key],
        records: Sequence[bytes | None],
        elsewhere: Sequence[Location | None],
    ) -> int:
        """Take what the index said. Return how many blocks must be published again; that is now
        pending.

        `elsewhere` says where another node that lives has it, by its record. That is right too, but
        for one that has it on a disk, where this node has it in memory.
        """
        lost = 0
        for key, record, other in zip(keys, records, elsewhere, strict=True):
            slot, copy = self._core.blocks.by_key.get(key), None
            if slot is None and self._core.disk is not None:
                copy = self._core.disk.there(key)
            if slot is not None and slot.state is SlotState.SEALED:
                expected = slot.record
            elif copy is not None:
                expected = self._core.blocks.copy_record(copy)
            else:
                continue
            if record == expected:
                continue
            if other is not None and not (slot is not None and other.segment):
                continue
            if copy is not None:
                self._core.blocks.publish_copy(copy)
            elif slot is not None:
                self._core.blocks.outbox.publish_again(slot)
            lost += 1
        self._core.blocks.counts["repaired"] += lost
        return lost
