"""Keeps publications and removals for the index until it has taken them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain, islice

from kvstore.core.memory.slots import Slot
from kvstore.types import Key

KeyedRecord = tuple[Key, bytes]
REMOVALS_REPEATED_MAX = 1 << 14
"""Removals taken by the index that are repeated after a failover."""
COPIES_MAX = 1 << 16
"""Blocks on disks alone whose records wait; beyond it a round over all of them is due."""

_NOTHING = b"", b""


class Outbox:
    """Records and removals that the index has yet to receive. Work is taken, tried, and only then
    reported done, so a failure loses nothing."""

    def __init__(self, removals_max: int) -> None:
        self._removals_max = removals_max
        self._unpublished: OrderedDict[Key, Slot] = OrderedDict()
        """Slots sealed lately, for which somebody waits for the answer."""
        self._unknown: OrderedDict[Key, Slot] = OrderedDict()
        """Slots sealed long ago whose records the index has lost. They go after the others."""
        self._copies: OrderedDict[Key, tuple[bytes, bytes]] = OrderedDict()
        """Records of blocks that are on a disk alone, each with the one that it is to replace, if
        there is one. They go last."""
        self.rounds_due = 0
        """How often all blocks on disks are still to be looked through for such records."""
        # By key and record: a publication whose outcome is unknown may have left
        # an older record of the same key in the index, so both must go.
        self._removals: OrderedDict[KeyedRecord, None] = OrderedDict()
        # What the index took may come back: a replica that takes over has not heard of it.
        self._removed: OrderedDict[KeyedRecord, None] = OrderedDict()
        self.forgotten = 0
        """Removals dropped at the limit. Such a record stays until it is overwritten: a miss."""

    @property
    def publications_pending(self) -> int:
        return len(self._unpublished) + len(self._unknown) + len(self._copies)

    @property
    def awaited(self) -> int:
        """Return the publications that answers to clients wait for."""
        return len(self._unpublished)

    @property
    def only_copies(self) -> bool:
        """Return whether nothing waits but records of blocks on disks."""
        return not (self._unpublished or self._unknown)

    @property
    def removals_pending(self) -> int:
        return len(self._removals)

    def publish(self, *slots: Slot) -> None:
        """Queue the records of sealed blocks for publication."""
        for slot in slots:
            self._unpublished[slot.key] = slot
            if self._copies:
                self._forget_copy(slot.key)

    def publish_again(self, slot: Slot) -> None:
        """Queue a record again that the index may have lost. Nobody waits for it, so it goes after
        what was sealed lately."""
        if slot.key not in self._unpublished:
            self._unknown[slot.key] = slot

    def withdraw(self, *slots: Slot) -> None:
        """Queue the removal of the records of sealed blocks that left."""
        for pending in filter(None, (self._unpublished, self._unknown)):
            for slot in slots:
                if pending.get(slot.key) is slot:
                    del pending[slot.key]
        for slot in slots:
            if slot.published:
                self.remove(slot.key, slot.record)

    def publish_copy(self, key: Key, record: bytes, former: bytes = b"") -> None:
        """Queue the record of a block that is on a disk alone. It takes the place of `former`,
        which then need not be removed."""
        if self._copies.get(key, _NOTHING)[0] == record:
            return
        if (key, former) in self._removals:
            del self._removals[key, former]
        else:
            former = b""
        self._forget_copy(key)
        if len(self._copies) >= COPIES_MAX:
            self._forget_copy(next(iter(self._copies)))
            self.due_round()
        self._copies[key] = record, former

    def withdraw_copy(self, key: Key, record: bytes) -> None:
        """Queue the removal of the record of a block that left its disk."""
        self._forget_copy(key)
        self.remove(key, record)

    def _forget_copy(self, key: Key) -> None:
        _, former = self._copies.pop(key, _NOTHING)
        if former:
            self.remove(key, former)

    def due_round(self) -> None:
        """Have all blocks on disks looked through; once more where that is under way."""
        self.rounds_due = min(self.rounds_due + 1, 2)

    def remove(self, key: Key, record: bytes) -> None:
        """Have this record removed: the index may hold it, and it is wrong."""
        if len(self._removals) >= self._removals_max:
            self._removals.popitem(last=False)
            self.forgotten += 1
        self._removals[key, record] = None

    def take_publications(self, at_most: int) -> list[KeyedRecord]:
        """Return what to publish next, oldest first; it stays pending until `published` confirms
        it. Records of blocks on disks come alone, when nothing else waits."""
        work: list[KeyedRecord] = []
        pending = chain(self._unpublished.items(), self._unknown.items())
        for key, slot in islice(pending, at_most):
            slot.published = True
            work.append((key, slot.record))
        for key, (record, _) in islice(self._copies.items(), 0 if work else at_most):
            work.append((key, record))
        return work

    def published(self, work: Sequence[KeyedRecord]) -> None:
        """Note that the index took `work`. Blocks that changed meanwhile stay pending."""
        for pending in filter(None, (self._unpublished, self._unknown)):
            for key, record in work:
                slot = pending.get(key)
                if slot is not None and slot.record == record:
                    del pending[key]
        if self._copies:
            for key, record in work:
                if self._copies.get(key, _NOTHING)[0] == record:
                    del self._copies[key]

    def postpone(self, work: Iterable[KeyedRecord]) -> None:
        """Move these behind everything else that is pending, because part of the index is away."""
        for key, record in work:
            slot = self._unpublished.get(key) or self._unknown.get(key)
            if slot is not None and slot.record == record:
                self._unpublished.pop(key, None)
                self._unknown[key] = slot
                self._unknown.move_to_end(key)
            elif key in self._copies:
                self._copies.move_to_end(key)

    def take_removals(self, at_most: int) -> list[KeyedRecord]:
        """Return records to compare-and-delete; they stay pending until `removed` confirms them.

        Their order against publications is free, because a removal names its record.
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
        """Queue the latest removals again, because the index went back to an earlier state."""
        removed, self._removed = self._removed, OrderedDict()
        for key, record in removed:
            self.remove(key, record)
