"""LookupBuffer: several producers and consumers, of which each entry has one."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from connector_parts import PATIENCE_S
from fake_values import FakeValues
from lookup_ends import SOON_S, consumers_of, insert, several, taken
from threads_at_once import at_once

from connector.limits import LOOKUP_ENTRIES_MAX
from connector.transfer import tensor_messages
from connector.transfer.lookup_buffer import LookupBuffer
from kvstore import DeadlineError, UsageError


def test_entries_of_several_producers_are_each_taken_once_and_in_turn() -> None:
    producers, consumer = several(3, FakeValues())
    for entry in (1, 2):
        for i, producer in enumerate(producers):
            insert(producer, 10 * i + entry)
    assert [taken(consumer) for _ in range(7)] == [1, 11, 21, 2, 12, 22, None]


def test_entry_is_found_by_its_tokens_whichever_producer_has_it() -> None:
    producers, consumer = several(3, FakeValues())
    for i, producer in enumerate(producers):
        insert(producer, i + 1, 7)
    assert [taken(consumer, first, 7, 9) for first in (3, 1, 2, 2)] == [3, 1, 2, None]
    insert(producers[1], 5)
    assert taken(consumer, 5) == 5


def test_each_producer_has_room_of_its_own_and_hears_what_was_taken_from_it() -> None:
    store = FakeValues()
    full, free = (
        LookupBuffer(store, "b", producer=True, number=i, entries_max=1) for i in range(2)
    )
    consumer = LookupBuffer(store, "b", producer=False, producers=2)
    insert(full, 1)
    insert(free, 2)
    with pytest.raises(DeadlineError, match="full"):
        insert(full, 3, timeout_s=SOON_S)
    assert taken(consumer, 2) == 2
    insert(free, 4, timeout_s=SOON_S)
    with pytest.raises(DeadlineError, match="full"):
        insert(full, 3, timeout_s=SOON_S)
    assert taken(consumer, 1) == 1
    insert(full, 3, timeout_s=SOON_S)
    for end in (full, free, consumer):
        end.close()
    assert not store.pins
    with pytest.raises(UsageError, match="is closed"):
        consumer.drop_select()


def test_of_several_consumers_each_entry_has_one() -> None:
    store = FakeValues()
    producer = LookupBuffer(store, "b", producer=True)
    consumers = consumers_of(3, store)
    for first in range(1, 8):
        insert(producer, first)
    got = [taken(consumers[i % 3]) for i in range(9)]
    assert got == [1, 2, 3, 4, 5, 6, 7, None, None]


def test_consumers_that_want_the_same_entry_at_once_get_it_once() -> None:
    store = FakeValues()
    producers = [LookupBuffer(store, "b", producer=True, number=i) for i in range(2)]
    consumers = [LookupBuffer(store, "b", producer=False, producers=2) for _ in range(3)]
    for producer in range(2):
        for first in range(20):
            insert(producers[producer], 100 * producer + first)
    got: list[int | None] = []
    ready = threading.Barrier(len(consumers))

    def take(consumer: LookupBuffer) -> None:
        ready.wait(PATIENCE_S)
        while (first := taken(consumer)) is not None:
            got.append(first)

    at_once([partial(take, one) for one in consumers])
    assert sorted(got) == [*range(20), *range(100, 120)]
    for end in (*producers, *consumers):
        end.close()
    assert not store.pins


def test_entry_that_another_is_reading_stays_whole_until_it_has_it() -> None:
    """One consumer has the turn and reads; another one that sees the entry frees nothing."""
    store = FakeValues()
    producer = LookupBuffer(store, "b", producer=True, entries_max=1)
    reading, other = consumers_of(2, store)
    insert(producer, 1)
    assert reading._claim("lookup/b/0")
    assert taken(other) is None
    with pytest.raises(DeadlineError, match="full"):
        insert(producer, 2, timeout_s=0)
    assert tensor_messages.receive(store, "lookup/b/0") is not None


def test_consumer_that_was_away_finds_what_there_is_now() -> None:
    store = FakeValues()
    producer = LookupBuffer(store, "b", producer=True)
    busy, away = consumers_of(2, store)
    insert(producer, 7, 7)
    for first in range(100, 100 + 5 * LOOKUP_ENTRIES_MAX):
        insert(producer, first)
        assert taken(busy, first) == first
    late = LookupBuffer(store, "b", producer=False)
    insert(producer, 9, 9)
    assert taken(away, 9, 9) == 9
    assert taken(late, 7, 7) == 7
    assert taken(late) is None


def test_entry_whose_consumer_died_with_it_makes_room_after_a_time() -> None:
    store = FakeValues()
    producer = LookupBuffer(store, "b", producer=True, entries_max=1, timeout_s=SOON_S)
    died, other = consumers_of(2, store)
    insert(producer, 1)
    assert died._claim("lookup/b/0")
    insert(producer, 2, timeout_s=PATIENCE_S)
    assert taken(other) == 2


def test_entry_stays_when_nobody_can_be_asked_whose_it_is() -> None:
    store = FakeValues()
    producer = LookupBuffer(store, "b", producer=True)
    consumer = LookupBuffer(store, "b", producer=False)
    insert(producer, 1)
    store.gone = True
    assert taken(consumer) is None
    store.gone = False
    assert taken(consumer) == 1


def test_two_producers_with_one_number_are_refused() -> None:
    store = FakeValues()
    first, second = (LookupBuffer(store, "b", producer=True, number=1) for _ in range(2))
    insert(first, 1)
    with pytest.raises(UsageError, match="was used before"):
        insert(second, 2)
