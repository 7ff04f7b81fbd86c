"""kvstore/batches.py: parts in order, within both limits, none of them empty."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvstore.batches import in_batches, picked


@given(st.lists(st.integers(0, 50)), st.integers(1, 8), st.integers(1, 100))
def test_nothing_is_lost_and_both_limits_hold_but_for_one_that_is_larger(sizes, count, most):
    for batches in (
        list(in_batches(sizes, count)),
        list(in_batches(sizes, count, lambda size: size, most)),
    ):
        assert [size for batch in batches for size in batch] == sizes
        assert all(0 < len(batch) <= count for batch in batches)
    assert all(sum(batch) <= most or len(batch) == 1 for batch in batches)


@given(st.lists(st.integers(0, 50)), st.integers(1, 8), st.integers(1, 100))
def test_there_are_no_more_than_needed(sizes, count, most):
    batches = list(in_batches(sizes, count, lambda size: size, most))
    for one, following in itertools.pairwise(batches):
        assert len(one) == count or sum(one) + following[0] > most


def test_a_range_is_cut_into_ranges():
    assert list(in_batches(range(5), 2)) == [range(2), range(2, 4), range(4, 5)]


@given(st.lists(st.integers()), st.sets(st.integers(0, 20)))
def test_what_is_picked_is_in_its_order(column, numbers):
    which = [i for i in sorted(numbers) if i < len(column)]
    assert list(picked(column, which)) == [column[i] for i in which]
