"""What a node remembers of keys that left: the latest, the last so many, in fixed memory."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.outgoing.departures import Departure, Departures, GoneWhy


def key(number: int) -> bytes:
    return b"same-tag" + number.to_bytes(24, "little")


def test_what_left_is_remembered_with_its_reason_and_time():
    gone = Departures(4)
    gone.note(key(1), GoneWhy.EVICTED, 10.0)
    gone.note(key(2), GoneWhy.DELETED, 11.0)
    assert gone.get(key(1)) == Departure(GoneWhy.EVICTED, 10.0)
    assert gone.get(key(2)) == Departure(GoneWhy.DELETED, 11.0)
    assert gone.get(key(3)) is None


def test_a_later_departure_of_the_same_key_replaces_the_earlier():
    gone = Departures(4)
    gone.note(key(1), GoneWhy.EVICTED, 10.0)
    gone.note(key(1), GoneWhy.CLEARED, 20.0)
    assert gone.get(key(1)) == Departure(GoneWhy.CLEARED, 20.0)
    assert len(gone) == 1


def test_the_oldest_is_forgotten_first_and_it_says_how_far_back_it_knows():
    gone = Departures(3)
    for i in range(3):
        gone.note(key(i), GoneWhy.EVICTED, float(i))
    assert gone.reaches_back_s(10.0) is None
    gone.note(key(3), GoneWhy.EVICTED, 3.0)
    assert [gone.get(key(i)) is not None for i in range(4)] == [False, True, True, True]
    assert gone.reaches_back_s(10.0) == 9.0
    assert gone.forgotten == 1


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(GoneWhy)), max_size=60))
def test_it_is_the_model_of_the_last_so_many(notes):
    size = 5
    gone = Departures(size)
    for at, (number, why) in enumerate(notes):
        gone.note(key(number), why, float(at))
    expected = {
        number: Departure(why, float(at)) for at, (number, why) in list(enumerate(notes))[-size:]
    }
    assert {i: d for i in range(10) if (d := gone.get(key(i))) is not None} == expected
    assert len(gone) == len(expected)


def test_a_ring_of_one_remembers_the_last():
    gone = Departures(1)
    for i in range(3):
        gone.note(key(i), GoneWhy.EVICTED, float(i))
    assert [gone.get(key(i)) for i in range(3)] == [None, None, Departure(GoneWhy.EVICTED, 2.0)]
    assert gone.forgotten == 2


def test_its_memory_is_bounded():
    gone = Departures(1000)

    def size_bytes() -> int:
        keys = gone._keys
        return sum(map(sys.getsizeof, (keys, gone._at, gone._why, gone._places, *keys)))

    for i in range(1000):
        gone.note(key(i), GoneWhy.EVICTED, 0.0)
    full_bytes = size_bytes()
    for i in range(1000, 50_000):
        gone.note(key(i), GoneWhy.EVICTED, 0.0)
    assert len(gone) == 1000
    # The table may be caught while it is being rebuilt, at most twice as large.
    assert size_bytes() <= 2 * full_bytes
    assert full_bytes / 1000 < 200
