from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.sizes import SLOT_BYTES, size_class_of
from kvstore.limits import ARENA_BYTES_MAX, SLOT_BYTES_MIN


@given(st.integers(1, ARENA_BYTES_MAX))
def test_every_length_up_to_an_arena_has_a_class_that_holds_it(length):
    assert SLOT_BYTES[size_class_of(length)] >= length


@given(st.integers(SLOT_BYTES_MIN, ARENA_BYTES_MAX))
def test_a_slot_is_at_most_a_quarter_larger_than_its_value(length):
    assert SLOT_BYTES[size_class_of(length)] <= length * 1.25


def test_every_power_of_two_is_a_class_of_its_own():
    for shift in range(12, 31):
        assert SLOT_BYTES[size_class_of(1 << shift)] == 1 << shift
