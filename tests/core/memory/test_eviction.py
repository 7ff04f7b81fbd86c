"""The contract of every eviction policy, and what LRU adds to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.memory.eviction import LRU, POLICIES
from tests.core.memory.eviction_model import slot_of

LATER = 1 << 40
SLOTS = 6
operations = st.lists(
    st.tuples(
        st.sampled_from(["insert", "touch", "remove", "begins", "evicted", "left"]),
        st.integers(0, SLOTS - 1),
        st.integers(0, 9),
    ),
    max_size=60,
)
each_policy = pytest.mark.parametrize("name", sorted(POLICIES))


class Driven:
    """A policy, and what the allocator would know: which slots it holds, and their order of use."""

    def __init__(self, name):
        self.policy = POLICIES[name]()
        self.slots = [slot_of(number) for number in range(SLOTS)]
        self.held, self.fresh = set(), []
        self.now, self.tick = 0.0, 0

    def used(self, slot):
        self.tick += 1
        slot.last_use = self.tick

    def hold(self, number):
        self.held.add(number)
        if number in self.fresh:
            self.fresh.remove(number)
        self.fresh.append(number)

    def insert(self, number, least):
        self.used(self.slots[number])
        assert self.policy.insert(self.slots[number], least) >= least
        self.hold(number)

    def touch(self, number, least):
        self.used(self.slots[number])
        assert self.policy.touch(self.slots[number], least) >= min(least, 8)
        if number in self.held:
            self.hold(number)

    def remove(self, number, _):
        assert self.policy.remove(self.slots[number]) is (number in self.held)
        self.drop(number)

    def drop(self, number):
        self.held.discard(number)
        if number in self.fresh:
            self.fresh.remove(number)

    def evicted(self, number, _):
        slot = self.slots[number]
        self.policy.evicted([slot])
        self.policy.remove(slot)
        slot.uses = 0  # as the allocator does where a slot becomes free
        self.drop(number)

    def left(self, number, _):
        if number in self.held:
            slot, coldest = self.slots[number], self.slots[self.order()[0]]
            self.remove(number, 0)
            slot.last_use = coldest.last_use - 1
            self.policy.left(slot, coldest)
            self.held.add(number)
            assert self.order()[0] == number

    def begins(self, _, seconds):
        self.now += seconds
        self.policy.begins(self.now)
        self.fresh.clear()

    def order(self):
        by_id = {slot.slot_id: number for number, slot in enumerate(self.slots)}
        return [by_id[slot_id] for slot_id in self.policy.coldest()]


def driven(name, steps):
    one = Driven(name)
    for operation, number, amount in steps:
        getattr(one, operation)(number, min(amount, 8))
        yield one


@each_policy
@given(operations)
def test_a_policy_offers_what_it_holds_each_once(name, steps):
    for one in driven(name, steps):
        assert sorted(one.order()) == sorted(one.held)


@each_policy
@given(operations)
def test_what_this_event_has_used_goes_last_and_in_that_order(name, steps):
    for one in driven(name, steps):
        assert [number for number in one.order() if number in one.fresh] == one.fresh
        assert not one.fresh or one.order()[-len(one.fresh) :] == one.fresh


@each_policy
@given(operations)
def test_what_goes_later_costs_as_much_a_granule_or_more(name, steps):
    for one in driven(name, steps):
        slots = [one.slots[number] for number in one.order()]
        if not slots:
            continue
        cost = one.policy.costs(slots[0], LATER)
        costs = [cost(slot) for slot in slots]
        assert costs[0] == slots[0].size, "what goes first costs its size"
        assert costs == sorted(costs)
        for slot in slots:
            slot.size *= 3
        assert [cost(slot) for slot in slots] == [3 * each for each in costs]
        for slot in slots:
            slot.size //= 3


@each_policy
@given(operations)
def test_the_same_operations_leave_the_same_order(name, steps):
    for one, other in zip(driven(name, steps), driven(name, steps), strict=True):
        assert one.order() == other.order()


@each_policy
def test_a_touch_does_not_bring_a_removed_slot_back(name):
    one = Driven(name)
    one.insert(1, 1)
    one.remove(1, 0)
    one.touch(1, 1)
    assert one.order() == []


@each_policy
def test_what_is_inserted_again_counts_as_just_used(name):
    one = Driven(name)
    for number in (1, 2, 1):
        one.insert(number, 1)
    assert one.order() == [2, 1]


@each_policy
def test_of_blocks_used_once_the_one_unused_for_longest_goes_first(name):
    one = Driven(name)
    for number in (3, 1, 2):
        one.begins(0, 5)
        one.insert(number, 1)
    one.begins(0, 5)
    assert one.order() == [3, 1, 2]


@each_policy
def test_what_was_left_goes_first_until_it_is_used_again(name):
    one = Driven(name)
    for number in (1, 2, 3):
        for _ in range(number):
            one.begins(0, 5)
            one.insert(number, 1)
    one.begins(0, 5)
    for number in (3, 2):
        one.left(number, 0)
    assert one.order() == [2, 3, 1]
    one.touch(2, 1)
    one.begins(0, 5)
    assert one.order() == [3, 1, 2]


def test_lru_evicts_what_was_unused_for_longest():
    one = Driven("lru")
    for number in (1, 2, 3):
        one.insert(number, 1)
    for _ in range(9):
        one.begins(0, 5)
        one.touch(1, 1)
    one.touch(2, 1)
    one.begins(0, 1)
    assert one.order() == [3, 1, 2]


def test_lru_costs_by_the_uses_that_came_between():
    one = Driven("lru")
    for number in (1, 2, 3):
        one.insert(number, 1)
    one.touch(2, 1)
    cost = LRU().costs(one.slots[1], LATER)
    size = one.slots[1].size
    assert [cost(one.slots[number]) for number in (1, 2, 3)] == [
        size * (1 + LATER * later) for later in (0, 3, 2)
    ]


def test_lru_counts_nothing():
    one = Driven("lru")
    one.insert(1, 1)
    one.touch(1, 7)
    assert one.slots[1].uses == 0
