"""Decides what of a node's blocks goes to its disks, and what must never come back from there.

A disk has copies: a block that leaves memory is evicted as ever, and whether it is on a disk by
then is this file's doing. With `write`:

    eviction   the coldest blocks, as many as a burst of saves is likely to need the room of
               (`MARGIN_PART`), are written ahead; so memory that is not full writes nothing
    idle       the same, and in pauses all blocks that were saved `IDLE_S` before
    through    every block, soon after it was saved

What is on a disk is not written again. The oldest region of a disk is written over for the next
blocks, and of its blocks these are written again, within `AgainBudget`: what is retained in memory,
at once; what is in memory else, when it is to be evicted there; what was used on the disk, at once.
A block that left both and is saved again is a first one. What never goes to a disk is counted when
it is evicted, each block once, with its reason (`SKIPPED`).

A block is named to the writer thread with its place (`Spill`), is in `_writing` until that tells
what became of it (`Spilled`), and then in the index. Between, anything may happen to it: it may be
evicted (its bytes are whole, if they were copied before), saved again, deleted. What drops a key
takes it out of both. It must stay away at the next start too: it is in `outgoing` (`Forbid`), and
the answers wait for the log. While a start still adopts, nobody knows what else is on the disks, so
whatever is dropped is forbidden, and not adopted.

What leaves the index for another reason (its entry had to go, it is damaged, its write or its
device failed) is forbidden too, and nobody waits for that. So a delete that finds a key nowhere
forbids nothing; but its answer waits until all that was forbidden before is durable, and so does
that to a save of a value.

Must never happen: a key whose value in memory was saved by a client after the one in the index, and
is another one; a block in the index that was dropped after it was written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice

from kvstore.core.answers import Answer, SpillBlock, SpillPlan
from kvstore.core.blocks import Blocks
from kvstore.core.disk.base import DISK_PAGE, DiskIndex, Forbid, is_later, order_of
from kvstore.core.disk.budget import (
    AGAIN_PERCENT,
    EARLY_PERCENT,
    IN_MEMORY_PERCENT,
    USED_PERCENT,
    AgainBudget,
    WriteBudget,
)
from kvstore.core.disk.ring import Ring
from kvstore.core.events import (
    Begun,
    DiskAdopted,
    DiskClosed,
    DiskDamaged,
    DiskFound,
    DiskRequest,
    Spill,
    Spilled,
    Vacate,
)
from kvstore.core.memory.slots import Slot, SlotState
from kvstore.core.outgoing.departures import GoneWhy
from kvstore.keys import ttl_of
from kvstore.types import DiskBlock, DiskPlace, Key, Kind

WRITE_MODES = ("eviction", "idle", "through")
VALUE_BYTES_MIN = 16 << 10
"""Smaller blocks stay in memory: a disk takes as long for them."""
MARGIN_PART = 8
MARGIN_BYTES_MAX = 1 << 30
"""The coldest eighth of the memory, at most so much of it, is written before it is evicted."""
QUIET_S = 0.02
BUSY_PART = 4
"""While blocks are saved and loaded, with no longer pause than that, it is a part of the margin."""
LOOKED_MAX = 4096
"""Blocks that one `Spill` looks at: a millisecond of the node's loop."""
CHOSEN_MAX = 1 << 14
"""Keys whose device is remembered: to choose it takes some microseconds for each device."""
IDLE_S = 5.0
DROPPED_MAX = 1 << 18
"""Deleted keys that are remembered while a start adopts; after more nothing is adopted any more."""
PROMOTED_MAX = 1024
"""Blocks that wait to be read back; further ones are not."""
SKIPPED = ("small", "large", "ttl", "budget", "no_device", "table_full", "late", "again")
"""Why an evicted block is on no disk. `late`: it was to be written, and was evicted before;
`table_full`: it was there, and its entry had to go for another one; `again`: it was there, and
enough was written again."""
_COUNTED = (
    *("written_bytes", "again_bytes", "regions_evicted", "evicted", "damaged", "promoted"),
    "adopted",
)


