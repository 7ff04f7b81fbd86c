"""What the index has yet to hear from a node: publications and removals, until it took them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from kvstore.core.slots import Slot
from kvstore.types import Key

KeyedRecord = tuple[Key, bytes]
REMOVALS_REPEATED_MAX = 1 << 14
"""Of the removals that the index has taken, how many are said again after a failover."""


class Outbox:
    """Work is taken, tried, and only then reported done: a failure loses nothing."""

    def __init__(self, removals_max: int) -> None:
        self._removals_max = removals_max
        self._unpublished: OrderedDict[Key, Slot] = OrderedDict()
        # By key and record: a publication whose outcome is unknown may have left
        # an older record of the same key in the index, so both must go.
        self._removals: OrderedDict[KeyedRecord, None] = OrderedDict()
        # What the index took may come back: a replica that takes over has not heard of it.
        self._removed: OrderedDict[KeyedRecord, None] = OrderedDict()
        self.forgotten = 0
        """Removals dropped at the limit. Such a record stays until it is overwritten: a miss."""

    @property
    def publications_pending(self) -> int:
        return len(self._unpublished)

    @property
    def removals_pending(self) -> int:
        return len(self._removals)

    def publish(self, slot: Slot) -> None:
        """A block was sealed, or the index lost it."""
        self._unpublished[slot.key] = slot

    def publishes(self, slot: Slot) -> bool:
        """Whether the index has yet to hear of it."""
        return self._unpublished.get(slot.key) is slot

    def withdraw(self, slot: Slot) -> None:
        """A sealed block is gone: its record must not stay."""
        if self.publishes(slot):
            del self._unpublished[slot.key]
        if slot.published:
            self.remove(slot.key, slot.record)

    def remove(self, key: Key, record: bytes) -> None:
        """The index may hold this record, and it is wrong."""
        if len(self._removals) >= self._removals_max:
            self._removals.popitem(last=False)
            self.forgotten += 1
        self._removals[key, record] = None

    def take_publications(self, at_most: int) -> list[KeyedRecord]:
        """What to publish next, oldest first; it stays pending until `published` says so."""
        work: list[KeyedRecord] = []
        for key, slot in islice(self._unpublished.items(), at_most):
            slot.published = True
            work.append((key, slot.record))
        return work

    def published(self, work: Iterable[KeyedRecord]) -> None:
        """The index took `work`; blocks that changed meanwhile stay pending."""
        for key, record in work:
            slot = self._unpublished.get(key)
            if slot is not None and slot.record == record:
                del self._unpublished[key]

    def postpone(self, work: Iterable[KeyedRecord]) -> None:
        """Part of the index is away: these come after everything else that is pending."""
        for key, _ in work:
            if key in self._unpublished:
                self._unpublished.move_to_end(key)

    def take_removals(self, at_most: int) -> list[KeyedRecord]:
        """Records to compare-and-delete; they stay pending until `removed` says so.

        Their order against publications is free: a removal names its record.
        """
        return list(islice(self._removals, at_most))

    def removed(self, work: Iterable[KeyedRecord]) -> None:
        for item in work:
            self._removals.pop(item, None)
            self._removed[item] = None
            self._removed.move_to_end(item)
        while len(self._removed) > REMOVALS_REPEATED_MAX:
            self._removed.popitem(last=False)

    def remove_again(self) -> None:
        """The index went back to an earlier state: the latest removals are due once more."""
        removed, self._removed = self._removed, OrderedDict()
        for key, record in removed:
            self.remove(key, record)
