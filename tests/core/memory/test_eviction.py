"""The contract of every eviction policy, and what LRU adds to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.memory.eviction import LRU, POLICIES

operations = st.lists(
    st.tuples(st.sampled_from(["insert", "touch", "remove"]), st.integers(0, 5)), max_size=60
)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(operations)
def test_a_policy_offers_what_it_holds_each_once(name, steps):
    policy, held = POLICIES[name](), set()
    for operation, slot in steps:
        answer = getattr(policy, operation)(slot)
        if operation == "insert":
            held.add(slot)
        elif operation == "remove":
            assert answer is (slot in held)
            held.discard(slot)
        assert sorted(policy.coldest()) == sorted(held)


def test_lru_evicts_what_was_unused_for_longest():
    policy = LRU()
    for slot in (1, 2, 3):
        policy.insert(slot)
    policy.touch(1)
    assert list(policy.coldest()) == [2, 3, 1]


def test_what_is_inserted_again_counts_as_just_used():
    policy = LRU()
    for slot in (1, 2, 1):
        policy.insert(slot)
    assert list(policy.coldest()) == [2, 1]


def test_a_touch_does_not_bring_a_removed_slot_back():
    policy = LRU()
    policy.insert(1)
    policy.remove(1)
    policy.touch(1)
    assert list(policy.coldest()) == []
