"""The policy `head-start`: what it counts and learns, and its order beside a plain model's."""

import random

import pytest
from each_input import each

from kvstore.core.memory import head_start
from kvstore.core.memory.head_start import FRESH, GHOST_S, HEADS, Gaps, Ghosts, HeadStart
from kvstore.keys import Namespace
from kvstore.types import TAG_BYTES
from tests.core.memory.eviction_model import HEADS as MODEL_HEADS
from tests.core.memory.eviction_model import Model, key_of, slot_of

LATER = 1 << 40


class Driven:
    """The policy and the model side by side, as the allocator would drive them."""

    def __init__(self, blocks=200, **limits):
        self.policy, self.model = HeadStart(), Model(**limits)
        self.slots = {number: slot_of(number) for number in range(blocks)}
        self.now, self.tick = 0.0, 0

    @property
    def gaps_learned(self):
        """Since the typical one was last computed."""
        return self.policy._gaps._new

    def begins(self, seconds):
        self.now += seconds
        for one in (self.policy, self.model):
            one.begins(self.now)

    def _both(self, what, number, least):
        slot = self.slots[number]
        self.tick += 1
        slot.last_use = self.tick
        uses = getattr(self.policy, what)(slot, least)
        assert uses == getattr(self.model, what)(slot, least)
        return uses

    def insert(self, number, least=1):
        return self._both("insert", number, least)

    def touch(self, number, least=1):
        return self._both("touch", number, least)

    def remove(self, number):
        slot = self.slots[number]
        answer = self.policy.remove(slot)
        assert answer is self.model.remove(slot)
        return answer

    def freed(self, number, *, evicted):
        slot = self.slots[number]
        if evicted:
            self.policy.evicted([slot])
            self.model.evicted([slot])
        self.remove(number)
        self.model.freed(slot)
        slot.uses = 0

    def order(self):
        by_id = {slot.slot_id: slot.key for slot in self.slots.values()}
        return [by_id[slot_id] for slot_id in self.policy.coldest()]

    def check(self):
        assert self.order() == self.model.coldest()
        assert self.policy._gaps.typical_s == self.model.gap_s


def run(one, numbers):
    """Blocks of a run, head first: walked from the end, those that are there are touched."""
    least = 1
    for number in reversed(numbers):
        held = one.slots[number].key in one.model.known
        least = (one.touch if held else one.insert)(number, least)


@each("seed", range(12))
def test_the_order_is_that_of_a_look_at_all_blocks(seed, monkeypatch):
    print(f"seed {seed}")
    rng = random.Random(seed)
    monkeypatch.setattr(head_start, "LEARN_EVERY", 32)
    monkeypatch.setattr(head_start, "GAPS_COUNTED_MAX", 100)
    one = Driven(learn_every=32, counted_max=100)
    pace = rng.choice([1.0, 5.0, 40.0])
    capacity = rng.choice([70, 100, 150])
    for step in range(2500):
        if rng.random() < 0.6:
            one.begins(rng.expovariate(1 / pace) if rng.random() < 0.99 else pace * 1000)
        number, chance = int(200 * rng.random() ** 2), rng.random()
        known = one.slots[number].key in one.model.known
        if chance < 0.3:
            first = min(number, 190)
            run(one, range(first, first + rng.randint(1, 8)))
        elif chance < 0.5:
            (one.touch if known else one.insert)(number, rng.randint(1, 3))
        elif chance < 0.6 and known:
            one.remove(number)
        elif chance < 0.7 and known:
            one.insert(number, rng.choice([0, 1]))
        elif chance < 0.8:
            one.freed(number, evicted=False)
        while len(one.model.order) > capacity:
            victim = one.model.coldest()[0]
            one.freed(next(n for n in one.slots if key_of(n) == victim), evicted=True)
        if step % 7 == 0:
            one.check()
    one.check()
    assert one.model.gap_s != 100.0, "it has learned"
    assert one.model.words > 512, "its ghosts have grown"


def put(one, number, least=1):
    one.insert(number, least)
    one.begins(0)


