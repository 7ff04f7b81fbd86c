"""Divides one segment: which extent is whose, and which blocks are evicted when none fits.

A segment is a run of pages. A slot is an extent of it that begins in the page of its number
and takes what its value needs (granules.py). Each granule is free (space.py) or of one slot,
and a slot is RESERVED, SEALED or DOOMED (slots.py); those that were freed last may be FREE
for a while, so that their places go whole to values of their size. Only the node's event
loop changes any of it: `take` makes slots, `became_free` ends them.

Placement: best fit. Large values come from the lower end of an extent, small ones from
the upper end: those that live beside each other are alike, and leave holes for the like.

Eviction, when nothing fits: the cheapest window of neighbouring free and evictable extents that
holds the request, around any of the coldest `COLD_TRIED` blocks, the coldest of the request's own
size before them. Cost is the bytes of live blocks
in it, each times how much later than the coldest the policy would have it go, so the coldest costs
nothing, however large; bytes decide between windows that are as cold. A window ends at what is
reserved, pinned or retained. When such slots shut all of those blocks in, the window is that of the
coldest which they do not. What was looked at around one block is not looked at again for the others
in it: they lie beside each other because they were saved together. What is shut in stays known
until something beside it might be let go. Where retained blocks alone leave no window, those in the
way of the cheapest around the coldest move to where others are evicted; no other block ever moves.
What follows:

- as long as some run of free and evictable extents is large enough, there is space (in a segment
  of more than `LOOKED_MAX` extents: if it is around one of the coldest blocks);
- a block that is as large as the request is evicted alone, so room for a small value
  never costs more than one block of another size;
- in no order of requests more is evicted at a time than the request and one block;
- what is pinned or reserved holds its own extent and nothing around it.

A bound for orders that an adversary chooses, without eviction: with values of `min_uses` to
`most` bytes a value of `most` can be refused for the first time when every hole is just
smaller than it, each between two of the smallest: from `least / (least + most)` of the
bytes on (Robson's bound is no better for allocators that do not move). Then one window is
evicted, `most` bytes at most and one block.

In one file, because placement, moves and eviction keep the same extents whole. Their orders have
files of their own (eviction.py, space.py), what a window costs has windows.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, islice, takewhile
from operator import attrgetter

from kvstore.core.memory.eviction import LRU, PolicyFactory
from kvstore.core.memory.granules import GRANULE_BYTES, PAGE, granules_of
from kvstore.core.memory.slots import Slot, SlotState
from kvstore.core.memory.space import Space
from kvstore.core.memory.windows import Extent, Window, cheapest, window_of
from kvstore.errors import InternalError, UsageError
from kvstore.limits import (
    SEGMENT_BYTES_MIN,
    SLOT_BYTES_MIN,
    SLOTS_PER_SEGMENT_MAX,
    VALUE_BYTES_MAX,
)

LOOKED_FIRST = 1 << 8
"""Extents that are searched for a window where retained blocks could move instead; 2 ms."""
LOOKED_ENOUGH = 1 << 12
"""Extents after which the search ends once a window was found: a value may take the place of
thousands of small blocks."""
LOOKED_MAX = 1 << 16
"""Extents that are searched for one window, at 2 us each; the node's loop answers nobody meanwhile.
The search goes beyond the first few only where pins or reservations shut nearly all blocks in."""
ALIKE_TRIED = 1 << 8
"""Blocks that are searched, coldest first, for one of the request's size: in its place the request
fits without evicting a neighbour. The search takes 20 us when there is none."""
LATER = 1 << 40
"""Cost of a granule for each step (with LRU, each use) between the coldest block and its own. A
granule by itself costs one, which decides between equally cold windows."""
SMALL_PART = 1024
"""A value smaller than this part of the segment counts as small."""
MOVE_COSTS = 128
"""Cost of moving a block besides its size: a header, a record, a publication."""
_SIZE = attrgetter("size")


class Allocator:
    """Slots of a segment of `size_bytes`. Sizes and places inside are in granules."""

    def __init__(self, size_bytes: int, policy: PolicyFactory = LRU) -> None:
        most = SLOTS_PER_SEGMENT_MAX * SLOT_BYTES_MIN
        if size_bytes % SLOT_BYTES_MIN or not SEGMENT_BYTES_MIN <= size_bytes <= most:
            raise UsageError(
                "size_bytes",
                size_bytes,
                f"must be a multiple of {SLOT_BYTES_MIN} from {SEGMENT_BYTES_MIN} to {most}",
            )
        self.capacity_bytes = size_bytes
        self.value_bytes_max = min(size_bytes, VALUE_BYTES_MAX)
        self.evicts = True
        """False: blocks leave only when somebody frees them, and a full segment takes nothing."""
        self._space = Space(size_bytes // GRANULE_BYTES)
        self._slots: dict[int, Slot] = {}
        self._ends: dict[int, Slot] = {}
        """Slots by the granule after their last one."""
        self._spares: list[Slot] = []
        """Slots of one size that were freed last: FREE, and not part of `_space` yet."""
        self._small = size_bytes // GRANULE_BYTES // SMALL_PART
        self._evictable = policy()
        self._tick = 0
        self._shut_in: set[int] = set()
        """Slots around which there is no window of `_shut_in_size` granules. They are forgotten
        when a slot becomes evictable or free."""
        self._shut_in_size = 0
        self.used_below = 0
        self.used_from = self._space.size
        """Between `used_below` and this granule none was ever used."""

    @property
    def free_bytes(self) -> int:
        """Return what no slot has. A value may still find no room in one piece."""
        spare = sum(slot.size for slot in self._spares)
        return (self._space.free + spare) * GRANULE_BYTES

    @property
    def largest_free_bytes(self) -> int:
        """Return about the largest value that finds room without an eviction."""
        spare = self._spares[0].size if self._spares else 0
        return max(self._space.largest, spare) * GRANULE_BYTES

    def slot(self, slot_id: int) -> Slot | None:
        """Return the slot that begins in that page."""
        return self._slots.get(slot_id)

    def slots(self) -> Collection[Slot]:
        """Return all slots that `slot` may return, in no order; those freed last may be FREE."""
        return self._slots.values()

    def may_go(self, slot: Slot) -> bool:
        """Return whether the policy has it among what may be evicted: slow, for checks."""
        return slot.slot_id in self._evictable.coldest()

    def begins(self, now: float) -> None:
        """Tell the policy that an event begins, at a time of the node's clock."""
        self._evictable.begins(now)

    # --- taking ---------------------------------------------------------------

    def take(self, length: int, count: int = 1) -> list[Slot]:
        """Return FREE slots for up to `count` values of `length` bytes each, as many as find room
        side by side. The list is empty when not one fits without an eviction. The slots are those
        that would be taken one by one."""
        size = granules_of(length)
        spares = self._spares
        if spares and spares[0].size == size:
            self._spares = spares[count:]
            return spares[:count]
        self._join_spares()
        return self._carve(size, count)

    def _carve(self, size: int, count: int) -> list[Slot]:
        small = size < self._small
        places = self._space.take(size, count, high=small)
        first = min(places, default=self.used_from)
        if small:
            self.used_from = min(first, self.used_from)
        elif first < self.used_from:
            # One that reaches beyond what small ones have used leaves nothing between the bounds.
            end = min(places[-1] + size, self.used_from)
            self.used_below = max(self.used_below, end)
        return [self._add(start, size) for start in places]

    def _add(self, start: int, size: int) -> Slot:
        slot = Slot(start, size)
        self._slots[slot.slot_id] = slot
        self._ends[start + size] = slot
        return slot

    def _join_spares(self) -> None:
        spares, self._spares = self._spares, []
        for slot in spares:
            self._join(slot)

    def _join(self, slot: Slot) -> None:
        del self._slots[slot.slot_id]
        del self._ends[slot.start + slot.size]
        self._space.give(slot.start, slot.size)

    def became_busy(self, slot: Slot) -> None:
        """Take the slot, which was pinned or retained, from the evictable ones."""
        self._evictable.remove(slot)

    def became_evictable(self, *slots: Slot, min_uses: int = 1, run: bool = False) -> int:
        """Make slots evictable that were sealed, or are no longer pinned or retained. Retained ones
        count as used but stay unevictable. `min_uses` and the result are as in `EvictionPolicy`.
        With `run`, `slots` begin with the end of a run, and each block passes its uses on to the
        next."""
        if slots:
            self._shut_in.clear()
        policy, uses = self._evictable, min_uses
        for slot in slots:
            self._tick += 1
            slot.last_use = self._tick
            hold = policy.touch if slot.kept_until else policy.insert
            uses = hold(slot, min_uses)
            if run:
                min_uses = uses
        return uses

    def became_free(self, *slots: Slot) -> None:
        """Free the slots at once, whether they were aborted, evicted, dropped, or unpinned after a
        drop."""
        self._join_spares()
        for slot in slots:
            if not self._evictable.remove(slot):
                self._shut_in.clear()
            slot.uses = 0
            if self._spares and self._spares[0].size != slot.size:
                self._join_spares()
            self._spares.append(slot)

    def used(self, slot: Slot, min_uses: int = 1) -> int:
        """Note that a reader used the block. `min_uses` and the result are as in
        `EvictionPolicy`."""
        self._tick += 1
        slot.last_use = self._tick
        return self._evictable.touch(slot, min_uses)

    def left(self, slots: Iterable[Slot]) -> None:
        """Have those of the slots that may be evicted go before all others, until they are used
        again."""
        for slot in slots:
            if (first := next(self.coldest(), None)) is not None and self._evictable.remove(slot):
                slot.last_use = first.last_use - 1
                self._evictable.left(slot, first)

    def evicted(self, slots: Iterable[Slot]) -> None:
        """Tell the policy that these slots are about to become free because their room is
        needed."""
        self._evictable.evicted(slots)

    # --- moving retained blocks ---------------------------------------------------

    def clearance(self, length: int, at_most: int) -> tuple[list[Slot], list[tuple[Slot, Slot]]]:
        """Return how room is made where retained blocks alone are in the way: which blocks go, and
        which retained ones move, each to where one goes that is named with it. Nothing when these
        cost more than `at_most`, or find no place. For the moment after `victims` found none."""
        some = islice(self._slots.values(), LOOKED_MAX)
        blocks = chain(self.coldest(), (s for s in some if s.kept_until and _may_move(s)))
        size = granules_of(length)
        window = cheapest(self._windows(blocks, size, move_cost, _may_move, set(), LOOKED_MAX))
        slots = [] if window is None else window.slots
        kept = sorted((slot for slot in slots if slot.kept_until), key=_SIZE)
        if sum(map(move_cost, kept)) > at_most:
            return [], []
        inside = {slot.slot_id for slot in slots}
        others = (s for s in islice(self.coldest(), LOOKED_MAX) if s.slot_id not in inside)
        moves: list[tuple[Slot, Slot]] = []
        while kept:
            place = next(others, None)
            if place is None:
                return [], []
            # To the largest that fits: whatever is left is the easiest to place.
            if fits := bisect_right(kept, place.size, key=_SIZE):
                moves.append((kept.pop(fits - 1), place))
        return [slot for slot in slots if not slot.kept_until], moves

    def take_over(self, place: Slot, size: int) -> Slot:
        """Return a slot of `size` granules at the start of `place`, the slot freed last, which is
        no smaller."""
        freed = self._spares.pop()
        assert freed is place
        del self._slots[place.slot_id]
        del self._ends[place.start + place.size]
        if place.size > size:
            self._space.give(place.start + size, place.size - size)
        return self._add(place.start, size)

    # --- making room ------------------------------------------------------------

    def victims(self, length: int, count: int = 1, look: int = LOOKED_MAX) -> list[Slot]:
        """Return the slots whose blocks the caller must free so that `take` finds room for one
        value of `length` bytes, or for up to `count` if each takes the place of one block. The list
        is empty when nothing evictable would be enough, as far as a search of `look` extents
        tells."""
        return self.in_the_way(length, count, look) if self.evicts else []

    def in_the_way(self, length: int, count: int = 1, look: int = LOOKED_MAX) -> list[Slot]:
        """Return what `victims` returns, also where nothing is evicted (VRAM)."""
        size = granules_of(length)
        self._join_spares()
        alike = list(takewhile(lambda slot: slot.size == size, islice(self.coldest(), count)))
        if alike:
            return alike
        first = next(self.coldest(), None)
        if first is None:
            return []
        if size < self._shut_in_size:
            self._shut_in.clear()
        self._shut_in_size = size
        cost = self._evictable.costs(first, LATER)
        # The coldest of its size is tried too: around colder, smaller ones may lie what is in use.
        same_size = (slot for slot in islice(self.coldest(), ALIKE_TRIED) if slot.size == size)
        blocks = chain(islice(same_size, 1), self.coldest())
        windows = self._windows(blocks, size, cost, _may_go, self._shut_in, look)
        window = cheapest(windows)
        return [] if window is None else window.slots

    def coldest(self) -> Iterator[Slot]:
        """Return what may go, coldest first; good until the next change."""
        return map(self._slots.__getitem__, self._evictable.coldest())

    def _windows(
        self,
        blocks: Iterable[Slot],
        size: int,
        cost: Callable[[Slot], int],
        may: Callable[[Slot], bool],
        shut_in: set[int],
        look: int,
    ) -> Iterator[Window | None]:
        """Yield the cheapest window around each block; None where slots to which `may` says no
        leave none, of which `shut_in` takes note, and for a block that lies in what was looked at
        around another. Ends when `look` extents were looked at, or `LOOKED_ENOUGH` where there is
        one."""
        seen: set[int] = set()
        looked = 0
        for block in blocks:
            if block.slot_id in seen or block.slot_id in shut_in:
                yield None
            elif looked >= look:
                return
            else:
                run = self._around(Extent(block.start, block.size, block), size, may)
                looked += len(run)
                window = window_of(run, size, cost)
                if window is not None:
                    look = min(look, LOOKED_ENOUGH)
                looked_at = seen if window is not None else shut_in
                looked_at.update(extent.slot.slot_id for extent in run if extent.slot is not None)
                yield window

    def _around(self, seed: Extent, size: int, may: Callable[[Slot], bool]) -> list[Extent]:
        """Return `seed` and its neighbours on both sides, as far as a window around it can reach
        and `may` allows."""
        reach = size + PAGE
        before: list[Extent] = []
        at = seed.start
        while at > 0 and seed.start - at < reach:
            start = self._space.ending(at)
            slot = None if start is not None else self._ends[at]
            if slot is not None:
                if not may(slot):
                    break
                start = slot.start
            assert start is not None
            before.append(Extent(start, at - start, slot))
            at = start
        after: list[Extent] = []
        end = at = seed.start + seed.size
        while at < self._space.size and at - end < reach:
            free = self._space.at(at)
            slot = None if free else self._slots[at // PAGE]
            if slot is not None and not may(slot):
                break
            after.append(Extent(at, slot.size if slot is not None else free, slot))
            at += after[-1].size
        return [*reversed(before), seed, *after]

    # --- what is there ------------------------------------------------------------

    def extents(self) -> Iterator[Extent]:
        """Return all extents of the segment in the order of their bytes. Raises `InternalError`
        when a granule is in none or in two."""
        at = 0
        while at < self._space.size:
            free = self._space.at(at)
            slot = self._slots.get(at // PAGE)
            if slot is not None and slot.start == at:
                if free:
                    raise InternalError(f"granule {at} is free and of slot {slot.slot_id}")
                yield Extent(at, slot.size, slot)
                at += slot.size
            elif free:
                yield Extent(at, free, None)
                at += free
            else:
                raise InternalError(f"granule {at} is neither free nor of a slot")
        if at != self._space.size:
            raise InternalError(f"a slot ends at granule {at}, the segment at {self._space.size}")

    def restore(self, places: Iterable[tuple[int, int]], below: int, from_: int) -> None:
        """Make a FREE slot at each (start, size) that a former start of the node left; the caller
        gives each its state. `below` and `from_` are `used_below` and `used_from` of then.

        Raises `InternalError` when two overlap. No slot may be there before.
        """
        free: list[tuple[int, int]] = []
        at = 0
        for start, size in sorted(places):
            if start < at:
                raise InternalError(f"slots overlap at granule {start}")
            if start > at:
                free.append((at, start - at))
            self._add(start, size)
            at = start + size
        if at < self._space.size:
            free.append((at, self._space.size - at))
        self._space = Space(self._space.size, free)
        self.used_below, self.used_from = below, from_

    def restored(self, slots: Iterable[Slot]) -> None:
        """Make those slots of `restore` evictable that may be, least recently used first."""
        for slot in slots:
            self.became_evictable(slot)


def move_cost(slot: Slot) -> int:
    """Return the cost of moving a retained block, in granules; others are evicted."""
    return slot.size + MOVE_COSTS if slot.kept_until else slot.size


def _may_move(slot: Slot) -> bool:
    return slot.state is SlotState.SEALED and not slot.pins


def _may_go(slot: Slot) -> bool:
    return _may_move(slot) and not slot.kept_until
