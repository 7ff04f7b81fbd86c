"""Keeps the promises of a node that a block stays until a time, within a budget.

A retained block is SEALED, and is not evicted before its time: `Slot.kept_until` is not 0 then,
and the allocator does not count the slot among what may go. It moves where it is in the way of a
value that finds no other room. The promise ends
with its time, by a release, and with the block itself: who drops, clears or resets it means it,
and what turns out to be damaged goes. Clients do not hold it: it outlives them, and restarts of
the node, which find it beside the header (`Keep`).

All that is retained together has at most one share of the node, what one tenant has retained a
smaller one (`Limits`), so that there is room for others' blocks whatever is asked for. What one
tenant retains already another one neither pays for nor ends.

Must never happen: sums other than those over the slots that are retained; a retained slot among
what may be evicted; an event that waits for the end of more than `ENDED_AT_ONCE_MAX` others: where
more end together, the rest stays until the next events.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from kvstore.core.memory.granules import GRANULE_BYTES
from kvstore.core.memory.slots import Slot
from kvstore.types import Retained

FOREVER = float("inf")
ENDED_AT_ONCE_MAX = 1024
"""Retentions that one event ends, at most: about 5 ms."""
ENDS_SPARE = 64
"""Outdated entries that the heap may have beyond the number of retained slots."""


class Retentions:
    """The retained slots of one node: what they have together, and which of them ends next."""

    __slots__ = ("_by_tenant", "_ends", "_most", "_most_of_tenant", "_slots", "bytes")

    def __init__(self, capacity_bytes: int, percent: int, tenant_percent: int) -> None:
        self._most = capacity_bytes * percent // 100
        self._most_of_tenant = capacity_bytes * tenant_percent // 100
        self._slots: dict[int, Slot] = {}
        self._by_tenant: dict[int, int] = {}
        self._ends: list[tuple[int, int]] = []
        """A heap of (second, slot id). An entry counts only if the slot has the same second."""
        self.bytes = 0
        """Bytes of the segment in retained slots."""

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def next_end(self) -> float:
        """Return the second of the node's clock before which no retention ends."""
        return self._ends[0][0] if self._ends else FOREVER

    def refusal(self, slot: Slot, tenant: int) -> Retained | None:
        """Return why `slot` cannot be retained for `tenant` besides what is; None when it can."""
        size_bytes = slot.size * GRANULE_BYTES
        if self.bytes + size_bytes > self._most:
            return Retained.NODE_BUDGET
        if self._by_tenant.get(tenant, 0) + size_bytes > self._most_of_tenant:
            return Retained.TENANT_BUDGET
        return None

    def add(self, slot: Slot, until_s: int, tenant: int) -> None:
        """Retain a slot that is not, whatever the budgets say."""
        assert not slot.kept_until
        slot.kept_until, slot.tenant = until_s, tenant
        size_bytes = slot.size * GRANULE_BYTES
        self._slots[slot.slot_id] = slot
        self.bytes += size_bytes
        self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + size_bytes
        self._note_end(slot)

    def extend(self, slot: Slot, until_s: int) -> None:
        """Retain for longer what is retained."""
        slot.kept_until = until_s
        self._note_end(slot)

    def _note_end(self, slot: Slot) -> None:
        heappush(self._ends, (slot.kept_until, slot.slot_id))
        if len(self._ends) > 2 * len(self._slots) + ENDS_SPARE:
            self._ends = [(one.kept_until, one.slot_id) for one in self._slots.values()]
            heapify(self._ends)

    def remove(self, slot: Slot) -> None:
        """Retain it no more."""
        size_bytes = slot.size * GRANULE_BYTES
        del self._slots[slot.slot_id]
        self.bytes -= size_bytes
        left = self._by_tenant[slot.tenant] - size_bytes
        if left:
            self._by_tenant[slot.tenant] = left
        else:
            del self._by_tenant[slot.tenant]
        slot.kept_until = slot.tenant = 0

    def over(self, now: float) -> list[Slot]:
        """Return the slots whose time is over, `ENDED_AT_ONCE_MAX` of them at most; still retained,
        until they are removed."""
        ended: dict[int, Slot] = {}
        while self._ends and self._ends[0][0] <= now and len(ended) < ENDED_AT_ONCE_MAX:
            until_s, slot_id = heappop(self._ends)
            slot = self._slots.get(slot_id)
            if slot is not None and slot.kept_until == until_s:
                ended[slot_id] = slot
        return list(ended.values())