class DiskTier:
    """What a node keeps on its disks. The node's event loop alone uses it."""

    def __init__(
        self,
        index: DiskIndex,
        devices: Iterable[int],
        *,
        write: str = "idle",
        bytes_per_day: int = 0,
        closed: int = 0,
    ) -> None:
        """Begin without a disk; those of these numbers are to be found, or closed. As many as
        `closed` could not be opened."""
        self.index = index
        self.forbidden = 0
        """How many `Forbid` there were."""
        self.clears = 0
        self.counts = dict.fromkeys((*_COUNTED, *(f"skipped_{why}" for why in SKIPPED)), 0)
        self.closed = closed
        """How many disks of the node do not work."""
        self._outgoing: list[Forbid] = []
        self._noted = False
        """Whether the devices know that this start deleted or replaced something."""
        self._confirms = False
        """Whether the answers to this event say that no other value of their keys is left."""
        self._write = write
        self._budget = WriteBudget(bytes_per_day)
        self._again = AgainBudget()
        self._rings: dict[int, Ring] = {}
        self._chosen: dict[Key, int] = {}
        """By key the device that it chose, of those that there are."""
        self._adopting = set(devices)
        """Devices of which not everything is known yet."""
        self._dropped: set[Key] = set()
        self._cleared: set[int] | None = set()
        """Keys and namespaces (None: all) that must not be adopted any more."""
        self._untold = False
        """Not all that is on a device was told, or taken: it may have anything."""
        self._sweeps: list[tuple[Forbid, int]] = []
        """Cleared namespaces whose blocks are still in the index, from that place on."""
        self._writing: dict[Key, SpillBlock] = {}
        self._promote: dict[Key, None] = {}
        self._unwritten: dict[int, int] = {}
        """Generations by slot of what may be written before its turn to be evicted comes."""
        self._busy_at = 0.0
        self._round_at = 0
        """Where a round over the index goes on."""

    def attach(self, blocks: Blocks, newest_reset: Callable[[], int]) -> None:
        """Serve the node that has these blocks; `newest_reset` is the number of its latest."""
        self._blocks = blocks
        self._newest_reset = newest_reset
        blocks.on_evicted = self._evicted
        blocks.disk_copy = self.there
        self._queue(slot for slot in blocks.by_key.values() if slot.state is SlotState.SEALED)

    def handle(self, event: DiskRequest, now: float) -> Answer:
        """Do what a thread of the disks asks; returns its answer."""
        match event:
            case Spill():
                return self._spill(event, now)
            case Vacate():
                return self._vacate(event, now)
            case DiskAdopted():
                return self._adopt(event)
            case Spilled():
                self._spilled(event, now)
            case Begun():
                self._begun(event)
            case DiskFound():
                self._rings[event.device] = Ring(event)
                self._chosen.clear()
            case DiskDamaged():
                self._damaged(event, now)
            case DiskClosed():
                self._closed(event.device)
        return None

    # --- what happens in memory ---------------------------------------------------

    def stored(self, slots: Sequence[Slot]) -> None:
        """Note what clients saved. A value in place of another one forbids that."""
        self._busy_at = self._blocks.now
        values = [slot for slot in slots if slot.kind != Kind.BLOCK]
        replaced = [slot.key for slot in values if self._replaces(slot)]
        for slot in slots:
            slot.on_disk = slot.written = False
        self._queue(slots)
        self._confirms = self._confirms or bool(values)
        if replaced or (values and not self._noted):
            self._forbid(replaced, None)

    def _queue(self, slots: Iterable[Slot]) -> None:
        if self._write != "eviction":
            self._unwritten.update((slot.slot_id, slot.generation) for slot in slots)

    def _replaces(self, slot: Slot) -> bool:
        """Take out another value than the slot's. Blocks of engines are named by their content, so
        what is there of the same key is as right."""
        writing = self._writing.get(slot.key)
        there = self.index.get(slot.key) if writing is None else writing.block
        if there is None and not self._adopting and not self._untold:
            return False
        if there is not None and _same(slot, there):
            return False
        self._forget(slot.key)
        return True

    def _forget(self, key: Key) -> bool:
        """Take a key out wherever it is; returns whether it was somewhere."""
        self._promote.pop(key, None)
        if self._adopting:
            self._dropped.add(key)
            if len(self._dropped) > DROPPED_MAX:
                self._dropped, self._cleared, self._untold = set(), None, True
        was_there = self._writing.pop(key, None) is not None
        return self._take_out(key) or was_there

    def _take_out(self, key: Key) -> bool:
        """Take a block out, and have its record removed; False when it is not there."""
        block = self.index.get(key)
        if block is not None:
            self._withdraw(block)
        return self.index.remove(key)

    def _withdraw(self, block: DiskBlock) -> None:
        self._blocks.outbox.withdraw_copy(block.key, self._blocks.copy_record(block))

    def _evicted(self, victims: Sequence[Slot]) -> None:
        for slot in victims:
            if not slot.on_disk and (why := self._why_not(slot)):
                self.counts[f"skipped_{why}"] += 1

    def _why_not(self, slot: Slot) -> str:
        """Return why the block of a slot is not on a disk; empty when it is."""
        if slot.length < VALUE_BYTES_MIN:
            return "small"
        if ttl_of(slot.namespace_id):
            return "ttl"
        if not self._rings:
            return "no_device"
        if slot.length > max(ring.value_bytes_max for ring in self._rings.values()):
            return "large"
        if self.there(slot.key) is not None:
            return ""
        if not self._may_again(slot):
            return "again"
        return "late" if self._budget.left(self._blocks.now) >= slot.length else "budget"

    def _may_again(self, slot: Slot) -> bool:
        """Return whether a block in memory may be written: often enough it was not, since it was
        saved."""
        size_bytes = _in_pages(slot.length)
        return not slot.written or self._again.allows(size_bytes, IN_MEMORY_PERCENT)

    def there(self, key: Key) -> DiskBlock | None:
        """Return what is on a disk that works."""
        block = self.index.get(key)
        return block if block is not None and block.place.device in self._rings else None

    def touched(self, keys: Sequence[Key]) -> None:
        """Note that blocks were used: what is on a disk alone comes back the second time."""
        self._busy_at = self._blocks.now
        for key in keys:
            again = key not in self._blocks.by_key and self.index.mark_used(key)
            if again and len(self._promote) < PROMOTED_MAX:
                self._promote[key] = None

    def suspected(self, key: Key) -> None:
        """Have a block looked at that a client could not read, or read wrong bytes of."""
        if self.there(key) is not None and len(self._promote) < PROMOTED_MAX:
            self._promote[key] = None

    # --- what must not come back -----------------------------------------------------

    def dropped(self, keys: Sequence[Key], was_here: Sequence[bool]) -> list[bool]:
        """Take out deleted keys; returns which were there, in memory or on a disk."""
        there = [self._forget(key) for key in keys]
        anything = self._adopting or self._untold
        named = keys if anything else [k for k, is_ in zip(keys, there, strict=True) if is_]
        # The first time, a device that is away learns by it that something was deleted.
        if named or not self._noted:
            self._forbid(named, None)
        self._confirms = True
        return [one or other for one, other in zip(was_here, there, strict=True)]

    def clearing(self) -> None:
        """Note that blocks of namespaces are being dropped: nothing that is read from a disk
        meanwhile comes back."""
        self.clears += 1
        self._promote.clear()

    def cleared(self, namespace_ids: Sequence[int], reset_number: int) -> None:
        """Note that all blocks of these namespaces, of all when there are none, were dropped."""
        self.clearing()
        of = frozenset(namespace_ids)
        for key, block in list(self._writing.items()):
            if not of or block.block.namespace_id in of:
                del self._writing[key]
        if reset_number:
            for ring in self._rings.values():
                ring.reset()
        if self._adopting:
            self._cleared = self._cleared | of if of and self._cleared is not None else None
        self._confirms = True
        self._forbid((), tuple(namespace_ids), reset_number)

    def _forbid(
        self,
        keys: Sequence[Key],
        ids: tuple[int, ...] | None,
        number: int = 0,
        up_to: dict[int, int] | None = None,
    ) -> None:
        # What has keys was there: the last of it may have just left the index.
        if not (keys or self._rings or self._adopting or self._untold or self.index.blocks):
            return
        self.forbidden += 1
        forbid = Forbid(self.forbidden, keys, ids, number, up_to or self._orders())
        if ids is None:
            self._outgoing.append(forbid)
            self._noted = True
        else:
            self._sweeps.append((forbid, 0))

    def _orders(self) -> dict[int, int]:
        return {device: ring.order for device, ring in self._rings.items()}

    def confirms(self) -> bool:
        """Return whether the answers to the event that was just handled are to wait until all that
        was forbidden up to now is durable."""
        confirms, self._confirms = self._confirms, False
        return confirms

    @property
    def waits(self) -> bool:
        """Return whether the node's threads have not heard yet of all that was forbidden."""
        return bool(self._outgoing or self._sweeps)

    @property
    def sweeping(self) -> list[int]:
        """Return the serial numbers of what is not in effect yet."""
        return [forbid.serial for forbid, _ in self._sweeps]

    def outgoing(self) -> list[Forbid]:
        """Return what is to be made durable, each once."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def sweep(self, at_most: int) -> bool:
        """Take cleared blocks out of that many places of the index; returns whether there are more
        to look at. Once it has looked at all, the clear is to be made durable."""
        if self._sweeps:
            forbid, start = self._sweeps[0]
            gone, goes_on = self.index.clear(forbid.namespace_ids or (), start, at_most)
            for block in gone:
                self._withdraw(block)
            self._sweeps[0] = (forbid, goes_on)
            if not goes_on:
                del self._sweeps[0]
                # What was saved and written meanwhile may have been taken out, too.
                self._outgoing.append(forbid._replace(up_to=self._orders()))
        return bool(self._sweeps)

    # --- what is written ---------------------------------------------------------------

    def _spill(self, event: Spill, now: float) -> SpillPlan:
        left, budget = event.at_most_bytes, self._budget.left(now)
        devices = event.devices or self._rings
        blocks: list[SpillBlock] = []
        for slot in self._candidates(now):
            ring = self._ring_for(slot)
            if ring is None:
                continue
            if ring.device not in devices:
                self._queue([slot])
                continue
            # One that is larger than all that was asked for goes alone.
            fits = slot.length <= budget and (slot.length <= left or not blocks)
            place = ring.place(slot.length) if fits else None
            if place is None:
                self._queue([slot])
            if not fits:
                break
            if place is None:
                continue
            blocks.append(self._write_of(slot, place))
            left -= slot.length
            budget -= self._spend(slot.length, now, again=slot.written)
            if left < VALUE_BYTES_MIN:
                break
        wanting = (ring for ring in self._rings.values() if ring.wants_region)
        full = next((ring for ring in wanting if ring.device in devices), None)
        begin = None if full is None else full.next(self._newest_reset())
        return SpillPlan(blocks, begin, self._to_promote(event.at_most_bytes, devices), self.clears)

    def _candidates(self, now: float) -> Iterator[Slot]:
        """Yield what is to be written, not more than `LOOKED_MAX` of it; some may be there."""
        allocator = self._blocks.allocator
        all_ = self._write == "through"
        pauses = now - self._busy_at >= QUIET_S and self._again.allows(0, EARLY_PERCENT)
        if all_ or pauses:
            for slot_id, generation in list(islice(self._unwritten.items(), LOOKED_MAX)):
                slot = allocator.slot(slot_id)
                if slot is None or slot.generation != generation:
                    del self._unwritten[slot_id]
                elif all_ or slot.reserved_at <= now - IDLE_S:
                    del self._unwritten[slot_id]
                    yield slot
        margin_bytes = min(allocator.capacity_bytes // MARGIN_PART, MARGIN_BYTES_MAX)
        if now - self._busy_at < QUIET_S:
            margin_bytes //= BUSY_PART
        short_bytes = margin_bytes - allocator.free_bytes
        for slot in islice(allocator.coldest(), LOOKED_MAX):
            if short_bytes <= 0:
                return
            short_bytes -= slot.length
            yield slot

    def _ring_for(self, slot: Slot) -> Ring | None:
        """Return where the block of a slot is to be written: on the device that its key chooses
        (rendezvous hashing), so that one more or less moves no more than its share. None where it
        need not, or may not, be written now."""
        key = slot.key
        if slot.on_disk or slot.length < VALUE_BYTES_MIN or ttl_of(slot.namespace_id):
            return None
        if slot.state is not SlotState.SEALED or key in self._writing:
            return None
        there = self.there(key)
        alike = there is not None and (slot.length, slot.kind) == (there.length, there.kind)
        if alike and there is not None and slot.checksum in (0, there.checksum):
            slot.on_disk = slot.written = True
            return None
        if not self._may_again(slot):
            return None
        ring = self._rings.get(self._device_of(key))
        fits = ring is not None and ring.adopted and slot.length <= ring.value_bytes_max
        return ring if fits else None

    def _device_of(self, key: Key) -> int:
        """Return the device that a key chooses; -1 where there is none. Each device's writer asks,
        and most blocks that it looks at are others'."""
        device = self._chosen.get(key)
        if device is None:
            if len(self._chosen) >= CHOSEN_MAX:
                self._chosen.clear()
            ring = max(self._rings.values(), key=lambda ring: _score(key, ring), default=None)
            device = self._chosen[key] = -1 if ring is None else ring.device
        return device

    def _write_of(self, slot: Slot, place: DiskPlace) -> SpillBlock:
        what = (slot.length, slot.kind, slot.meta_length, slot.checksum, slot.namespace_id)
        block = DiskBlock(slot.key, place, *what)
        source = (slot.slot_id, slot.generation, slot.offset)
        write = SpillBlock(block, *source, again=slot.written)
        self._writing[slot.key] = write
        return write

    def _spend(self, length: int, now: float, *, again: bool) -> int:
        """Count what a block takes of a disk; returns it."""
        size_bytes = _in_pages(length)
        self._budget.spend(size_bytes, now)
        self.counts["written_bytes"] += size_bytes
        if again:
            self._again.again_bytes += size_bytes
            self.counts["again_bytes"] += size_bytes
        return size_bytes

    def _spilled(self, event: Spilled, now: float) -> None:
        lost: list[DiskBlock] = []
        if event.failed:
            for device in {asked.block.place.device for asked in event.blocks} & self._rings.keys():
                self._rings[device].reset()
        for asked, block in zip(event.blocks, event.written, strict=True):
            key = asked.block.key
            if self._writing.get(key) != asked:
                continue  # it was dropped meanwhile, and perhaps saved again
            del self._writing[key]
            if block is None:
                lost += [asked.block] if event.failed else []
                continue
            if not asked.again:
                self._again.first_bytes += _in_pages(block.length)
            replaced = self._put(block, lost)
            self._blocks.publish_copy(block)
            if replaced is not None and replaced.key != key:
                self.counts["skipped_table_full"] += 1
                self._leaves_disk(replaced.key, GoneWhy.EVICTED, now)
            slot = self._blocks.by_key.get(key)
            if slot is not None and slot.generation == asked.generation:
                slot.on_disk = slot.written = True
        self._forbid_lost(lost)

    def _put(self, block: DiskBlock, lost: list[DiskBlock]) -> DiskBlock | None:
        """Enter a block; returns what had to go for it. Of one key and device, who forbids a block
        forbids the earlier ones: others are `lost`."""
        gone = self.index.put(block)
        if gone is not None:
            self._withdraw(gone)
        if gone is not None and (gone.key != block.key or not is_later(block, gone)):
            lost.append(gone)
        return gone

    def _forbid_lost(self, lost: Sequence[DiskBlock]) -> None:
        """Forbid blocks that may be on a disk and are in no index any more: a delete, and another
        value, would not. Other copies stay."""
        for device in {block.place.device for block in lost}:
            own = [block for block in lost if block.place.device == device]
            up_to = {device: max(order_of(block.place) for block in own)}
            keys = [block.key for block in own]
            self._forbid(keys, None, 0, dict.fromkeys(self._rings, 0) | up_to)

    def _damaged(self, event: DiskDamaged, now: float) -> None:
        block = event.block
        if self.index.get(block.key) == block:
            self._take_out(block.key)
            self._leaves_disk(block.key, GoneWhy.CORRUPT, now)
            self._forbid_lost([block])

    def _leaves_disk(self, key: Key, why: GoneWhy, now: float) -> None:
        self.counts["evicted" if why is GoneWhy.EVICTED else "damaged"] += 1
        slot = self._blocks.by_key.get(key)
        if slot is not None:
            slot.on_disk, slot.written = False, True
        else:
            self._blocks.departures.note(key, why, now)

    def _vacate(self, event: Vacate, now: float) -> list[SpillBlock]:
        ring, again = self._rings.get(event.begin.device), list[SpillBlock]()
        if ring is None:
            return again
        ring.vacate(event.begin)
        for block in event.blocks:
            there = self.index.get(block.key)
            if there is None or there.place != block.place:
                continue
            # What is in memory is written again when it is the coldest there: never, while it is
            # retained.
            slot = self._blocks.by_key.get(block.key)
            hot = self.index.is_used(block.key) if slot is None else slot.kept_until > 0
            percent = USED_PERCENT if slot is None else AGAIN_PERCENT
            affordable = block.length <= self._budget.left(now)
            affordable = affordable and self._again.allows(_in_pages(block.length), percent)
            place = ring.again(block.length, percent) if hot and affordable else None
            self._take_out(block.key)
            if place is None:
                self._leaves_disk(block.key, GoneWhy.EVICTED, now)
                continue
            if slot is not None:
                slot.on_disk, slot.written = False, True  # until it is there
            self._spend(block.length, now, again=True)
            write = SpillBlock(there._replace(place=place), -1, 0, 0, there.place, again=True)
            self._writing[block.key] = write
            again.append(write)
        return again

    def _begun(self, event: Begun) -> None:
        ring = self._rings.get(event.begin.device)
        if ring is not None and event.done:
            self.counts["regions_evicted"] += event.begin.former_lap > 0
            ring.begun(event.begin, self._newest_reset())
        elif ring is not None:
            ring.skip(event.begin.region)

    def _to_promote(self, at_most_bytes: int, devices: Container[int]) -> list[DiskBlock]:
        found: list[DiskBlock] = []
        for key in [] if self._sweeps else list(self._promote):
            block = self.there(key)
            if at_most_bytes <= 0:
                break
            if block is not None and block.place.device not in devices:
                continue
            del self._promote[key]
            if block is not None and key not in self._blocks.by_key:
                found.append(block)
                at_most_bytes -= block.length
        return found

    def promoted(self, slots: Sequence[Slot]) -> None:
        """Note what was read back into memory."""
        self.counts["promoted"] += len(slots)
        for slot in slots:
            slot.on_disk = slot.written = True

    # --- devices ---------------------------------------------------------------------

    def _adopt(self, event: DiskAdopted) -> int:
        """Enter what a former start wrote, unless it was dropped since this one began."""
        before, lost = self.index.blocks, list[DiskBlock]()
        if event.device in self._rings and self._cleared is not None:
            gone, left_out = self.index.adopt(event.blocks, self._dropped, self._cleared)
            for block in gone:
                self._withdraw(block)
            lost = [*left_out, *(block for block in gone if not self._has_later(block))]
        self._forbid_lost(lost)
        adopted = self.index.blocks - before
        self.counts["adopted"] += adopted
        if event.last and event.device in self._rings:
            self._rings[event.device].adopted = True
            self._known(event.device)
        return adopted

    def _has_later(self, block: DiskBlock) -> bool:
        there = self.index.get(block.key)
        return there is not None and is_later(there, block)

    def _closed(self, device: int) -> None:
        self.closed += device in self._rings or device in self._adopting
        self.index.device_closed(device)
        writing = [write.block for write in self._writing.values()]
        lost = [block for block in writing if block.place.device == device]
        for block in lost:
            del self._writing[block.key]
        self._forbid_lost(lost)
        self._rings.pop(device, None)
        self._chosen.clear()
        self._untold = self._untold or device in self._adopting
        self._known(device)

    def _known(self, device: int) -> None:
        self._adopting.discard(device)
        if not self._adopting:
            self._blocks.outbox.due_round()
            self._dropped, self._cleared = set(), set()

    # --- telling ----------------------------------------------------------------------

    def ends(self) -> None:
        """Look at the index no more."""
        self._blocks.disk_copy, self._blocks.outbox.rounds_due = None, 0

    def queue_copies(self, at_most: int) -> None:
        """Look through so many places of the index for blocks that are on a disk alone, and queue
        their records: part of a round that is due. Of a disk that was closed they are removed."""
        blocks, self._round_at = self.index.walk(self._round_at, at_most)
        for block in blocks:
            if block.place.device in self._rings:
                self._blocks.publish_copy(block)
            else:
                # It stays in the index: who deletes it must hear that it may come back.
                self._withdraw(block)
        if not self._round_at:
            self._blocks.outbox.rounds_due -= 1

    def numbers(self) -> dict[str, int]:
        """Return what `stats` says of the disks; bytes written are without headers."""
        return {
            "disk_devices": len(self._rings),
            "disk_closed": self.closed,
            "disk_adopting": len(self._adopting),
            "disk_capacity_bytes": sum(ring.capacity_bytes for ring in self._rings.values()),
            "disk_blocks": self.index.blocks,
            "disk_bytes": self.index.block_bytes,
            **{f"disk_{name}": count for name, count in self.counts.items()},
        }


def _in_pages(length: int) -> int:
    """Return what a block takes of a disk, in bytes."""
    return -(-length // DISK_PAGE) * DISK_PAGE


def _same(slot: Slot, block: DiskBlock) -> bool:
    """Return whether what is on a disk is known to be the value of a slot."""
    described = (slot.length, slot.kind, slot.meta_length) == block[2:5]
    return described and slot.checksum == block.checksum != 0


def _score(key: Key, ring: Ring) -> float:
    """Return how much a key wants to be on a device; larger devices are wanted by more."""
    drawn = int.from_bytes(blake2b(key, digest_size=7, key=ring.uuid).digest(), "little")
    return -ring.capacity_bytes / math.log((drawn + 1) / (1 << 56 | 1))
