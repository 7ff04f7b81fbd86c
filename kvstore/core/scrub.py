"""Looks up whether the index still knows what a node holds, a few keys at a time, for ever.

The index's incarnation tells of a loss as a whole. A shard that came back empty, keys
that Redis evicted, and records that another node with the same block overwrote and then
took out, or left when it died, show only when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from kvstore.core.memory.slots import SlotState
from kvstore.core.node import NodeCore
from kvstore.record import unpack_record
from kvstore.types import Key


class Scrub:
    """Goes round over all sealed blocks of `core`."""

    def __init__(self, core: NodeCore) -> None:
        self._core = core
        self._round: Iterator[Key] = iter(())
        """Keys of this round that were not looked at."""

    def next(self, at_most: int) -> list[Key]:
        """Keys to look up now; none when there is nothing, or more important work."""
        if self._core.blocks.outbox.publications_pending:
            return []
        keys = list(islice(self._round, at_most))
        if not keys:
            self._round = iter(list(self._core.blocks.by_key))
            keys = list(islice(self._round, at_most))
        return keys

    def owners(self, keys: Sequence[Key], records: Sequence[bytes | None]) -> set[int]:
        """Other nodes that the index names for these blocks."""
        locations = (
            unpack_record(key, record)
            for key, record in zip(keys, records, strict=True)
            if record is not None
        )
        return {at.node_id for at in locations if at is not None} - {self._core.node_id}

    def found(
        self,
        keys: Sequence[Key],
        records: Sequence[bytes | None],
        epochs: Mapping[int, int | None],
    ) -> int:
        """Return what the index said; how many blocks must be published again, which is now
        pending.

        `epochs` says which start of each of `owners` is announced, None where there is
        none. A record of another node that lives is right too: both have the block.
        """
        lost = 0
        for key, record in zip(keys, records, strict=True):
            slot = self._core.blocks.by_key.get(key)
            if slot is None or slot.state is not SlotState.SEALED or record == slot.record:
                continue
            location = unpack_record(key, record) if record is not None else None
            if location is not None and epochs.get(location.node_id) == location.epoch:
                continue
            self._core.blocks.outbox.publish_again(slot)
            lost += 1
        self._core.blocks.counts["repaired"] += lost
        return lost
