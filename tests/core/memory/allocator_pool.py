"""`Pool` plays the allocator's caller, which frees and reserves; and sizes that values have."""

import itertools
import math
import random

from kvstore.core.memory.allocator import Allocator
from kvstore.core.memory.granules import GRANULE_BYTES, granules_of
from kvstore.core.memory.slots import SlotEvent, SlotState

MIB = 1 << 20


class Pool:
    def __init__(self, size_bytes: int) -> None:
        self.allocator = Allocator(size_bytes)
        self.size_bytes = size_bytes
        self.sealed = {}
        self.evicted = []
        self.evictions = []
        """(request in granules, sizes of what was evicted for it)"""

    def take(self, length: int):
        """One slot, None without room."""
        return next(iter(self.allocator.take(length)), None)

    def put(self, length: int, *, seal: bool = True):
        slot = self.take(length)
        if slot is None:
            victims = self.allocator.victims(length)
            if not victims:
                return None
            for victim in victims:
                assert victim.state is SlotState.SEALED
                assert not victim.pins
                self.drop(victim)
                self.evicted.append(victim)
            self.evictions.append((granules_of(length), [v.size for v in victims]))
            slot = self.take(length)
        assert slot.state is SlotState.FREE
        slot.length = length
        slot.move(SlotEvent.RESERVE)
        if seal:
            self.seal(slot)
        return slot

    def drop(self, slot) -> None:
        slot.move(SlotEvent.EVICT)
        self.allocator.became_free(slot)
        del self.sealed[id(slot)]

    def seal(self, slot) -> None:
        slot.move(SlotEvent.COMMIT)
        self.allocator.became_evictable(slot)
        self.sealed[id(slot)] = slot

    def pin(self, slot) -> None:
        self.allocator.became_busy(slot)
        slot.pins += 1

    def unpin(self, slot) -> None:
        slot.pins -= 1
        self.allocator.became_evictable(slot)

    @property
    def used(self) -> float:
        return 1 - self.allocator.free_bytes / self.size_bytes

    def check(self) -> None:
        """Every granule is free or of one slot, and no two free extents touch."""
        extents = list(self.allocator.extents())
        assert sum(e.size for e in extents) * GRANULE_BYTES == self.size_bytes
        for one, other in itertools.pairwise(extents):
            assert one.slot is not None or other.slot is not None
        free = [e for e in extents if e.slot is None or e.slot.state is SlotState.FREE]
        assert sum(e.size for e in free) * GRANULE_BYTES == self.allocator.free_bytes
        for extent in extents:
            if extent.slot is not None and extent.slot.state is not SlotState.FREE:
                assert extent.size * GRANULE_BYTES >= extent.slot.length


def lognormal(rng: random.Random, most: int) -> int:
    """Median 60 KB."""
    while (length := int(rng.lognormvariate(math.log(60_000), 1.5))) > most or length < 1:
        pass
    return length


def uniform(rng: random.Random, most: int) -> int:
    return rng.randint(1, most)


def any_magnitude(rng: random.Random, most: int) -> int:
    return int(math.exp(rng.uniform(0, math.log(most))))


MIXES = (lognormal, uniform, any_magnitude)


def looks_around(monkeypatch):
    """A list that gets, for each place where room is looked for, the block there and how many
    extents were looked at."""
    looked = []
    around = Allocator._around

    def counted(self, seed, *args):
        run = around(self, seed, *args)
        looked.append((seed.slot, len(run)))
        return run

    monkeypatch.setattr(Allocator, "_around", counted)
    return looked
