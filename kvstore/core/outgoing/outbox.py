"""Keeps publications and removals that the index has yet to hear of, until it took them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain, islice

from kvstore.core.memory.slots import Slot
from kvstore.types import Key

KeyedRecord = tuple[Key, bytes]
REMOVALS_REPEATED_MAX = 1 << 14
"""Of the removals that the index has taken, how many are said again after a failover."""


class Outbox:
    """What the index must still hear. Work is taken, tried, and only then reported done, so a
    failure loses nothing."""

    def __init__(self, removals_max: int) -> None:
        self._removals_max = removals_max
        self._unpublished: OrderedDict[Key, Slot] = OrderedDict()
        """Sealed lately: somebody waits for the answer."""
        self._unknown: OrderedDict[Key, Slot] = OrderedDict()
        """Sealed long ago; the index has lost them. They go after the others."""
        # By key and record: a publication whose outcome is unknown may have left
        # an older record of the same key in the index, so both must go.
        self._removals: OrderedDict[KeyedRecord, None] = OrderedDict()
        # What the index took may come back: a replica that takes over has not heard of it.
        self._removed: OrderedDict[KeyedRecord, None] = OrderedDict()
        self.forgotten = 0
        """Removals dropped at the limit. Such a record stays until it is overwritten: a miss."""

    @property
    def publications_pending(self) -> int:
        return len(self._unpublished) + len(self._unknown)

    @property
    def awaited(self) -> int:
        """Publications that answers to clients wait for."""
        return len(self._unpublished)

    @property
    def removals_pending(self) -> int:
        return len(self._removals)

    def publish(self, *slots: Slot) -> None:
        """Blocks were sealed: their records are due in the index."""
        for slot in slots:
            self._unpublished[slot.key] = slot

    def publish_again(self, slot: Slot) -> None:
        """The index may have lost it: nobody waits, so it goes after what was sealed lately."""
        if slot.key not in self._unpublished:
            self._unknown[slot.key] = slot

    def withdraw(self, *slots: Slot) -> None:
        """Sealed blocks are gone: their records must not stay."""
        for pending in filter(None, (self._unpublished, self._unknown)):
            for slot in slots:
                if pending.get(slot.key) is slot:
                    del pending[slot.key]
        for slot in slots:
            if slot.published:
                self.remove(slot.key, slot.record)

    def remove(self, key: Key, record: bytes) -> None:
        """Have this record removed: the index may hold it, and it is wrong."""
        if len(self._removals) >= self._removals_max:
            self._removals.popitem(last=False)
            self.forgotten += 1
        self._removals[key, record] = None

    def take_publications(self, at_most: int) -> list[KeyedRecord]:
        """Return what to publish next, oldest first; it stays pending until `published` says so."""
        work: list[KeyedRecord] = []
        pending = chain(self._unpublished.items(), self._unknown.items())
        for key, slot in islice(pending, at_most):
            slot.published = True
            work.append((key, slot.record))
        return work

    def published(self, work: Sequence[KeyedRecord]) -> None:
        """The index took `work`; blocks that changed meanwhile stay pending."""
        for pending in filter(None, (self._unpublished, self._unknown)):
            for key, record in work:
                slot = pending.get(key)
                if slot is not None and slot.record == record:
                    del pending[key]

    def postpone(self, work: Iterable[KeyedRecord]) -> None:
        """Part of the index is away: these come after everything else that is pending."""
        for key, record in work:
            slot = self._unpublished.get(key) or self._unknown.get(key)
            if slot is not None and slot.record == record:
                self._unpublished.pop(key, None)
                self._unknown[key] = slot
                self._unknown.move_to_end(key)

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
