"""Free extents: what was given back is found, and what overlaps is refused."""

import random

import pytest
from allocator_pool import Pool
from each_input import each
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.memory.allocator import Allocator
from kvstore.core.memory.granules import PAGE, PAGED
from kvstore.core.memory.slots import SlotEvent
from kvstore.core.memory.space import Space
from kvstore.errors import InternalError, UsageError

KIB, MIB = 1 << 10, 1 << 20


def space_of(pool):
    return pool.allocator._space


def one(space, size, *, high):
    """Where `size` granules were taken; None when nowhere."""
    return next(iter(space.take(size, high=high)), None)


def free_at_once(pool, slots):
    for slot in slots:
        slot.move(SlotEvent.EVICT)
    pool.allocator.became_free(*slots)
    return pool.allocator


class TestSpace:
    def test_what_was_freed_last_is_what_the_next_of_its_size_gets(self):
        pool = Pool(MIB)
        slots = [pool.put(8192) for _ in range(6)]
        pool.drop(slots[1])
        pool.drop(slots[3])
        assert pool.take(8192) is slots[3]

    def test_those_that_were_freed_at_once_go_whole_to_as_many_of_their_size(self):
        pool = Pool(MIB)
        slots = [pool.put(8192) for _ in range(6)]
        allocator = free_at_once(pool, slots[1:4])
        assert allocator.free_bytes == MIB - 3 * 8192
        assert allocator.take(8192, 2) == slots[1:3]
        assert allocator.take(8192, 2) == slots[3:4]
        assert len(list(allocator.extents())) == 7

    def test_of_several_sizes_that_were_freed_at_once_the_last_ones_stay_whole(self):
        pool = Pool(MIB)
        slots = [pool.put(length) for length in (8192, 16384, 8192, 8192)]
        allocator = free_at_once(pool, slots)
        assert allocator.take(8192, 9) == slots[2:]
        assert allocator.take(16384)[0].size == 16
        assert sum(extent.size for extent in allocator.extents()) == 1024

    def test_room_that_was_just_made_is_found_behind_holes_that_begin_amiss(self):
        """Of its size, and each too small only because it does not begin where a page does."""
        amiss = [(start + 1, PAGED) for start in range(0, 6 * 32, 32)]
        space = Space(512, amiss)
        assert one(space, PAGED, high=False) is None
        space.give(256, PAGED)
        assert one(space, PAGED, high=False) == 256

    def test_a_full_pool_has_no_room_at_all(self):
        pool = Pool(64 * KIB)
        pool.put(64 * KIB)
        assert pool.allocator.largest_free_bytes == 0

    def test_a_slot_on_free_granules_is_found(self):
        pool = Pool(64 * KIB)
        slot = pool.put(8192)
        space_of(pool).give(slot.start, slot.size)
        with pytest.raises(InternalError, match="is free and of slot"):
            list(pool.allocator.extents())

    def test_granules_that_are_nobodys_are_found(self):
        pool = Pool(64 * KIB)
        space_of(pool).take(8, high=False)
        with pytest.raises(InternalError, match="granule 0 is neither free nor of a slot"):
            list(pool.allocator.extents())

    def test_what_is_restored_was_used_in_the_order_that_is_told(self):
        allocator = Allocator(64 * KIB)
        allocator.restore([(start, 8) for start in range(0, 64, 8)], 64, 64)
        slots = sorted(allocator.slots(), key=lambda slot: -slot.start)
        allocator.restored(slots)
        assert sorted({slot.last_use for slot in slots}) == [slot.last_use for slot in slots]

    def test_what_is_restored_to_the_last_granule_leaves_no_free_extent(self):
        allocator = Allocator(64 * KIB)
        allocator.restore([(0, 64)], 64, 64)
        assert [(e.start, e.size, e.slot is None) for e in allocator.extents()] == [(0, 64, False)]
        assert list(allocator._space) == []

    def test_a_hole_and_a_slot_may_begin_in_one_page(self):
        allocator = Allocator(64 * KIB)
        allocator.restore([(18, 46), (2, 8)], 64, 64)
        assert [(e.start, e.size, e.slot is None) for e in allocator.extents()] == [
            *((0, 2, True), (2, 8, False)),
            *((10, 8, True), (18, 46, False)),
        ]

    def test_a_value_of_all_there_is_fits(self):
        pool = Pool(MIB)
        assert pool.put(MIB).offset == 0
        assert pool.put(MIB) is not None
        assert len(pool.evicted) == 1

    def test_large_values_have_whole_pages_and_no_two_slots_begin_in_one(self):
        rng, pool = random.Random(1), Pool(8 * MIB)
        slots = [pool.put(rng.choice([900, 5000, 9000, 15_000, 16_384, 70_000])) for _ in range(90)]
        assert len({slot.slot_id for slot in slots}) == len(slots)
        for slot in slots:
            if slot.length >= 16_384:
                assert slot.offset % 4096 == 0

    @each("size_bytes", [0, 1000, 60 << 10, (64 << 10) + 1, 1 << 60])
    def test_a_size_that_is_no_number_of_pages_in_range_is_refused_by_name(self, size_bytes):
        with pytest.raises(UsageError, match="size_bytes"):
            Allocator(size_bytes)

    def test_slots_that_overlap_are_not_restored(self):
        with pytest.raises(InternalError, match="overlap"):
            Allocator(64 * KIB).restore([(0, 8), (7, 4)], 64, 64)

    def test_what_is_taken_to_its_end_leaves_no_extent_of_nothing(self):
        space = Space(64)
        assert one(space, 24, high=False) == 0
        assert one(space, 8, high=True) == 56
        assert list(space) == [(24, 32)]
        assert one(space, 32, high=False) == 24
        assert list(space) == []

    def test_an_extent_that_begins_within_a_page_gives_its_start_to_small_and_a_page_to_large(self):
        for size, high, at in (
            *((PAGED - 1, False, 2), (PAGED - 1, True, 62 - PAGED + 1)),
            *((PAGED, False, PAGE), (PAGED, True, 60 - PAGED)),
        ):
            space = Space(64, [(2, 60)])
            assert one(space, size, high=high) == at

    def test_a_page_is_found_for_large_where_the_smallest_extent_has_none(self):
        space = Space(128, [(2, PAGED), (40, PAGED + PAGE)])
        assert one(space, PAGED, high=False) == 40

    def test_the_largest_extent_is_told(self):
        space = Space(64, [(0, 8), (16, 24), (48, 16)])
        assert (space.largest, space.free) == (24, 48)

    @settings(max_examples=60)
    @given(st.integers(0, 2**32))
    def test_what_is_given_back_is_one_extent_in_the_end(self, seed):
        rng, space = random.Random(seed), Space(1024)
        taken = []
        for _ in range(100):
            size = rng.choice([4, 5, 7, 16, 20, 64])
            at = one(space, size, high=rng.random() < 0.5)
            if at is not None:
                taken.append((at, size))
            elif taken:
                space.give(*taken.pop(rng.randrange(len(taken))))
            assert space.free + sum(size for _, size in taken) == 1024, f"seed {seed}"
        rng.shuffle(taken)
        for at, size in taken:
            space.give(at, size)
        assert list(space) == [(0, 1024)], f"seed {seed}"
