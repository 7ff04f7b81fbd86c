"""Keeps when each block whose namespace bounds its life (`keys.ttl_of`) must end.

Such a block is a miss, and its bytes are wiped, when its time is over, whoever has it retained,
used or asked for; where a client has it pinned, it is a miss, and is wiped after the last unpin.
Wherever it leaves otherwise, or moves, its bytes are wiped too: nothing of it stays in a segment
until something else is written there. Its end stands where the end of a retention stands
(`Keep`), for `NO_TENANT`, and is written before the header says SEALED: a restart drops those of
which it does not stand there.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from kvstore.core.memory.slots import Slot

FOREVER = float("inf")
NO_TENANT = (1 << 32) - 1
"""Stands in place of a tenant: this second ends the life of the block, and not a retention."""
ENDS_SPARE = 64
"""Outdated entries that the heap may have beyond the number of bounded blocks."""


class Bounded:
    """The blocks of one node whose lives are bounded, and which life ends next."""

    __slots__ = ("_ends", "_slots")

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}
        self._ends: list[tuple[int, int]] = []
        """A heap of (second, slot id). An entry counts only if the slot has the same second."""

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def next_end(self) -> float:
        """Return the second of the node's clock before which no life ends."""
        return self._ends[0][0] if self._ends else FOREVER

    def add(self, slot: Slot, dies_at: int) -> None:
        slot.dies_at = dies_at
        self._slots[slot.slot_id] = slot
        heappush(self._ends, (dies_at, slot.slot_id))
        if len(self._ends) > 2 * len(self._slots) + ENDS_SPARE:
            self._ends = [(one.dies_at, one.slot_id) for one in self._slots.values()]
            heapify(self._ends)

    def remove(self, slot: Slot) -> None:
        """Stop bounding the life of a block that is about to leave."""
        del self._slots[slot.slot_id]
        slot.dies_at = 0

    def over(self, now: float, at_most_bytes: int) -> list[Slot]:
        """Return blocks whose time is over, until they have `at_most_bytes` together; the caller
        must remove them at once."""
        ended: dict[int, Slot] = {}
        while self._ends and self._ends[0][0] <= now and at_most_bytes > 0:
            dies_at, slot_id = heappop(self._ends)
            slot = self._slots.get(slot_id)
            if slot is not None and slot.dies_at == dies_at and slot_id not in ended:
                ended[slot_id] = slot
                at_most_bytes -= slot.length
        return list(ended.values())