class TestHeadStart:
    def test_heads_grow_with_the_uses_by_half_as_much_again_a_doubling(self):
        assert dict(enumerate(HEADS)) == {**MODEL_HEADS, FRESH: HEADS[8]}

    def test_a_block_used_twice_stays_for_a_gap_and_a_half_more(self):
        for later, first in ((149, 2), (151, 1)):
            one = Driven()
            one.begins(0)
            put(one, 1)
            one.begins(10)
            one.touch(1)
            one.begins(later)
            put(one, 2)
            assert one.order()[0] == key_of(first)

    def test_uses_within_a_second_are_one(self):
        one = Driven()
        one.begins(0)
        one.insert(1)
        for uses, seconds in ((1, 0.0), (1, 0.9), (2, 0.2), (2, 0.9), (3, 0.1)):
            one.begins(seconds)
            assert one.touch(1) == uses, "what is used all the time counts every second"

    def test_more_than_eight_uses_are_eight(self):
        one = Driven()
        one.begins(0)
        one.insert(1)
        for uses in (2, 3, 4, 5, 6, 7, 8, 8, 8):
            one.begins(2)
            assert one.touch(1) == uses

    def test_a_block_counts_no_less_than_the_one_behind_it(self):
        one = Driven()
        one.begins(0)
        run(one, [1, 2, 3])
        for _ in range(4):
            one.begins(9)
            one.touch(3)
        one.begins(9)
        run(one, [1, 2, 3])
        assert [one.slots[n].uses for n in (1, 2, 3)] == [6, 6, 6]

    def test_the_end_of_a_run_goes_first(self):
        one = Driven()
        one.begins(0)
        run(one, [1, 2, 3])
        one.begins(1)
        assert one.order() == [key_of(3), key_of(2), key_of(1)]

    def test_what_was_pinned_keeps_its_uses_and_letting_go_is_one(self):
        one = Driven()
        one.begins(0)
        put(one, 1)
        one.begins(5)
        one.touch(1)
        assert one.remove(1)
        one.begins(5)
        assert one.touch(1) == 3, "a use of what is pinned counts too"
        one.begins(5)
        assert one.insert(1) == 4
        one.remove(1)
        one.begins(500)
        assert one.insert(1, 0) == 4, "nobody used what was retained"

    def test_later_is_by_the_order_of_the_policy(self):
        """What was used last before may go after what was used since."""
        one = Driven()
        one.begins(0)
        put(one, 1)
        one.begins(20)
        one.touch(1)
        one.begins(60)
        put(one, 2)
        one.begins(60)
        put(one, 3)
        cost = one.policy.costs(one.slots[2], LATER)
        costs = [cost(one.slots[number]) for number in (2, 3, 1)]
        assert costs == sorted(costs)
        assert costs[1] // LATER == 4 * 60_000 * head_start.TICKS + 4, "milliseconds, then uses"


class TestGaps:
    def test_it_goes_by_the_median_of_enough(self):
        gaps = Gaps()
        for _ in range(255):
            gaps.learn(30)
        gaps.look()
        assert gaps.typical_s == 100.0
        gaps.learn(2000)
        gaps.look()
        assert gaps.typical_s == pytest.approx(30, rel=0.19)
        for _ in range(254):
            gaps.learn(2000)
        gaps.look()
        assert gaps.typical_s == pytest.approx(30, rel=0.19), "looks once in 256"
        for _ in range(2):
            gaps.learn(2000)
        gaps.look()
        assert gaps.typical_s == pytest.approx(2000, rel=0.19)

    @pytest.mark.parametrize(("gap_s", "typical_s"), [(1, 2**0.25), (1e5, 3600), (1e9, 3600)])
    def test_it_is_as_short_as_a_use_and_an_hour_at_most(self, gap_s, typical_s):
        gaps = Gaps()
        for _ in range(256):
            gaps.learn(gap_s)
        gaps.look()
        assert gaps.typical_s == pytest.approx(typical_s)

    def test_what_was_learned_long_ago_counts_less(self):
        gaps = Gaps()
        for gap_s, times in ((10, 4352), (1000, 2304)):
            for _ in range(times):
                gaps.learn(gap_s)
                gaps.look()
        assert gaps.typical_s == pytest.approx(1000, rel=0.19)

    @pytest.mark.parametrize(("uses", "learned"), [(5, True), (6, False)])
    def test_what_is_used_all_the_time_teaches_nothing(self, uses, learned):
        one = Driven()
        one.begins(0)
        one.insert(1, uses)
        one.begins(9)
        one.touch(1)
        assert bool(one.gaps_learned) is learned


