"""Moves the blocks of one node from state to state, and notes what the index must learn of it.

All ways from one state to another stand together here: whoever changes one must see the
others. Who asks for them, and who may, is node.py's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from kvstore.core.outgoing.watched import Watched
from kvstore.keys import ttl_of
from kvstore.limits import (
    EXPIRED_AT_ONCE_BYTES,
    MOVED_BYTES_MAX,
    PENDING_REMOVE_MAX,
    RETAINED_BY_ONE_SHARE,
    SLOT_BYTES_MIN,
    VALUE_BYTES_MAX,
    Limits,
)
from kvstore.record import (
    BlockParts,
    RecordSigner,
    disk_location,
    node_start,
    pack_each,
    pack_place,
    pack_record,
)
from kvstore.types import DiskBlock, Key

GENERATIONS_AHEAD = 1 << 20
"""Generations that are given out between two records of the highest one."""
PAGES_AHEAD = 1 << 12
"""Pages beyond those in use that a restart counts as used."""
# recovered, recovery_dropped: by the start (recovery.py); repaired: by the scrub.
COUNTED = (
    *("stored", "exists", "in_progress", "rejected", "evicted", "expired", "moved", "retentions"),
    *("retentions_refused", "retentions_broken", "aborted", "dropped", "corrupt", "writers_died"),
    *("tasks_failed", "recovered", "recovery_dropped", "repaired"),
)


class Blocks:
    """Holds a node's slots, the keys of those in use, and what Redis has yet to receive."""

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
        """The bounds as a restart would find them."""
        self._generation = 0
        self.by_key: dict[Key, Slot] = {}
        """Every key that is SEALED or RESERVED here."""
        self.listed = Listed()
        """The SEALED keys among them."""
        self.outbox = Outbox(PENDING_REMOVE_MAX)
        """Records that Redis has yet to receive."""
        self.changes: Changes | None = None
        """Stored and removed blocks to report to others; None when nobody listens."""
        self.departures = Departures(GONE_KEYS_MAX)
        self.on_evicted: Callable[[Sequence[Slot]], None] | None = None
        """Told of blocks just before they are evicted; None when nobody listens."""
        self.disk_copy: Callable[[Key], DiskBlock | None] | None = None
        """Returns where a block lies on a disk that works; None when the node has none."""
        self.watched = Watched()
        percent = limits.retained_percent
        # Rounded up, so that 1% is not nothing.
        self.retained = Retentions(size_bytes, percent, -(-percent // RETAINED_BY_ONE_SHARE))
        self.bounded = Bounded()
        self.names: dict[Key, bytes] = {}
        """Names that users gave to values, as far as clients have sent them."""
        self._may_move = 0
        """What is left of `MOVED_BYTES_MAX` for the request at hand, in granules."""
        self._no_room_bytes = VALUE_BYTES_MAX + 1
        """Values of this many bytes or more found no room in the request at hand."""
        self.now = 0.0
        """Time of the event that is being handled."""
        self.min_uses = 1
        """The least number of uses that the next block of the run at hand has."""
        self.counts: dict[str, int] = dict.fromkeys(COUNTED, 0)

    def begin_event(self, now: float, writes: list[Write]) -> None:
        """Begin an event at `now`: end the lives and retentions that are over by then."""
        self.now = now
        self.allocator.begins(now)
        if self.retained.next_end <= now:
            for slot in self.retained.over(now):
                self.end_retention(slot, writes)
        if self.bounded.next_end <= now:
            self._expire(writes, EXPIRED_AT_ONCE_BYTES)

    def begin_request(self) -> None:
        """Begin a request for slots: it may move as many blocks as any other request."""
        self._may_move = MOVED_BYTES_MAX // GRANULE_BYTES
        self._no_room_bytes = VALUE_BYTES_MAX + 1

    def take(self, length: int, count: int, writes: list[Write], now: float) -> list[Slot]:
        """Return up to `count` RESERVED slots for values of `length` bytes each, as many as find
        room at once. The list is empty when each slot that would make room is reserved or
        pinned."""
        slots = self.allocator.take(length, count)
        if not slots and length < self._no_room_bytes:
            slots = self._make_room(length, count, writes, now)
        self._begin(slots, writes)
        return slots

    def _make_room(self, length: int, count: int, writes: list[Write], now: float) -> list[Slot]:
        """Evict blocks and return slots in their place. If retained blocks are in the way, they are
        moved before the whole segment is searched for a window without them."""
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
        self.watched.evicted(victims, now)
        if self.on_evicted is not None:
            self.on_evicted(victims)
        self.allocator.evicted(victims)
        self.free(victims, SlotEvent.EVICT, writes)
        self.go_on_from_disk(victims)
        self.departures.note_each((victim.key for victim in victims), GoneWhy.EVICTED, now)

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
        """Move each slot from FREE to RESERVED."""
        for slot in slots:
            self._generation += 1
            slot.generation = self._generation
        self._keep_bounds(writes)
        move_each(slots, SlotEvent.RESERVE)

    def _move(self, old: Slot, new: Slot, writes: list[Write]) -> None:
        """Move a retained block to another slot, under another generation (rule 4). The new slot is
        SEALED before the old header says FREE. So if the node is killed at any moment, one of them
        is whole, and of two a restart takes the later."""
        self._begin([new], writes)
        new.key = old.key
        new.length = old.length
        new.kind = old.kind
        new.meta_length = old.meta_length
        new.namespace_id = old.namespace_id
        new.checksum = old.checksum
        new.reserved_at = old.reserved_at
        new.used_at = old.used_at
        new.read = old.read
        new.on_disk = old.on_disk
        new.written = old.written
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
        """Move each slot from RESERVED to SEALED. With `run`, `slots` begin with the end of the
        run."""
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
            self.min_uses = self.allocator.became_evictable(
                *slots, min_uses=self.min_uses, run=True
            )
        else:
            self.allocator.became_evictable(*slots)
        writes += map(seal_of, parts)
        self.outbox.publish(*slots)

    def release(self, slot: Slot, why: GoneWhy, writes: list[Write], now: float) -> None:
        """End a reservation unsealed."""
        self.counts["aborted"] += 1
        if slot.key:  # not known of one that a former start of the node granted
            self.departures.note(slot.key, why, now)
        self._forget_keys(slot)
        slot.move(SlotEvent.ABORT)
        writes.append(Mark(slot.slot_id, SlotState.FREE, slot.generation))
        self.wipe(slot, writes)
        self.allocator.became_free(slot)

    def wipe(self, slot: Slot, writes: list[Write]) -> None:
        """Zero the bytes of a block whose life is bounded, or whose key, and so its bound, is not
        known."""
        if ttl_of(slot.namespace_id) or not slot.key:
            writes.append(Fill(slot.offset, bytes(slot.size * GRANULE_BYTES)))

    def _forget_keys(self, *slots: Slot) -> None:
        for slot in slots:
            if self.by_key.get(slot.key) is slot:
                del self.by_key[slot.key]
                self.names.pop(slot.key, None)

    def free(self, slots: Sequence[Slot], event: SlotEvent, writes: list[Write]) -> None:
        """Free SEALED slots: readers miss from here on, and their records are queued for
        removal."""
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
            self.departures.note(slot.key, GoneWhy.EXPIRED, self.now)
            self.free([slot], SlotEvent.DOOM if slot.pins else SlotEvent.EVICT, writes)

    def drop(self, slot: Slot, why: GoneWhy, writes: list[Write], now: float) -> bool:
        """Drop a block by request; a reserved one will not be sealed."""
        self.departures.note(slot.key, why, now)
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
        """End a retention. That does not count as a use, but the block is evicted last of those
        with as many uses."""
        self._retain_no_more(slot, writes)
        if not slot.pins:
            self.allocator.became_evictable(slot, min_uses=0)

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

    def unpin(self, slot: Slot, count: int, writes: list[Write], min_uses: int = 1) -> int:
        """Take back `count` pins of the slot; the client has used the block. `min_uses` and the
        result are as in `EvictionPolicy`."""
        slot.pins -= count
        assert slot.pins >= 0
        if slot.pins:
            return min_uses
        writes.append(Hold(slot.slot_id, False))
        if slot.state is SlotState.DOOMED:
            slot.move(SlotEvent.UNPIN)
            self.wipe(slot, writes)
            self.allocator.became_free(slot)
            return min_uses
        return self.allocator.became_evictable(slot, min_uses=min_uses)

    def record(self, slot: Slot, epoch: int) -> bytes:
        """Return the record of a block in the index, as a start of that epoch writes it."""
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

    def copy_record(self, block: DiskBlock) -> bytes:
        """Return the record of a block on a disk."""
        record = pack_record(block.key, disk_location(self.node_id, self.epoch, block))
        return record if self._signer is None else self._signer.signed(block.key, record)

    def publish_copy(self, block: DiskBlock, former: bytes = b"") -> None:
        """Queue the record of a block on a disk in place of `former`, unless it is in memory."""
        slot = self.by_key.get(block.key)
        if slot is None or slot.state is not SlotState.SEALED:
            self.outbox.publish_copy(block.key, self.copy_record(block), former)

    def go_on_from_disk(self, gone: Sequence[Slot]) -> None:
        """Have the index say of blocks that have just left memory on which disk they are, if they
        are on one."""
        if self.disk_copy is None:
            return
        for slot in gone:
            block = self.disk_copy(slot.key)
            if block is not None:
                self.publish_copy(block, slot.record)

    def _records(self, blocks: list[BlockParts]) -> list[bytes]:
        """Return the records of blocks that are sealed now."""
        records = pack_each(self._start, blocks)
        if self._signer is None:
            return records
        keys = [key for _, _, key, *_ in blocks]
        return list(map(self._signer.signed, keys, records))

    def republish(self) -> int:
        """Queue everything sealed for publication again, the latest first, because the index lost
        keys. After a failover stale records may be there, or come back: pending removals stay, and
        the latest completed ones are repeated."""
        self.outbox.remove_again()
        for slot in reversed(self.by_key.values()):
            if slot.state is SlotState.SEALED:
                self.outbox.publish_again(slot)
        if self.disk_copy is not None:
            self.outbox.due_round()
        return self.outbox.publications_pending

    def take_published(self, at_most: int) -> list[KeyedRecord]:
        """Forget up to `at_most` published blocks and return their records (the node ends)."""
        slots = list(islice((s for s in self.by_key.values() if s.published), at_most))
        for slot in slots:
            del self.by_key[slot.key]
            self.listed.remove(slot)
        return [(slot.key, slot.record) for slot in slots]
