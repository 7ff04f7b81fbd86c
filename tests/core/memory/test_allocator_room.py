"""What is evicted as values come and go, and how room is made where retained blocks are in it."""

import random

import pytest
from allocator_pool import MIXES, Pool
from each_input import each

from kvstore.core.memory.allocator import move_cost
from kvstore.core.memory.granules import GRANULE_BYTES, granules_of
from kvstore.core.memory.slots import SlotEvent

KIB, MIB = 1 << 10, 1 << 20


class TestChurn:
    """Values that are dropped in any order, so that the segment never fills by itself."""

    def evicting(self, lengths, fill: float, seed: int) -> list[int]:
        """Numbers of the puts that evict, while drops keep the fill at `fill` at most."""
        size = 256 * MIB
        rng, pool, seen = random.Random(seed), Pool(size), []
        for number, length in enumerate(lengths):
            while pool.sealed and pool.used + granules_of(length) * GRANULE_BYTES / size > fill:
                pool.drop(rng.choice(list(pool.sealed.values())))
            evictions = len(pool.evictions)
            assert pool.put(length) is not None
            if len(pool.evictions) > evictions:
                seen.append(number)
        pool.check()
        return seen

    @each("mix", MIXES)
    @each(("part", "fill"), [(64, 0.80), (16, 0.65)])
    def test_below_the_promised_fill_at_most_two_puts_of_any_hundred_evict(self, mix, part, fill):
        for seed in range(3):
            rng = random.Random(seed)
            seen = self.evicting([mix(rng, 256 * MIB // part) for _ in range(5000)], fill, seed)
            assert all(third - first >= 100 for first, third in zip(seen, seen[2:], strict=False))

    @pytest.mark.parametrize("size", [24 * KIB, 256 * KIB, 4 * MIB])
    def test_of_blocks_of_one_size_none_is_evicted_before_the_node_is_full(self, size):
        assert self.evicting([size] * 5000, 1.0, 1) == []


class TestClearance:
    """Room where retained blocks alone are in the way."""

    def laid_out(self, *sizes: int, kept: tuple[int, ...] = ()):
        """The pool and the slots of blocks of so many KiB beside each other, of which `kept` are
        retained; those below 0 are holes, those of 8 stay."""
        pool = Pool(sum(map(abs, sizes)) * KIB)
        slots = [pool.put(abs(size) * KIB) for size in sizes]
        for slot, size in zip(slots, sizes, strict=True):
            if size == 8:
                pool.pin(slot)
            elif size < 0:
                pool.drop(slot)
        for i in kept:
            pool.allocator.became_busy(slots[i])
            slots[i].kept_until = 1
        assert pool.take(pool.size_bytes) is None  # what was freed last joins the rest
        return pool, slots

    @each(
        ("sizes", "kept", "victims", "moves"),
        [
            # To the block beside the window, and never to one within it that goes as well.
            ((8, 16, 16, 16, 16, 8), (3,), [1, 2], {3: 4}),
            ((8, 16, 16, 16, 16, 8), (2,), [1, 3], {2: 4}),
            ((8, 16, 16, 16, 8, 32, 8), (2,), [1, 3], {2: 5}),
            # One to be moved costs more than bytes that go.
            ((8, 16, 16, 32, 8, 16, 16, 16, 8, 16, 8), (2, 5, 6), [3], {2: 1}),
            # What is free within the window is part of it.
            ((8, -16, 16, -16, 8, 16, 8), (2,), [], {2: 5}),
            # No window has a retained block.
            ((8, 16, 16, 16, 8, 16, 8), (5,), [1, 2, 3], {}),
            # One place holds the smaller of two only, whichever is colder.
            ((8, 32, 16, 8, 16, 8, 32, 8), (1, 2), [], {1: 6, 2: 4}),
            ((8, 32, 16, 8, 32, 8, 16, 8), (1, 2), [], {1: 4, 2: 6}),
            # There is no place for it.
            ((8, 32, 16, 8, 16, 8), (1,), [], {}),
        ],
    )
    def test_retained_blocks_leave_the_cheapest_window(self, sizes, kept, victims, moves):
        pool, slots = self.laid_out(*sizes, kept=kept)
        found = pool.allocator.clearance(48 * KIB, 1 << 30)
        assert found[0] == [slots[i] for i in victims]
        assert {slots.index(old): slots.index(place) for old, place in found[1]} == moves

    def test_no_more_is_moved_than_the_caller_allows(self):
        pool, slots = self.laid_out(8, 16, 16, 16, 16, 8, kept=(2,))
        cost = move_cost(slots[2])
        assert pool.allocator.clearance(48 * KIB, cost - 1) == ([], [])
        assert len(pool.allocator.clearance(48 * KIB, cost)[1]) == 1

    @pytest.mark.parametrize("size", [12, 32])
    def test_a_block_begins_where_the_one_was_whose_place_it_takes(self, size):
        pool, slots = self.laid_out(8, 32, 8, 16)
        pool.drop(slots[1])
        new = pool.allocator.take_over(slots[1], size)
        new.move(SlotEvent.RESERVE)
        assert (new.start, new.size) == (slots[1].start, size)
        assert pool.allocator.free_bytes == (32 - size) * KIB
        pool.check()
