"""Space of one segment: arenas given to size classes, slots taken from arenas, eviction.

Eviction is part of taking a slot: as long as something that fits is evictable,
there is space. An arena changes its class only when it is empty; under
pressure the coldest arena is emptied for a class that needs one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from kvstore.core.eviction import LRU, EvictionPolicy, PolicyFactory
from kvstore.core.sizes import SLOT_BYTES, size_class_of
from kvstore.core.slots import Slot, SlotState
from kvstore.errors import UsageError
from kvstore.limits import ARENA_BYTES_MAX, ARENA_BYTES_MIN, SLOT_BYTES_MIN, SLOTS_PER_SEGMENT_MAX

COLD_ARENAS_SCANNED = 32
"""How many arenas a take looks at, coldest first, before it evicts within its own class."""


class Taken(NamedTuple):
    slot: Slot
    evicted: list[Slot]
    """Slots whose blocks go to make room, still SEALED: the caller frees each."""


class Arena:
    __slots__ = (
        "busy",
        "generation_floor",
        "index",
        "last_use",
        "live",
        "size_class",
        "slots",
        "unused",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.size_class = -1
        """-1: free, belongs to no class."""
        self.slots: dict[int, Slot] = {}
        self.unused = 0
        """Slots from this index on were never handed out since the arena got its class."""
        self.busy = 0
        """Slots that may not be evicted: reserved, pinned or doomed."""
        self.live = 0
        """Slots that are not FREE."""
        self.generation_floor = 0
        """Generations only grow, over changes of class too."""
        self.last_use = 0


class Allocator:
    """Slots of one segment of `arenas` times `arena_bytes`."""

    def __init__(self, arenas: int, arena_bytes: int, policy: PolicyFactory = LRU) -> None:
        if arena_bytes & (arena_bytes - 1) or not ARENA_BYTES_MIN <= arena_bytes <= ARENA_BYTES_MAX:
            raise UsageError(
                "arena_bytes",
                arena_bytes,
                f"must be a power of two from {ARENA_BYTES_MIN} to {ARENA_BYTES_MAX}",
            )
        self.arena_bytes = arena_bytes
        self.slots_per_arena = arena_bytes // SLOT_BYTES_MIN
        if not 1 <= arenas <= SLOTS_PER_SEGMENT_MAX // self.slots_per_arena:
            raise UsageError(
                "arenas", arenas, f"must be 1 to {SLOTS_PER_SEGMENT_MAX // self.slots_per_arena}"
            )
        self.arenas = [Arena(i) for i in range(arenas)]
        self._free_arenas = list(range(arenas - 1, -1, -1))
        self._by_heat: OrderedDict[int, None] = OrderedDict()
        """Arenas that have a class, coldest first."""
        self._policy = policy
        self._evictable: dict[int, EvictionPolicy] = {}
        self._free_slots: dict[int, dict[int, Slot]] = {}
        """Free slots by size class: slots that were used before."""
        self._empty: dict[int, None] = {}
        """Arenas that have a class but no block: any class may have them before anything goes."""
        self._growing: dict[int, int] = {}
        """The arena of each class that still has slots never handed out."""
        self._tick = 0
        self.evicts = True
        """False: blocks go only when somebody frees them; without a free slot there is none."""

    @property
    def capacity_bytes(self) -> int:
        return len(self.arenas) * self.arena_bytes

    @property
    def free_arenas(self) -> int:
        return len(self._free_arenas)

    @property
    def free_bytes(self) -> int:
        """Of slots and arenas that nobody has: what can be taken before anything must go."""
        free = self.free_arenas * self.arena_bytes
        for size_class, slots in self._free_slots.items():
            free += len(slots) * min(SLOT_BYTES[size_class], self.arena_bytes)
        for size_class, index in self._growing.items():
            slot_bytes = min(SLOT_BYTES[size_class], self.arena_bytes)
            free += (self.arena_bytes // slot_bytes - self.arenas[index].unused) * slot_bytes
        return free

    def slot(self, slot_id: int) -> Slot | None:
        arena_index, index = divmod(slot_id, self.slots_per_arena)
        if not 0 <= arena_index < len(self.arenas):
            return None
        return self.arenas[arena_index].slots.get(index)

    def take(self, length: int) -> Taken | None:
        """A FREE slot for `length` bytes, with what must be evicted for it.

        None when every slot that could serve is reserved or pinned. The caller
        frees the evicted slots and reserves the one returned, both at once.
        """
        size_class = size_class_of(length)
        assert 0 < length <= self.arena_bytes
        if SLOT_BYTES[size_class] > self.arena_bytes:
            size_class = size_class_of(self.arena_bytes)
        free = self._free_slots.get(size_class)
        if free:
            return Taken(free.popitem()[1], [])
        slot = self._unused_slot(size_class)
        if slot is not None:
            return Taken(slot, [])
        if self._free_arenas:
            return Taken(self._assign(self._free_arenas.pop(), size_class), [])
        if self._empty:
            return Taken(self._assign(next(iter(self._empty)), size_class), [])
        return self._take_by_eviction(size_class) if self.evicts else None

    def _take_by_eviction(self, size_class: int) -> Taken | None:
        policy = self._evictable.get(size_class)
        victim_id = policy.victim() if policy is not None else None
        victim = self.slot(victim_id) if victim_id is not None else None
        # A class that needs space may take a whole arena only when nothing in
        # it was used since the class's own coldest block: hot classes grow,
        # cold ones shrink.
        bound = victim.last_use if victim is not None else None
        arena = self._coldest_idle_arena(size_class, bound)
        if arena is not None:
            evicted = [s for s in arena.slots.values() if s.state is SlotState.SEALED]
            return Taken(self._assign(arena.index, size_class), evicted)
        if victim is None or policy is None:
            return None
        return Taken(victim, [victim])

    def _coldest_idle_arena(self, size_class: int, bound: int | None) -> Arena | None:
        for scanned, index in enumerate(self._by_heat):
            arena = self.arenas[index]
            if bound is not None and (scanned >= COLD_ARENAS_SCANNED or arena.last_use >= bound):
                return None
            if arena.busy == 0 and arena.size_class != size_class:
                return arena
        return None

    def _unused_slot(self, size_class: int) -> Slot | None:
        index = self._growing.get(size_class)
        if index is None:
            return None
        arena = self.arenas[index]
        size = SLOT_BYTES[size_class]
        position = arena.unused
        arena.unused += 1
        if (arena.unused + 1) * size > self.arena_bytes:
            del self._growing[size_class]
        slot = Slot(
            index * self.slots_per_arena + position,
            index * self.arena_bytes + position * size,
            size_class,
            arena.generation_floor,
        )
        arena.slots[position] = slot
        return slot

    def _assign(self, index: int, size_class: int) -> Slot:
        """Give an arena (free, or about to be empty) to a class; its first slot."""
        arena = self.arenas[index]
        old_class = arena.size_class
        for slot in arena.slots.values():
            arena.generation_floor = max(arena.generation_floor, slot.generation)
            if slot.state is SlotState.SEALED:
                self._evictable[old_class].remove(slot.slot_id)
            else:
                self._free_slots[old_class].pop(slot.slot_id, None)
        if self._growing.get(old_class) == index:
            del self._growing[old_class]
        self._empty.pop(index, None)
        arena.slots = {}
        arena.unused = 0
        arena.live = 0
        arena.size_class = size_class
        self._growing[size_class] = index
        first = self._unused_slot(size_class)
        assert first is not None
        return first

    def restore(self, arenas: Iterable[tuple[int, int, int]]) -> None:
        """Take (arena, size class, generation) over from a former start of the node.

        Every slot of those arenas is then FREE in that generation, whatever else is
        known of it is up to the caller; an arena with class -1 stays free. All arenas
        must be free before.
        """
        for index, size_class, generation in arenas:
            arena = self.arenas[index]
            arena.generation_floor = generation
            if size_class < 0:
                continue
            arena.size_class = size_class
            size = SLOT_BYTES[size_class]
            first, start = index * self.slots_per_arena, index * self.arena_bytes
            arena.unused = self.arena_bytes // size
            arena.slots = {
                position: Slot(first + position, start + position * size, size_class, generation)
                for position in range(arena.unused)
            }
            free = self._free_slots.setdefault(size_class, {})
            free.update((slot.slot_id, slot) for slot in arena.slots.values())
            self._by_heat[index] = None
            self._empty[index] = None
        self._free_arenas = [i for i in self._free_arenas if self.arenas[i].size_class < 0]

    def restored(self, slots: Iterable[Slot], *, held: bool = False) -> None:
        """Slots from `restore` were found in use, least recently used first; with `held`, they may
        not be evicted."""
        for slot in slots:
            del self._free_slots[slot.size_class][slot.slot_id]
            arena = self._arena_of(slot)
            self._tick += 1
            slot.last_use = arena.last_use = self._tick
            arena.live += 1
            if held:
                arena.busy += 1
            else:
                self._policy_of(slot.size_class).insert(slot.slot_id)
        for arena in sorted(self.arenas, key=lambda arena: arena.last_use):
            if arena.live:
                self._by_heat[arena.index] = None
                self._by_heat.move_to_end(arena.index)
                self._empty.pop(arena.index, None)

    def _policy_of(self, size_class: int) -> EvictionPolicy:
        policy = self._evictable.get(size_class)
        if policy is None:
            policy = self._evictable[size_class] = self._policy()
        return policy

    def _heat(self, slot: Slot) -> Arena:
        arena = self.arenas[slot.slot_id // self.slots_per_arena]
        self._tick += 1
        slot.last_use = arena.last_use = self._tick
        self._by_heat[arena.index] = None
        self._by_heat.move_to_end(arena.index)
        return arena

    def _arena_of(self, slot: Slot) -> Arena:
        return self.arenas[slot.slot_id // self.slots_per_arena]

    def became_busy(self, slot: Slot) -> None:
        """Reserved, or pinned for the first time: not evictable."""
        arena = self._heat(slot)
        arena.busy += 1
        if slot.state is SlotState.RESERVED:
            arena.live += 1
            self._empty.pop(arena.index, None)
        policy = self._evictable.get(slot.size_class)
        if policy is not None:
            policy.remove(slot.slot_id)
        free = self._free_slots.get(slot.size_class)
        if free is not None:
            free.pop(slot.slot_id, None)

    def became_evictable(self, slot: Slot) -> None:
        """Sealed, or sealed and no longer pinned."""
        self._heat(slot).busy -= 1
        self._policy_of(slot.size_class).insert(slot.slot_id)

    def became_free(self, slot: Slot, *, was_busy: bool) -> None:
        """Aborted, evicted, dropped or unpinned after it was dropped."""
        arena = self._arena_of(slot)
        if was_busy:
            arena.busy -= 1
        else:
            self._evictable[slot.size_class].remove(slot.slot_id)
        if arena.slots.get(slot.slot_id % self.slots_per_arena) is slot:
            arena.live -= 1
            if arena.live == 0:
                self._empty[arena.index] = None
            self._free_slots.setdefault(slot.size_class, {})[slot.slot_id] = slot

    def used(self, slot: Slot) -> None:
        """A reader used the block."""
        policy = self._evictable.get(slot.size_class)
        if policy is not None:
            policy.touch(slot.slot_id)
        self._heat(slot)

    def is_free(self, slot: Slot) -> bool:
        """Whether `slot` waits in the free list of its class."""
        return self._free_slots.get(slot.size_class, {}).get(slot.slot_id) is slot
