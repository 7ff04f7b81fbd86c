"""Blocks are moved where holes together are room enough, and nothing is evicted for it."""

import random

import pytest
from allocator_pool import MIXES, Pool

from kvstore.core.memory.allocator import Clearance, move_cost
from kvstore.core.memory.granules import GRANULE_BYTES, granules_of

KIB, MIB = 1 << 10, 1 << 20


class TestChurn:
    """Values that are dropped in any order, so that the segment never fills by itself."""

    def first_evictions(self, mix, part: int, fill: float, seed: int) -> list[float]:
        """The fill at each eviction, while drops keep it at `fill` at most."""
        size = 256 * MIB
        rng, pool, seen = random.Random(seed), Pool(size), []
        for _ in range(5000):
            length = mix(rng, size // part)
            while pool.sealed and pool.used + granules_of(length) * GRANULE_BYTES / size > fill:
                pool.drop(rng.choice(list(pool.sealed.values())))
            used, evictions = pool.used, len(pool.evictions)
            assert pool.put(length) is not None
            if len(pool.evictions) > evictions:
                seen.append(used)
        pool.check()
        return seen

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("mix", MIXES)
    @pytest.mark.parametrize(("part", "fill"), [(64, 0.80), (16, 0.65)])
    def test_nothing_is_evicted_below_the_promised_fill(self, mix, part, fill, seed):
        assert self.first_evictions(mix, part, fill, seed) == [], f"seed {seed}"


class TestMoves:
    """Every second of 128 blocks is dropped, so that half of the segment is free in small holes."""

    def holes(self, evicts: bool = True):
        pool = Pool(MIB)
        pool.allocator.evicts = evicts
        slots = sorted((pool.put(8192) for _ in range(128)), key=lambda slot: slot.offset)
        for slot in slots[::2]:
            pool.drop(slot)
        return pool, slots[1::2]

    def test_room_is_made_of_holes_without_an_eviction(self):
        pool, slots = self.holes()
        assert pool.put(64 * KIB) is not None
        assert pool.evicted == []
        assert len(pool.moved) == 4
        assert len(pool.sealed) == len(slots) + 1
        pool.check()

    def test_no_more_is_moved_than_the_caller_allows(self):
        pool, slots = self.holes()
        cost = move_cost(slots[0])
        assert pool.take(64 * KIB) is None
        assert pool.allocator.moves(64 * KIB, 4 * cost - 1) == []
        assert len(pool.allocator.moves(64 * KIB, 4 * cost)) == 4

    def test_nothing_reserved_or_pinned_is_moved(self):
        pool, slots = self.holes()
        for slot in slots[8:]:
            pool.pin(slot)
        assert pool.put(64 * KIB) is not None
        assert pool.evicted == []
        assert len(pool.moved) == 4
        assert all(pool.sealed.get(id(slot)) is slot for slot in slots[8:])

    def test_where_not_every_block_finds_another_place_nothing_is_changed(self):
        pool = Pool(MIB)
        slots = [pool.put(length * KIB) for length in (200, 256, 200, 368)]
        pool.drop(slots[0])
        pool.drop(slots[2])
        assert pool.take(300 * KIB) is None
        before = list(pool.allocator.extents())
        assert pool.allocator.moves(300 * KIB, 1 << 30) == []
        assert list(pool.allocator.extents()) == before

    def test_a_pool_that_does_not_evict_moves_nothing(self):
        pool, _ = self.holes(evicts=False)
        assert pool.put(64 * KIB) is None
        assert pool.moved == []

    def test_blocks_of_one_size_are_never_moved(self):
        rng, pool = random.Random(1), Pool(MIB)
        for _ in range(2000):
            pool.put(24 * KIB)
            while pool.sealed and pool.used > 0.7:
                pool.drop(rng.choice(list(pool.sealed.values())))
        assert pool.moved == []
        assert pool.evicted == []

    def test_blocks_left_of_a_hole_are_moved_where_those_on_its_right_must_stay(self):
        pool, slots = self.holes()
        pool.drop(slots[20])  # the largest hole
        for slot in slots[21:]:
            pool.pin(slot)
        assert pool.take(40 * KIB) is None
        moves = pool.allocator.moves(40 * KIB, 1 << 30)
        assert [move.old for move in moves] == [slots[19]]

    def test_nothing_is_moved_while_more_than_the_promised_part_is_in_use(self):
        size = 160 * KIB
        for free, moved in ((4, True), (3, False)):  # of 20: a fifth is enough
            pool = Pool(size)
            slots = sorted((pool.put(8192) for _ in range(20)), key=lambda slot: slot.offset)
            for slot in slots[: 2 * free : 2]:
                pool.drop(slot)
            assert pool.take(16384) is None
            assert bool(pool.allocator.moves(16384, 1 << 30)) == moved

    def test_holes_of_just_as_many_bytes_as_are_wanted_are_enough(self):
        pool = Pool(64 * KIB)
        slots = [pool.put(8192) for _ in range(8)]
        pool.drop(slots[0])
        pool.drop(slots[2])
        assert pool.put(16384) is not None
        assert (len(pool.moved), pool.evicted) == (1, [])
        pool.check()

    def laid_out(self, *sizes: int):
        """The pool, the slots of blocks of so many KiB beside each other, and all extents; those
        below 0 are holes, those of 8 stay."""
        pool = Pool(sum(map(abs, sizes)) * KIB)
        slots = [pool.put(abs(size) * KIB) for size in sizes]
        for slot, size in zip(slots, sizes, strict=True):
            if size == 8:
                pool.pin(slot)
            elif size < 0:
                pool.drop(slot)
        assert pool.take(pool.size_bytes) is None  # what was freed last joins the rest
        return pool, slots, list(pool.allocator.extents())

    @pytest.mark.parametrize(
        ("sizes", "kept", "window", "place"),
        [
            # What moves goes to the block just behind the window, or just before it.
            ((8, 16, 16, 16, 16, 8), (3,), (8, 56), 56),
            ((8, 40, 16, 16, 16, 8), (2,), (48, 96), None),
            # Freed within the window and beside it, the two are one hole.
            ((8, 16, 16, 16, 16, 8), (2,), (8, 56), 56),
            # Not to what was free first within it, though it fits there best.
            ((8, 16, 16, 16, 8, 32, 8), (2,), (8, 56), None),
            # To move a smaller block costs less.
            ((8, 32, 16, 8, 16, 32, 8, 40, 8), (2, 5), (8, 56), None),
        ],
    )
    def test_retained_blocks_leave_the_cheapest_window(self, sizes, kept, window, place):
        pool, slots, _ = self.laid_out(*sizes)
        for i in kept:
            pool.allocator.became_busy(slots[i])
            slots[i].kept_until = 1
        clearance = pool.allocator.clearance(48 * KIB, 1 << 30)
        assert clearance.window == range(*window)
        for slot in clearance.victims:
            pool.drop(slot)
        (move,) = pool.allocator.moves_for(clearance)
        assert move.new.start not in clearance.window
        assert place is None or move.new.start == place

    @pytest.mark.parametrize("places", [(16, 32), (32, 16)])
    def test_what_was_too_small_for_a_larger_block_takes_in_a_smaller_one(self, places):
        """One holds the smaller of two only, whichever is colder."""
        pool, slots, _ = self.laid_out(8, 32, 16, 8, places[0], 8, places[1], 8)
        for i in (1, 2):
            pool.allocator.became_busy(slots[i])
            slots[i].kept_until = 1
        clearance = pool.allocator.clearance(48 * KIB, 1 << 30)
        assert clearance is not None
        assert clearance.victims == [slots[4], slots[6]]
        for slot in clearance.victims:
            pool.drop(slot)
        moves = pool.allocator.moves_for(clearance)
        large, small = (6, 4) if places == (16, 32) else (4, 6)
        assert [(move.old.start, move.new.start) for move in moves] == [
            (slots[1].start, slots[large].start),
            (slots[2].start, slots[small].start),
        ]

    def test_a_hole_that_only_touches_the_window_is_filled_whole(self):
        pool, slots, _ = self.laid_out(8, -16, 16, -16, 8)
        window = range(slots[2].start, slots[4].start)
        (move,) = pool.allocator.moves_for(Clearance([], [slots[2]], window))
        assert move.new.start == slots[1].start
        assert [place for place in pool.allocator._space if place[0] < window.stop] == [
            (slots[3].start, 16)
        ]

    def test_where_the_cheapest_window_cannot_be_emptied_another_is(self):
        """The block of 64 KiB has nowhere to go, the two of 16 KiB have."""
        pool, slots, _ = self.laid_out(-32, 64, 8, -16, 16, -16, 16, 8)
        moves = pool.allocator.moves(64 * KIB, 1 << 30)
        assert {id(move.old) for move in moves} == {id(slots[4]), id(slots[6])}

    def test_blocks_of_all_sizes_find_the_holes_that_they_fill(self):
        pool, _, _ = self.laid_out(-4, 4, 4, 6, 6, 8, -10, 8, -10, 8)
        pool.check()
        moves = pool.allocator.moves(24 * KIB, 1 << 30)
        assert sorted(move.old.size for move in moves) == [4, 4, 6, 6]
        for move in moves:
            pool.move(*move)
        pool.check()

    def test_when_the_last_block_finds_no_place_nothing_is_changed(self):
        pool, _, before = self.laid_out(-4, 4, 4, 6, 6, 8, -10, 8, -5, 8, -5, 8)
        assert pool.allocator.moves(24 * KIB, 1 << 30) == []
        assert list(pool.allocator.extents()) == before
