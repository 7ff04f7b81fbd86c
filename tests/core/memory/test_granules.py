from each_input import each
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.memory.granules import GRANULE_BYTES, PAGE, PAGED, aligned, granules_of, within
from kvstore.limits import SLOT_BYTES_MIN, VALUE_BYTES_MAX

KIB, MIB = 1 << 10, 1 << 20


@given(st.integers(1, VALUE_BYTES_MAX))
def test_every_value_fits_what_it_takes(length):
    assert granules_of(length) * GRANULE_BYTES >= length


@each(
    ("length", "kib"),
    [
        (1, 4),
        (4096, 4),
        (4097, 5),
        (16384, 16),
        (16385, 20),
        (1 << 20, 1024),
        ((1 << 20) + 1, 1028),
    ],
)
def test_a_value_takes_what_it_needs_and_not_a_byte_too_little(length, kib):
    assert granules_of(length) == kib


@given(st.integers(SLOT_BYTES_MIN, VALUE_BYTES_MAX))
def test_a_slot_is_at_most_a_quarter_larger_than_its_value(length):
    assert granules_of(length) * GRANULE_BYTES <= length * 1.25


@given(st.integers(1, VALUE_BYTES_MAX))
def test_no_two_slots_can_begin_in_one_page_and_large_ones_have_whole_pages(length):
    size = granules_of(length)
    assert size >= PAGE
    if size > PAGED:
        assert aligned(size)


def test_a_slot_lies_within_its_segment_and_large_ones_begin_with_a_page():
    segment = 64 * KIB
    assert within(15, 0, PAGE, segment)
    assert within(14, 3, PAGE, segment)
    assert not within(15, 1, PAGE, segment)
    assert not within(16, 0, PAGE, segment)
    assert not within(0, PAGE, PAGE, segment)
    assert not within(0, 1, PAGED, segment)
