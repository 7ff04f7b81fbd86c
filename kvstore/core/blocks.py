"""Moves the blocks of one node from state to state, and notes what the index must learn of it.

All ways from one state to another stand together here: whoever changes one must see the
others. Who asks for them, and who may, is node.py's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvstore.core.bounded import NO_TENANT, Bounded
from kvstore.core.events import (
    Bounds,
    Copy,
    Fill,
    Hold,
    Keep,
    Mark,
    Write,
    mark_of,
    seal_of,
)
from kvstore.core.memory.allocator import LOOKED_FIRST, LOOKED_MAX, Allocator, move_cost
from kvstore.core.memory.eviction import PolicyFactory
from kvstore.core.memory.granules import GRANULE_BYTES, PAGE, granules_of
from kvstore.core.memory.listed import Listed
from kvstore.core.memory.retained import Retentions
from kvstore.core.memory.slots import Slot, SlotEvent, SlotState, move_each, parts_of
from kvstore.core.outgoing.changes import Changes
from kvstore.core.outgoing.departures import GONE_KEYS_MAX, Departures, GoneWhy
from kvstore.core.outgoing.outbox import KeyedRecord, Outbox
from kvstore.keys import ttl_of
from kvstore.limits import (
    EXPIRED_AT_ONCE_BYTES,
    MOVED_BYTES_MAX,
    PENDING_REMOVE_MAX,
    SLOT_BYTES_MIN,
    VALUE_BYTES_MAX,
    Limits,
)
from kvstore.record import BlockParts, RecordSigner, node_start, pack_each, pack_place
from kvstore.types import Key

GENERATIONS_AHEAD = 1 << 20
"""How many are given out between two notes of how far they go."""
PAGES_AHEAD = 1 << 12
"""As many more pages than are used count as used at a restart."""
# recovered, recovery_dropped: by the start (recovery.py); repaired: by the scrub.
COUNTED = (
    *("stored", "exists", "in_progress", "rejected", "evicted", "expired", "moved", "retentions"),
    *("retentions_refused", "retentions_broken", "aborted", "dropped", "corrupt", "writers_died"),
    *("tasks_failed", "recovered", "recovery_dropped", "repaired"),
)


class Blocks:
    """Slots, the keys of those that hold something, and what Redis has yet to hear."""

    def __init__(
        self,
        *,
        node_id: int,
        epoch: int,
        size_bytes: int,
        limits: Limits,
        policy: PolicyFactory,
        signer: RecordSigner | None,
    ) -> None:
        self.node_id = node_id
        self.epoch = epoch
        self._signer = signer
        self._start = node_start(node_id, epoch)
        self.allocator = Allocator(size_bytes, policy)
        self.bounds = Bounds(0, 0, size_bytes // SLOT_BYTES_MIN)
        """As a restart would find them."""
        self._generation = 0
        self.by_key: dict[Key, Slot] = {}
        """Every key that is SEALED or RESERVED here."""
        self.listed = Listed()
        """The SEALED ones among them."""
        self.outbox = Outbox(PENDING_REMOVE_MAX)
        """What Redis has yet to hear."""
        self.changes: Changes | None = None
        """What others are told of stored and removed blocks; None: nobody is."""
        self.gone = Departures(GONE_KEYS_MAX)
        self.retained = Retentions(
            size_bytes, limits.retained_percent, limits.retained_tenant_percent
        )
        self.bounded = Bounded()
        self.names: dict[Key, bytes] = {}
        """What users call the keys of values that are there, as far as clients have told."""
        self._may_move = 0
        """What of `MOVED_BYTES_MAX`, in granules, is left for the request at hand."""
        self._no_room_bytes = VALUE_BYTES_MAX + 1
        """Values of so many bytes found no room in the request at hand."""
        self.now = 0.0
        """When the event that is being handled happened."""
        self.least = 1
        """Uses that the next block of the run at hand has at least."""
        self.counts: dict[str, int] = dict.fromkeys(COUNTED, 0)

    def begin_event(self, now: float, writes: list[Write]) -> None:
        """An event happens now: end what is over by then."""
        self.now = now
        self.allocator.begins(now)
        if self.retained.next_end <= now:
            for slot in self.retained.over(now):
                self.end_retention(slot, writes)
        if self.bounded.next_end <= now:
            self._expire(writes, EXPIRED_AT_ONCE_BYTES)

    def begin_request(self) -> None:
        """A request for slots begins: as much may move as for any other."""
        self._may_move = MOVED_BYTES_MAX // GRANULE_BYTES
        self._no_room_bytes = VALUE_BYTES_MAX + 1

    def take(self, length: int, count: int, writes: list[Write], now: float) -> list[Slot]:
        """Slots in state RESERVED for up to `count` values of `length` bytes each: as many as find
        room at once. None when every one that fits is reserved or pinned."""
        slots = self.allocator.take(length, count)
        if not slots and length < self._no_room_bytes:
            slots = self._make_room(length, count, writes, now)
        self._begin(slots, writes)
        return slots

    def _make_room(self, length: int, count: int, writes: list[Write], now: float) -> list[Slot]:
        """Slots whose room others have left. A long look for a window without retained blocks comes
        after those were moved, where that helps."""
        for look in (LOOKED_FIRST, LOOKED_MAX) if len(self.retained) else (LOOKED_MAX,):
            # Each says FREE before the slot that takes their place says RESERVED: headers
            # within an extent are those of nothing, whenever the node is killed.
            self._evict(self.allocator.victims(length, count, look), writes, now)
            slots = self.allocator.take(length, count)
            if not slots and look < LOOKED_MAX:
                self._move_away(length, writes, now)
                slots = self.allocator.take(length, count)
            if slots:
                return slots
        self._no_room_bytes = length
        return []

    def _evict(self, victims: Sequence[Slot], writes: list[Write], now: float) -> None:
        assert not any(victim.kept_until for victim in victims)
        self.counts["evicted"] += len(victims)
        self.allocator.evicted(victims)
        self.free(victims, SlotEvent.EVICT, writes)
        self.gone.note_each((victim.key for victim in victims), GoneWhy.EVICTED, now)

    def _move_away(self, length: int, writes: list[Write], now: float) -> None:
        """Have retained blocks that alone are in the way of `length` bytes move to where others
        are evicted."""
        most = max(self._may_move, granules_of(length))
        victims, moves = self.allocator.clearance(length, most)
        for old, place in moves:
            self._may_move -= move_cost(old)
            self._evict([place], writes, now)
            self._move(old, self.allocator.take_over(place, old.size), writes)
        self._evict(victims, writes, now)

    def _begin(self, slots: Sequence[Slot], writes: list[Write]) -> None:
        """FREE to RESERVED."""
        for slot in slots:
            self._generation += 1
            slot.generation = self._generation
        self._keep_bounds(writes)
        move_each(slots, SlotEvent.RESERVE)

    def _move(self, old: Slot, new: Slot, writes: list[Write]) -> None:
        """The same retained block in another slot, under another generation (rule 4).

        It is SEALED there before its old header says FREE: whenever the node is killed, one of
        them is whole, and of two a restart takes the later.
        """
        self._begin([new], writes)
        new.key = old.key
        new.length = old.length
        new.kind = old.kind
        new.meta_length = old.meta_length
        new.namespace_id = old.namespace_id
        new.checksum = old.checksum
        new.reserved_at = old.reserved_at
        new.used_at = old.used_at
        writes.append(Mark(new.slot_id, SlotState.RESERVED, new.generation, new.granule, new.size))
        writes.append(Copy(old.offset, new.offset, old.length))
        self.by_key[new.key] = new
        # The headers hold the key twice for a moment, the books never.
        freed: list[Write] = []
        until_s, tenant = old.kept_until, old.tenant
        self._retain_no_more(old, freed)
        self.free([old], SlotEvent.EVICT, freed)
        self.retain(new, until_s, tenant, writes)
        self.seal([new], writes)
        writes += freed
        self.counts["moved"] += 1

    def _keep_bounds(self, writes: list[Write]) -> None:
        """Have the segment say what a restart must know, before anything is beyond it."""
        bounds, allocator = self.bounds, self.allocator
        if (
            self._generation <= bounds.generation
            and allocator.used_below <= bounds.used_below * PAGE
            and allocator.used_from >= bounds.used_from * PAGE
        ):
            return
        generation, below, from_ = bounds
        if self._generation > generation:
            generation = self._generation + GENERATIONS_AHEAD
        pages = allocator.capacity_bytes // SLOT_BYTES_MIN
        if allocator.used_below > below * PAGE:
            below = min(pages, -(-allocator.used_below // PAGE) + PAGES_AHEAD)
        if allocator.used_from < from_ * PAGE:
            from_ = max(0, allocator.used_from // PAGE - PAGES_AHEAD)
        self.bounds = Bounds(generation, below, from_)
        writes.append(self.bounds)

    def restore(self, bounds: Bounds) -> None:
        """Go on after these of a former start: no generation comes twice."""
        self.bounds = bounds
        self._generation = bounds.generation

    def seal(self, slots: Sequence[Slot], writes: list[Write], *, run: bool = False) -> None:
        """RESERVED to SEALED. `run`: the end of a run comes first."""
        move_each(slots, SlotEvent.COMMIT)
        for slot in slots:
            if ttl_s := ttl_of(slot.namespace_id):
                self.bounded.add(slot, int(self.now) + ttl_s)
                writes.append(Keep(slot.slot_id, slot.dies_at, NO_TENANT))
        parts = parts_of(slots)
        for slot, record in zip(slots, self._records(parts), strict=True):
            slot.record = record
            slot.published = False
        self.listed.add(*slots)
        if self.changes is not None:
            for slot in slots:
                self.changes.stored(slot.key)
        if run:
            self.least = self.allocator.became_evictable(*slots, least=self.least, run=True)
        else:
            self.allocator.became_evictable(*slots)
        writes += map(seal_of, parts)
        self.outbox.publish(*slots)

    def release(self, slot: Slot, why: GoneWhy, writes: list[Write], now: float) -> None:
        """End a reservation unsealed."""
        self.counts["aborted"] += 1
        if slot.key:  # not known of one that a former start of the node granted
            self.gone.note(slot.key, why, now)
        self._forget_keys(slot)
        slot.move(SlotEvent.ABORT)
        writes.append(Mark(slot.slot_id, SlotState.FREE, slot.generation))
        self.wipe(slot, writes)
        self.allocator.became_free(slot)

    def wipe(self, slot: Slot, writes: list[Write]) -> None:
        """Leave nothing of a block whose life is bounded, nor of what nobody knows any more."""
        if ttl_of(slot.namespace_id) or not slot.key:
            writes.append(Fill(slot.offset, bytes(slot.size * GRANULE_BYTES)))

    def _forget_keys(self, *slots: Slot) -> None:
        for slot in slots:
            if self.by_key.get(slot.key) is slot:
                del self.by_key[slot.key]
                self.names.pop(slot.key, None)

    def free(self, slots: Sequence[Slot], event: SlotEvent, writes: list[Write]) -> None:
        """Take SEALED slots out: readers miss from here on, the index hears of it."""
        bounded = [slot for slot in slots if slot.dies_at]
        for slot in slots:
            if slot.kept_until:
                self.counts["retentions_broken"] += 1
                self._retain_no_more(slot, writes)
            if slot.former_epoch:
                self.outbox.remove(slot.key, self.record(slot, slot.former_epoch))
            if self.changes is not None:
                self.changes.removed(slot.key)
        for slot in bounded:
            self.bounded.remove(slot)
        self._forget_keys(*slots)
        self.listed.remove(*slots)
        self.outbox.withdraw(*slots)
        move_each(slots, event)
        free = SlotState.FREE
        writes += map(mark_of, [(slot.slot_id, free, slot.generation, 0, 0) for slot in slots])
        for slot in bounded:
            writes.append(Keep(slot.slot_id, 0, 0))
            if slot.state is free:
                self.wipe(slot, writes)
        self.allocator.became_free(*(slot for slot in slots if slot.state is free))

    def _expire(self, writes: list[Write], at_most_bytes: int) -> None:
        """Wipe blocks whose life is over, the first `at_most_bytes` of them."""
        for slot in self.bounded.over(self.now, at_most_bytes):
            self.counts["expired"] += 1
            self.gone.note(slot.key, GoneWhy.EXPIRED, self.now)
            self.free([slot], SlotEvent.DOOM if slot.pins else SlotEvent.EVICT, writes)

    def drop(self, slot: Slot, why: GoneWhy, writes: list[Write], now: float) -> bool:
        """Drop a block by request; a reserved one will not be sealed."""
        self.gone.note(slot.key, why, now)
        if slot.state is SlotState.RESERVED:
            slot.void = True
            self._forget_keys(slot)
            return False
        self.free([slot], SlotEvent.DOOM if slot.pins else SlotEvent.EVICT, writes)
        self.counts["dropped"] += 1
        return True

    def retain(self, slot: Slot, until_s: int, tenant: int, writes: list[Write]) -> None:
        """Retain a slot that is not. One that may be evicted is to be taken out of those first."""
        self.retained.add(slot, until_s, tenant)
        writes.append(Keep(slot.slot_id, until_s, tenant))

    def _retain_no_more(self, slot: Slot, writes: list[Write]) -> None:
        """End a retention, if there is one; whether the slot may be evicted then is not decided
        here."""
        if slot.kept_until:
            self.retained.remove(slot)
            writes.append(Keep(slot.slot_id, 0, 0))

    def end_retention(self, slot: Slot, writes: list[Write]) -> None:
        """A retained block becomes one like others: not one use more, but it goes after them."""
        self._retain_no_more(slot, writes)
        if not slot.pins:
            self.allocator.became_evictable(slot, least=0)

    def pin(self, slot: Slot, writes: list[Write]) -> None:
        if slot.pins == 0:
            self.allocator.became_busy(slot)
            writes.append(Hold(slot.slot_id, True))
        slot.pins += 1

    def pinned(self, slot_id: int) -> Slot:
        slot = self.allocator.slot(slot_id)
        assert slot is not None
        assert slot.pins > 0
        return slot

    def unpin(self, slot: Slot, count: int, writes: list[Write], least: int = 1) -> int:
        """`least` and what is returned are as in `EvictionPolicy`: who lets go has used it."""
        slot.pins -= count
        assert slot.pins >= 0
        if slot.pins:
            return least
        writes.append(Hold(slot.slot_id, False))
        if slot.state is SlotState.DOOMED:
            slot.move(SlotEvent.UNPIN)
            self.wipe(slot, writes)
            self.allocator.became_free(slot)
            return least
        return self.allocator.became_evictable(slot, least=least)

    def record(self, slot: Slot, epoch: int) -> bytes:
        """The record of a block in the index, as a start of that epoch writes it."""
        record = pack_place(
            slot.key,
            self.node_id,
            epoch,
            0,
            slot.slot_id,
            slot.generation,
            slot.granule,
            slot.length,
            slot.checksum,
        )
        return record if self._signer is None else self._signer.signed(slot.key, record)

    def _records(self, blocks: list[BlockParts]) -> list[bytes]:
        """The records of blocks that are sealed now."""
        records = pack_each(self._start, blocks)
        if self._signer is None:
            return records
        keys = [key for _, _, key, *_ in blocks]
        return list(map(self._signer.signed, keys, records))

    def republish(self) -> int:
        """The index lost keys: everything sealed must be published again, the latest first.

        After a failover stale records may be there, or be there again: pending
        removals stay, and the latest that were done are repeated.
        """
        self.outbox.remove_again()
        for slot in reversed(self.by_key.values()):
            if slot.state is SlotState.SEALED:
                self.outbox.publish_again(slot)
        return self.outbox.publications_pending

    def take_published(self, at_most: int) -> list[KeyedRecord]:
        """Forget up to `at_most` published blocks and return their records (the node ends)."""
        slots = list(islice((s for s in self.by_key.values() if s.published), at_most))
        for slot in slots:
            del self.by_key[slot.key]
            self.listed.remove(slot)
        return [(slot.key, slot.record) for slot in slots]
