"""Which blocks to compare with the index next, and which of them it must hear of again.

What the index tells by its incarnation is covered by `NodeCore.republish`. It also
loses single keys in silence: it evicts them under memory pressure, another node
that has the same key takes its own record out, or dies and leaves it, a
publication that was given up lands after a newer one. So every node goes round
its blocks, a few at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from kvstore.core.allocator import Allocator
from kvstore.core.outbox import Outbox
from kvstore.core.record import unpack_record
from kvstore.core.slots import Slot, SlotState


class Audit:
    """One node's round over its own blocks."""

    def __init__(self, allocator: Allocator, outbox: Outbox, node_id: int) -> None:
        self._allocator = allocator
        self._outbox = outbox
        self._node_id = node_id
        self._next_arena = 0
        self._ahead: deque[Slot] = deque()
        """Slots of the arena that the round has come to."""
        self.repaired = 0
        """Blocks that the index did not have, or not as it should."""

    def take(self, at_most: int) -> list[Slot]:
        """Up to `at_most` published blocks, each block once a round."""
        taken: list[Slot] = []
        arenas = self._allocator.arenas
        for _ in range(len(arenas)):
            while self._ahead:
                if len(taken) == at_most:
                    return taken
                slot = self._ahead.popleft()
                if slot.state is SlotState.SEALED and not self._outbox.publishes(slot):
                    taken.append(slot)
            self._ahead.extend(arenas[self._next_arena].slots.values())
            self._next_arena = (self._next_arena + 1) % len(arenas)
        return taken

    def owners(self, slots: Sequence[Slot], records: Sequence[bytes | None]) -> set[int]:
        """Other nodes that the index names for these blocks."""
        locations = (
            unpack_record(slot.key, record)
            for slot, record in zip(slots, records, strict=True)
            if record is not None
        )
        return {at.node_id for at in locations if at is not None} - {self._node_id}

    def compare(
        self,
        slots: Sequence[Slot],
        records: Sequence[bytes | None],
        epochs: Mapping[int, int | None],
    ) -> int:
        """Publish again what readers cannot find; returns how many blocks that are.

        `records` is what the index has for `slots`; `epochs` says which start of each
        of `owners` is announced, None where there is none. A record of another
        node that lives is as good as ours.
        """
        repaired = 0
        for slot, record in zip(slots, records, strict=True):
            if record == slot.record or slot.state is not SlotState.SEALED:
                continue
            location = unpack_record(slot.key, record) if record is not None else None
            if location is not None and location.node_id != self._node_id:
                epoch = epochs.get(location.node_id)
                if epoch == location.epoch:
                    continue
            self._outbox.publish_again(slot)
            repaired += 1
        self.repaired += repaired
        return repaired