class TestGhosts:
    def test_a_block_that_comes_back_counts_two_more(self):
        one = Driven()
        for uses, expected in ((1, 3), (2, 4), (4, 6), (7, 6)):
            one.begins(0)
            one.insert(uses, uses)
            one.begins(50)
            one.freed(uses, evicted=True)
            one.begins(50)
            assert one.insert(uses) == expected
        assert one.gaps_learned == 1, "of the one that was used once"

    def test_one_that_was_dropped_is_new(self):
        one = Driven()
        one.begins(0)
        one.insert(1, 5)
        one.freed(1, evicted=False)
        assert one.insert(1) == 1

    def test_a_word_is_of_one_key(self):
        ghosts = Ghosts()
        one = bytes(8) + (3).to_bytes(6, "little") + b"\x01\x02" + bytes(16)
        other = bytes(8) + (3).to_bytes(6, "little") + b"\x01\x03" + bytes(16)
        ghosts.note(one, 1000.5, 3)
        assert ghosts.find(one, 1010.0) == (3, 10)
        assert ghosts.find(other, 1010.0) is None
        ghosts.note(other, 1020.0, 9)
        assert ghosts.find(other, 1021.0) == (4, 1)
        assert ghosts.find(one, 1021.0) is None

    def test_blocks_of_one_prompt_have_each_its_own(self):
        """They share the tag that their keys begin with."""
        ghosts = Ghosts()
        ghosts.hold(2000)
        keys = Namespace.named("n").block_keys(range(100), 2)
        left, new = keys[:25], keys[25:]
        assert len({key[:TAG_BYTES] for key in keys}) == 1
        for key in left:
            ghosts.note(key, 5.0, 1)
        assert all(ghosts.find(key, 6.0) for key in left)
        assert not any(ghosts.find(key, 6.0) for key in new)

    def test_what_nobody_noted_is_found_by_no_key(self):
        ghosts = Ghosts()
        assert ghosts.find(bytes(32), 5.0) is None
        ghosts.note(bytes(32), 5.0, 1)
        assert ghosts.find(bytes(32), 5.0) == (1, 0)

    def test_seconds_go_round(self):
        ghosts = Ghosts()
        ghosts.note(key_of(1), GHOST_S - 10.0, 2)
        assert ghosts.find(key_of(1), GHOST_S + 5.0) == (2, 15)

    def test_a_table_that_grows_says_the_same(self):
        ghosts = Ghosts()
        keys = [key_of(number) for number in range(1, 200)]
        for key in keys:
            ghosts.note(key, 7.0, 2)
        known = [key for key in keys if ghosts.find(key, 9.0)]
        assert len(known) > 100
        ghosts.hold(64)
        assert len(ghosts) == 512
        ghosts.hold(65)
        assert len(ghosts) == 1024
        ghosts.hold(1)
        assert len(ghosts) == 1024
        assert [key for key in keys if ghosts.find(key, 9.0)] == known
        ghosts.hold(300)
        assert len(ghosts) == 4096
        assert [ghosts.find(key, 9.0) for key in known] == [(2, 2)] * len(known)

    def test_it_ends_growing(self, monkeypatch):
        monkeypatch.setattr(head_start, "GHOST_WORDS_MAX", 1024)
        ghosts = Ghosts()
        ghosts.hold(1 << 40)
        assert len(ghosts) == 1024

    def test_it_grows_with_the_blocks(self):
        one = Driven()
        one.begins(0)
        for number in range(65):
            one.insert(number)
        ghosts = one.policy._ghosts
        assert len(ghosts) == 512
        one.begins(1)
        assert len(ghosts) == 1024
