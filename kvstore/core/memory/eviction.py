"""Orders the evictable slots of a segment: which block goes first when space is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from kvstore.core.memory.head_start import HeadStart
from kvstore.core.memory.slots import Slot


class EvictionPolicy(Protocol):
    """Orders exactly the slots that may be evicted: those sealed, not pinned and not retained.

    Pure and deterministic: what time it is, `begins` says. Every operation, and every step of
    `coldest`, is constant time; `begins` takes as long as the event before used blocks, and now
    and then as long as what the policy remembers.

    What is used in an event goes after what is not, whatever is evicted for it meanwhile, and what
    is used later in it goes later. So a run of blocks that are handled together leaves what the
    same blocks one by one would leave.

    A run is walked from its end: `insert` and `touch` take how often the block behind was used, and
    return that of this one, for the block before it. `min_uses` is 1 for a block of no run, and for
    the end of one.
    """

    def begins(self, now: float) -> None:
        """Begin an event, at a time of the node's clock."""
        ...

    def insert(self, slot: Slot, min_uses: int) -> int:
        """Take in a slot that became evictable, as the last to be evicted. A `min_uses` of 0 means
        that nobody used it: what kept it ended."""
        ...

    def touch(self, slot: Slot, min_uses: int) -> int:
        """Note that a slot was used. A slot that is not held here does not become held by it."""
        ...

    def remove(self, slot: Slot) -> bool:
        """Take out a slot that is no longer evictable; False when it was not held. `insert` may
        bring it back."""
        ...

    def left(self, slot: Slot, coldest: Slot) -> None:
        """Take in a slot that was removed just now, as the first to be evicted: before `coldest`,
        which was that until then and may be the slot itself."""
        ...

    def evicted(self, slots: Iterable[Slot]) -> None:
        """Note that blocks are about to be evicted for room; `remove` follows."""
        ...

    def coldest(self) -> Iterator[int]:
        """Return the ids of all slots in eviction order; valid until the next operation."""
        ...

    def costs(self, coldest: Slot, later: int) -> Callable[[Slot], int]:
        """Return what it costs to evict a slot, in granules: its size, and `later` times as much
        the later it goes than the coldest. Grows with the order of `coldest`."""
        ...


PolicyFactory = Callable[[], EvictionPolicy]


class LRU:
    """Least recently used first."""

    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def begins(self, now: float) -> None:
        """Do nothing: this order does not depend on time."""

    def insert(self, slot: Slot, min_uses: int) -> int:
        order, slot_id = self._order, slot.slot_id
        order[slot_id] = None
        order.move_to_end(slot_id)
        return min_uses

    def touch(self, slot: Slot, min_uses: int) -> int:
        order, slot_id = self._order, slot.slot_id
        if slot_id in order:
            order.move_to_end(slot_id)
        return min_uses

    def remove(self, slot: Slot) -> bool:
        slot_id = slot.slot_id
        return self._order.pop(slot_id, slot_id) is None

    def left(self, slot: Slot, coldest: Slot) -> None:
        self._order[slot.slot_id] = None
        self._order.move_to_end(slot.slot_id, last=False)

    def evicted(self, slots: Iterable[Slot]) -> None:
        """Do nothing: this policy remembers no evicted block."""

    def coldest(self) -> Iterator[int]:
        return iter(self._order)

    def costs(self, coldest: Slot, later: int) -> Callable[[Slot], int]:
        since = coldest.last_use
        return lambda slot: slot.size * (1 + later * max(0, slot.last_use - since))


POLICIES: dict[str, PolicyFactory] = {"head-start": HeadStart, "lru": LRU}
"""Eviction policies by the name a user gives."""
