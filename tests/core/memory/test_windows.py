"""Windows: the cheapest part of a run of extents that holds a request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.memory.granules import PAGE, aligned
from kvstore.core.memory.slots import Slot
from kvstore.core.memory.windows import COLD_TRIED, Extent, Window, cheapest, window_of


def run_of(pieces):
    run, at = [], 0
    for size, is_free in pieces:
        run.append(Extent(at, size, None if is_free else Slot(at, size)))
        at += size
    return run


def cost_of(slot):
    return slot.size * (1 + slot.start % 7)


def holds(part, size):
    begin = -(-part[0].start // PAGE) * PAGE if aligned(size) else part[0].start
    return begin + size <= part[-1].start + part[-1].size


@given(
    st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 80),
)
def test_no_other_part_that_holds_the_request_costs_less(pieces, size):
    run = run_of(pieces)
    parts = [run[a : b + 1] for a in range(len(run)) for b in range(a, len(run))]
    costs = [
        sum(cost_of(extent.slot) for extent in part if extent.slot is not None)
        for part in parts
        if holds(part, size)
    ]
    window = window_of(run, size, cost_of)
    if window is None:
        assert costs == []
        return
    assert holds(window.extents, size)
    assert window.cost == min(costs) == sum(map(cost_of, window.slots))


@pytest.mark.parametrize("first", [0, 1, COLD_TRIED - 1])
def test_of_the_first_few_the_cheapest_is_taken(first):
    found = [None] * first + [Window(3, []), Window(1, [])]
    last = min(first + 1, COLD_TRIED - 1)
    assert cheapest(iter(found)).cost == (1 if first + 1 == last else 3)


def test_beyond_them_the_first_that_there_is():
    found = [None] * (COLD_TRIED + 5) + [Window(3, []), Window(1, [])]
    assert cheapest(iter(found)).cost == 3
    assert cheapest(iter([None] * 20)) is None
