"""Extents of a segment: fill, windows, eviction."""

import random

import pytest
from allocator_pool import MIXES, Pool, lognormal, looks_around
from each_input import each
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.memory.allocator import Allocator
from kvstore.core.memory.granules import GRANULE_BYTES
from kvstore.core.memory.slots import SlotEvent, SlotState
from kvstore.core.memory.windows import COLD_TRIED
from kvstore.errors import UsageError
from kvstore.limits import (
    SEGMENT_BYTES_MIN,
    SLOT_BYTES_MIN,
    SLOTS_PER_SEGMENT_MAX,
)

KIB, MIB = 1 << 10, 1 << 20


class TestUniform:
    def test_blocks_of_one_size_fill_a_segment_without_a_gap(self):
        pool = Pool(64 * MIB)
        slots = [pool.put(MIB) for _ in range(64)]
        assert pool.evicted == []
        assert sorted(slot.offset for slot in slots) == [i * MIB for i in range(64)]
        pool.check()

    @each("length", [4096, 5000, 12_000, 100_000, 300 * KIB])
    def test_a_full_segment_evicts_the_coldest_block_and_that_alone(self, length):
        pool = Pool(MIB)
        order = []
        while not pool.evicted:
            order.append(pool.put(length))
        order.pop()
        assert pool.evicted == order[:1]
        for _ in range(2 * len(order)):
            pool.put(length)
        pool.check()
        assert all(len(victims) == 1 for _, victims in pool.evictions)

    def test_a_used_block_outlives_one_that_was_not(self):
        pool = Pool(64 * KIB)
        slots = [pool.put(8192) for _ in range(8)]
        pool.allocator.used(slots[0])
        pool.put(8192)
        assert pool.evicted == [slots[1]]


