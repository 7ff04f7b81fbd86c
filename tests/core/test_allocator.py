"""Space: classes, arenas, eviction. `Pool` plays the caller, which frees and reserves."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.allocator import Allocator
from kvstore.core.sizes import SLOT_BYTES
from kvstore.core.slots import SlotEvent, SlotState
from kvstore.errors import UsageError

ARENA = 64 << 10


class Pool:
    def __init__(self, arenas: int) -> None:
        self.allocator = Allocator(arenas, ARENA)
        self.sealed = {}
        self.evicted = []

    def put(self, length: int, *, seal: bool = True):
        taken = self.allocator.take(length)
        if taken is None:
            return None
        for slot in taken.evicted:
            assert slot.state is SlotState.SEALED
            slot.move(SlotEvent.EVICT)
            self.allocator.became_free(slot, was_busy=False)
            self.evicted.append(self.sealed.pop((slot.slot_id, slot.generation)))
        slot = taken.slot
        slot.move(SlotEvent.RESERVE)
        self.allocator.became_busy(slot)
        if seal:
            self.seal(slot)
        return slot

    def drop(self, slot) -> None:
        slot.move(SlotEvent.EVICT)
        self.allocator.became_free(slot, was_busy=False)
        del self.sealed[slot.slot_id, slot.generation]

    def seal(self, slot) -> None:
        slot.move(SlotEvent.COMMIT)
        self.allocator.became_evictable(slot)
        self.sealed[slot.slot_id, slot.generation] = slot


def test_slots_of_one_class_never_overlap_and_stay_in_their_arena():
    pool, spans = Pool(4), []
    for length in [1000, 5000, 5000, 20_000, 1000, 3000]:
        slot = pool.put(length)
        spans.append((slot.offset, slot.offset + SLOT_BYTES[slot.size_class]))
    spans.sort()
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert end <= start
    for start, end in spans:
        assert start // ARENA == (end - 1) // ARENA


def test_a_full_pool_evicts_the_least_recently_used_block_of_the_class():
    pool = Pool(1)
    slots = [pool.put(8192) for _ in range(8)]
    pool.allocator.used(slots[0])
    pool.put(8192)
    assert pool.evicted == [slots[1]]


def test_no_put_fails_while_anything_that_fits_is_evictable():
    pool = Pool(1)
    held = [pool.put(8192, seal=False) for _ in range(7)]
    assert all(held)
    for _ in range(50):
        assert pool.put(8192) is not None


def test_a_pool_whose_slots_are_all_reserved_has_no_space():
    pool = Pool(1)
    for _ in range(8):
        pool.put(8192, seal=False)
    assert pool.put(8192) is None


def test_a_class_without_an_arena_empties_the_coldest_one():
    pool = Pool(2)
    for _ in range(8):
        pool.put(8192)
    for _ in range(4):
        pool.put(16384)
    big = pool.put(40_000)
    assert big is not None
    assert len(pool.evicted) == 8
    assert {slot.size_class for slot in pool.evicted} == {4}


def test_an_arena_without_blocks_serves_any_class_before_anything_is_evicted():
    pool = Pool(2)
    dropped = [pool.put(8192) for _ in range(8)]
    for _ in range(4):
        pool.put(16384)
    for slot in dropped:
        pool.drop(slot)
    for _ in range(4):
        assert pool.put(16384) is not None
    assert pool.evicted == []


def test_an_arena_with_a_reserved_slot_is_not_taken_from_its_class():
    pool = Pool(2)
    reserved = pool.put(8192, seal=False)
    for _ in range(4):
        pool.put(16384)
    assert pool.put(40_000) is not None
    assert reserved.state is SlotState.RESERVED
    assert {slot.size_class for slot in pool.evicted} == {8}


def test_a_hot_class_takes_arenas_from_a_cold_one_instead_of_evicting_its_own():
    pool = Pool(2)
    cold = [pool.put(16384) for _ in range(4)]
    hot = [pool.put(8192) for _ in range(8)]
    for slot in hot:
        pool.allocator.used(slot)
    pool.put(8192)
    assert set(pool.evicted) == set(cold)


def test_generations_of_a_place_grow_over_changes_of_class():
    pool, seen = Pool(1), {}
    for round_ in range(6):
        for _ in range(3):
            slot = pool.put(8192 if round_ % 2 else 20_000)
            assert slot.generation > seen.get(slot.slot_id, 0)
            seen[slot.slot_id] = slot.generation


def test_a_value_of_one_arena_fits_and_takes_all_of_it():
    pool = Pool(2)
    assert {pool.put(ARENA).offset, pool.put(ARENA).offset} == {0, ARENA}
    assert pool.put(ARENA) is not None
    assert len(pool.evicted) == 1


@pytest.mark.parametrize("arena_bytes", [0, 1000, 3 << 20, 1 << 40])
def test_an_arena_size_that_is_no_power_of_two_in_range_is_refused_by_name(arena_bytes):
    with pytest.raises(UsageError, match="arena_bytes"):
        Allocator(1, arena_bytes)


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_under_random_pressure_every_slot_is_in_exactly_one_list(seed):
    rng = random.Random(seed)
    pool, reserved = Pool(3), []
    for _ in range(300):
        if reserved and rng.random() < 0.4:
            pool.seal(reserved.pop(rng.randrange(len(reserved))))
        else:
            slot = pool.put(rng.choice([900, 4000, 9000, 30_000, 65_000]), seal=False)
            if slot is not None:
                reserved.append(slot)
        for arena in pool.allocator.arenas:
            for slot in arena.slots.values():
                assert pool.allocator.is_free(slot) == (slot.state is SlotState.FREE)
            assert arena.live == sum(s.state is not SlotState.FREE for s in arena.slots.values())
            assert arena.busy == sum(s.state is SlotState.RESERVED for s in arena.slots.values())
    assert len({slot.slot_id for slot in reserved}) == len(reserved), f"seed {seed}"