class TestFill:
    @each("seed", range(3))
    @each("mix", MIXES)
    @each(("part", "fill"), [(64, 0.80), (16, 0.65)])
    def test_nothing_is_evicted_below_the_promised_fill(self, mix, part, fill, seed):
        """From the first value on."""
        rng, pool = random.Random(seed), Pool(256 * MIB)
        while pool.used < fill:
            pool.put(mix(rng, 256 * MIB // part))
            assert pool.evicted == [] or pool.used >= fill, f"seed {seed}, {pool.used}"
        pool.check()

    @each("seed", range(5))
    def test_fifty_values_of_a_byte_to_two_megabytes_all_stay(self, seed):
        rng, pool = random.Random(seed), Pool(512 * MIB)
        for _ in range(50):
            pool.put(rng.randint(1, 1_900_000))
        assert pool.evicted == []

    @pytest.mark.parametrize(("count", "total", "size"), [(314, 152, 256), (847, 612, 1024)])
    def test_what_lost_nearly_all_blocks_once_loses_none(self, count, total, size):
        """Log-normal sizes of up to a 64th of the node, so many that they take `total` MiB."""
        rng, pool = random.Random(7), Pool(size * MIB)
        lengths = [lognormal(rng, size * MIB // 64) for _ in range(count)]
        scale = total * MIB / sum(lengths)
        for length in lengths:
            pool.put(max(1, min(int(length * scale), size * MIB // 64)))
        assert pool.evicted == []


class TestEviction:
    def test_there_is_space_while_anything_that_fits_is_evictable(self):
        pool = Pool(64 * KIB)
        held = [pool.put(8192, seal=False) for _ in range(7)]
        assert all(held)
        for _ in range(50):
            assert pool.put(8192) is not None

    def test_a_segment_whose_slots_are_all_reserved_has_no_space(self):
        pool = Pool(64 * KIB)
        for _ in range(8):
            pool.put(8192, seal=False)
        assert pool.put(8192) is None

    @pytest.mark.parametrize("seed", range(4))
    def test_room_for_a_small_value_costs_one_block_of_another_size_at_most(self, seed):
        rng, pool = random.Random(seed), Pool(64 * MIB)
        for _ in range(600):
            pool.put(rng.choice([MIB, 2 * MIB, 3 * MIB]) if rng.random() < 0.5 else 4096)
        assert pool.evictions
        for wanted, victims in pool.evictions:
            if wanted == 4:
                assert len(victims) == 1, f"seed {seed}"

    @each("seed", range(4))
    @each("mix", MIXES)
    def test_no_more_is_evicted_than_the_request_and_one_block(self, mix, seed):
        rng, pool = random.Random(seed), Pool(32 * MIB)
        for _ in range(800):
            pool.put(mix(rng, 2 * MIB))
        assert pool.evictions
        for wanted, victims in pool.evictions:
            if max(victims) >= wanted + 3:  # three granules bring any extent to a page
                assert len(victims) == 1, f"seed {seed}"
            assert sum(victims) - max(victims) < wanted + 4, f"seed {seed}: {wanted}, {victims}"

    @pytest.mark.parametrize("seed", range(3))
    def test_eight_pins_spread_over_a_node_keep_nothing_out(self, seed):
        """Any value that fits between two of them."""
        rng, pool = random.Random(seed), Pool(512 * MIB)
        slots = [pool.put(MIB) for _ in range(512)]
        for slot in sorted(slots, key=lambda slot: slot.offset)[32::64]:
            pool.pin(slot)
        for _ in range(300):
            assert pool.put(rng.choice([4096, 60_000, 3 * MIB, 8 * MIB, 30 * MIB])) is not None
        pool.check()

    def test_a_pin_holds_its_own_extent_alone(self):
        pool = Pool(MIB)
        slots = sorted((pool.put(8192) for _ in range(128)), key=lambda slot: slot.offset)
        pool.pin(slots[1])
        assert pool.put(MIB - 16384) is not None
        assert slots[1].state is SlotState.SEALED
        assert len(pool.evicted) == 126

    def test_what_was_freed_last_counts_as_room_beside_a_block_that_goes(self):
        pool = Pool(64 * KIB)
        slots = sorted((pool.put(8192) for _ in range(8)), key=lambda slot: slot.offset)
        pool.drop(slots[1])
        assert pool.allocator.in_the_way(16384) == slots[:1]

    def test_what_was_freed_is_room_for_other_sizes_before_anything_is_evicted(self):
        pool = Pool(64 * KIB)
        slots = sorted((pool.put(8192) for _ in range(8)), key=lambda slot: slot.offset)
        pool.drop(slots[0])
        pool.drop(slots[1])
        assert pool.put(16384).offset == 0
        assert pool.evicted == []

    def test_room_is_found_behind_slots_that_must_stay(self):
        """Around none of the coldest blocks is enough."""
        pool = Pool(MIB)
        slots = sorted((pool.put(8192) for _ in range(128)), key=lambda slot: slot.offset)
        for slot in slots[:64:2]:
            pool.pin(slot)
        for slot in slots[64:]:
            pool.allocator.used(slot)
        assert pool.put(512 * KIB) is not None

    def test_blocks_that_lie_together_are_looked_at_together(self, monkeypatch):
        """What a request of many values has reserved shuts small blocks in that are the coldest,
        and they are shut in for its next value too: 32 of 1 MiB took up to 0.3 s of the node's
        loop in a segment of 512 MiB."""
        looked = looks_around(monkeypatch)
        pool = Pool(MIB)
        slots = sorted((pool.put(4096) for _ in range(256)), key=lambda slot: slot.offset)
        for slot in slots[200:]:
            pool.allocator.used(slot)
        for slot in (slots[0], slots[101], slots[202]):
            pool.pin(slot)
        assert pool.put(512 * KIB) is None
        assert [slot for slot, _ in looked] == [slots[1], slots[102], slots[203]]
        looked.clear()
        assert pool.put(256 * KIB) is not None
        assert [slot for slot, _ in looked] == [slots[1]]

    def test_one_place_is_enough_for_a_value_as_large_as_thousands_of_blocks(self, monkeypatch):
        looked = looks_around(monkeypatch)
        pool = Pool(64 * MIB)
        slots = sorted((pool.put(4096) for _ in range(16384)), key=lambda slot: slot.offset)
        cold = slots[2048::4096]
        for slot in slots:
            if slot not in cold:
                pool.allocator.used(slot)
        assert len(pool.allocator.in_the_way(8 * MIB)) == 2048
        assert [slot for slot, _ in looked] == cold[-1:]
        looked.clear()
        assert len(pool.allocator.in_the_way(MIB)) == 256
        assert [slot for slot, _ in looked[:4]] == cold[::-1]

    @each("alone", [1, COLD_TRIED - 1, COLD_TRIED, COLD_TRIED + 1, 1033])
    def test_a_window_is_found_however_many_blocks_are_shut_in(self, alone):
        pool = Pool(16 * MIB)
        slots = sorted((pool.put(4096) for _ in range(4096)), key=lambda slot: slot.offset)
        for slot in slots[2 * alone :]:
            pool.allocator.used(slot)
        for slot in slots[: 2 * alone + 1 : 2]:
            pool.pin(slot)
        assert pool.allocator.in_the_way(8192) == slots[2 * alone + 1 : 2 * alone + 3]

    def test_cold_blocks_go_rather_than_hot_ones_of_about_as_many_bytes(self):
        pool = Pool(MIB)
        slots = sorted((pool.put(8192) for _ in range(128)), key=lambda slot: slot.offset)
        for slot in slots[:64]:
            pool.allocator.used(slot)
        for _ in range(4):
            pool.put(100 * KIB)
        assert not set(pool.evicted) & set(slots[:64])

    def test_the_coldest_goes_where_it_has_the_size_though_less_would_make_room(self):
        pool = Pool(64 * KIB)
        slots = sorted((pool.put(8192) for _ in range(8)), key=lambda slot: slot.offset)
        pool.drop(slots[4])
        assert pool.put(4096) is not None  # beside 4 KiB that are free
        for slot in slots[:4] * 20:
            pool.allocator.used(slot)
        coldest = slots[5]
        assert pool.allocator.in_the_way(8192) == [coldest]

    @pytest.mark.parametrize("cold", [0, 1])
    def test_where_the_coldest_are_no_help_the_cheapest_of_all_other_windows_goes(self, cold):
        """Eight single blocks between pins are the coldest, and one is at the end; of what is
        left, with a hole in either half, one half is colder."""
        pool = Pool(MIB)
        slots = sorted((pool.put(8192) for _ in range(128)), key=lambda slot: slot.offset)
        halves = slots[17:72], slots[73:126]
        for slot in (*halves[cold], *halves[1 - cold]):
            pool.allocator.used(slot)
        for slot in (*slots[:18:2], slots[72], slots[126]):
            pool.pin(slot)
        for half in halves:
            pool.drop(half[20])
        victims = pool.allocator.in_the_way(256 * KIB)
        assert len(victims) == 31
        assert set(victims) <= set(halves[cold])

    def test_room_is_found_behind_any_number_of_blocks_that_are_shut_in(self, monkeypatch):
        """Only where there is a window already a limited number of extents is enough."""
        monkeypatch.setattr("kvstore.core.memory.allocator.LOOKED_ENOUGH", 16)
        pool = Pool(MIB)
        slots = sorted((pool.put(8192) for _ in range(128)), key=lambda slot: slot.offset)
        for slot in slots[:100:2]:
            pool.pin(slot)
        for slot in slots[100:]:
            pool.allocator.used(slot)
        assert pool.allocator.in_the_way(16 * KIB) == slots[99:101]

    def test_the_only_block_that_may_go_goes_for_a_smaller_value(self):
        pool = Pool(64 * KIB)
        block, *_ = [pool.put(8192, seal=number % 2 == 0) for number in range(8)]
        for slot in list(pool.sealed.values()):
            if slot is not block:
                pool.pin(slot)
        assert pool.allocator.in_the_way(4096) == [block]
        assert pool.allocator.in_the_way(16384) == []

    def test_two_neighbours_make_room_for_a_value_of_both_wherever_they_begin(self):
        pool = Pool(64 * KIB)
        slots = [pool.put(5 * KIB) for _ in range(12)]
        for slot in (*slots[:1], *slots[3:]):
            pool.pin(slot)
        assert pool.allocator.in_the_way(10 * KIB) == slots[1:3]

    def test_one_of_the_eight_coldest_goes_though_elsewhere_less_would_do(self):
        pool = Pool(256 * KIB)
        slots = [pool.put(16 * KIB) for _ in range(10)]
        small, hole, hot = pool.put(4096), pool.put(4096), pool.put(88 * KIB)
        pool.drop(hole)
        for _ in range(1000):
            pool.allocator.used(hot)
        assert (small.offset, hot.offset) == (160 * KIB, 168 * KIB)
        assert pool.allocator.in_the_way(8192) == slots[:1]

    def test_the_coldest_of_its_size_goes_rather_than_colder_smaller_ones_and_what_lies_there(self):
        """As an attention block finds many states of a model, colder and a little smaller."""
        pool = Pool(MIB)
        pairs = [(pool.put(40 * KIB), pool.put(48 * KIB)) for _ in range(11)]
        pool.pin(pool.put(56 * KIB))
        *others, alike = (slot for _, slot in pairs)
        for slot in others:
            pool.allocator.used(slot)
        assert pool.allocator.in_the_way(48 * KIB) == [alike]

    def test_however_long_a_node_has_run_what_was_used_lately_costs_more(self):
        pool = Pool(64 * KIB)
        cold, hot, held = pool.put(16 * KIB), pool.put(12 * KIB), pool.put(36 * KIB)
        for _ in range(1000):
            pool.allocator.used(held)
        pool.pin(held)
        pool.allocator.used(cold)
        for _ in range(10):
            pool.allocator.used(hot)
        assert pool.allocator.in_the_way(10 * KIB) == [cold]

    def test_a_pool_that_does_not_evict_names_no_victims(self):
        pool = Pool(64 * KIB)
        pool.allocator.evicts = False
        for _ in range(8):
            pool.put(8192)
        assert pool.put(8192) is None

    def test_an_adversary_gets_the_bound_and_no_more(self):
        """The smallest values everywhere, then all but so many go that no hole is large enough."""
        size, least, most = 4 * MIB, 4096, 128 * KIB
        pool = Pool(size)
        slots = sorted((pool.put(least) for _ in range(size // least)), key=lambda s: s.offset)
        kept = slots[:: most // least]
        for slot in slots:
            if slot not in kept:
                pool.drop(slot)
        assert pool.used == pytest.approx(least / most, rel=0.05)
        pool.put(most)
        assert len(pool.evicted) == 1


class TestBounds:
    @pytest.mark.parametrize("seed", range(4))
    def test_between_the_bounds_lies_just_what_was_never_used(self, seed):
        """Large values come from one end and small ones from the other, until they meet."""
        rng, pool = random.Random(seed), Pool(64 * MIB)
        allocator, size = pool.allocator, 64 * 1024
        low, high = 0, size
        while pool.used < 0.97:
            length = rng.choice([4096, 9000, 40_000, MIB, 5 * MIB])
            slot = pool.take(length)
            if slot is None:
                break
            if slot.size < size // 1024:
                high = min(high, slot.start)
            else:
                low = max(low, slot.start + slot.size)
            assert low <= high
            assert (allocator.used_below, allocator.used_from) == (low, high)

    def test_a_place_that_is_used_again_moves_neither_bound(self):
        pool = Pool(64 * MIB)
        large = [pool.put(MIB) for _ in range(3)]
        small = [pool.put(4096) for _ in range(3)]
        bounds = pool.allocator.used_below, pool.allocator.used_from
        assert bounds == (3 * 1024, 64 * 1024 - 3 * 4)
        for slot, length in ((large[0], MIB // 2), (small[0], 4096)):
            pool.drop(slot)
            pool.take(2 * MIB)  # what was freed last joins the rest
            bounds = (bounds[0] + 2 * 1024, bounds[1])
            assert pool.put(length).offset == slot.offset
            assert (pool.allocator.used_below, pool.allocator.used_from) == bounds

    @pytest.mark.parametrize("below", [0, 2])
    def test_a_large_value_where_small_ones_were_leaves_nothing_between_the_bounds(self, below):
        """Else a restart would not look at its header, and give its place to another."""
        pool = Pool(64 * MIB)
        for _ in range(below):
            pool.put(MIB)
        pool.drop(pool.put(4096))
        large = pool.put((64 - below) * MIB)
        allocator = pool.allocator
        assert large.start + large.size == 64 * 1024
        assert large.start < allocator.used_below >= allocator.used_from

    def test_a_value_of_a_thousandth_is_large_and_one_below_it_is_small(self):
        size = 64 * MIB
        assert Pool(size).put(size // 1024).offset == 0
        assert Pool(size).put(size // 1024 - 4096).offset > size // 2

    def test_large_values_to_the_last_granule_leave_nothing_between_the_bounds(self):
        pool = Pool(MIB)
        for _ in range(4):
            pool.put(256 * KIB)
        assert pool.allocator.used_below == pool.allocator.used_from == 1024


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_under_random_pressure_every_granule_is_accounted_for(seed):
    rng = random.Random(seed)
    pool, reserved, pinned = Pool(192 * KIB), [], []
    for _ in range(300):
        chance = rng.random()
        if reserved and chance < 0.4:
            pool.seal(reserved.pop(rng.randrange(len(reserved))))
        elif pool.sealed and chance < 0.5:
            slot = rng.choice(list(pool.sealed.values()))
            if slot not in pinned:
                pool.pin(slot)
                pinned.append(slot)
        elif pinned and chance < 0.6:
            pool.unpin(pinned.pop(rng.randrange(len(pinned))))
        elif pool.sealed and chance < 0.65:
            slot = rng.choice(list(pool.sealed.values()))
            if slot not in pinned:
                pool.drop(slot)
        else:
            slot = pool.put(rng.choice([900, 4000, 9000, 30_000, 65_000]), seal=False)
            if slot is not None:
                reserved.append(slot)
        pool.check()
        assert all(slot.state is SlotState.RESERVED for slot in reserved), f"seed {seed}"
        assert all(slot.state is SlotState.SEALED for slot in pinned), f"seed {seed}"


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_what_is_known_to_be_shut_in_is_shut_in(seed):
    """Who looks anew finds the same victims, whatever was sealed, let go, aborted or dropped."""
    rng = random.Random(seed)
    pool, reserved, pinned = Pool(192 * KIB), [], []
    allocator = pool.allocator
    for _ in range(200):
        chance = rng.random()
        if reserved and chance < 0.2:
            pool.seal(reserved.pop(rng.randrange(len(reserved))))
        elif reserved and chance < 0.3:
            slot = reserved.pop(rng.randrange(len(reserved)))
            slot.move(SlotEvent.ABORT)
            allocator.became_free(slot)
        elif pool.sealed and chance < 0.6:
            slot = rng.choice(list(pool.sealed.values()))
            if slot in pinned:
                pinned.remove(slot)
                pool.unpin(slot)
            elif chance < 0.4:
                pool.drop(slot)
            else:
                pool.pin(slot)
                pinned.append(slot)
        else:
            slot = pool.put(rng.choice([900, 4000, 9000, 30_000]), seal=False)
            if slot is not None:
                reserved.append(slot)
        length = rng.choice([4000, 9000, 20_000, 30_000, 65_000])
        known = allocator.in_the_way(length)
        allocator._shut_in.clear()
        assert allocator.in_the_way(length) == known, f"seed {seed}"


def test_a_segment_may_be_the_smallest_and_the_largest_and_begins_unused():
    for size_bytes in (SEGMENT_BYTES_MIN, SLOTS_PER_SEGMENT_MAX * SLOT_BYTES_MIN):
        allocator = Allocator(size_bytes)
        assert allocator.capacity_bytes == allocator.free_bytes == size_bytes
        assert allocator.largest_free_bytes == size_bytes
        assert (allocator.used_below, allocator.used_from) == (0, size_bytes // GRANULE_BYTES)
    for wrong in (SEGMENT_BYTES_MIN - SLOT_BYTES_MIN, size_bytes + SLOT_BYTES_MIN):
        with pytest.raises(UsageError, match="size_bytes"):
            Allocator(wrong)
