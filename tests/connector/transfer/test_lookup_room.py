"""LookupBuffer: its bounds, what was lost is passed over, and an end gives all back."""

from __future__ import annotations

import threading

import pytest
from connector_parts import PATIENCE_S
from fake_values import FakeValues
from lookup_ends import SOON_S, insert, pair, taken, tokens

from connector.limits import LOOKUP_ENTRIES_MAX
from kvstore import DeadlineError, UsageError

torch = pytest.importorskip("torch")


def test_full_buffer_makes_the_producer_wait_until_something_is_taken() -> None:
    producer, consumer = pair(entries_max=2)
    insert(producer, 1)
    insert(producer, 2)
    with pytest.raises(DeadlineError, match="full"):
        insert(producer, 3, timeout_s=SOON_S)
    assert taken(consumer, 2) == 2
    insert(producer, 3)
    assert [taken(consumer) for _ in range(3)] == [1, 3, None]


def test_bytes_in_the_buffer_are_bounded() -> None:
    producer, _ = pair(bytes_max=100)
    insert(producer, 1)
    with pytest.raises(DeadlineError):
        insert(producer, 2, 2, 2, timeout_s=SOON_S)
    with pytest.raises(UsageError, match="at most 100"):
        producer.insert(tokens(1), None, torch.zeros(20, dtype=torch.int64), None, None)


def test_entries_are_kept_under_eviction_and_given_back_when_taken() -> None:
    store = FakeValues(capacity=20)
    producer, consumer = pair(store)
    insert(producer, 1)
    for i in range(100):
        store.put_many([(f"noise {i}", b"x")])
    assert taken(consumer) == 1
    insert(producer, 2)
    assert not [key for key in store.values if key.startswith("lookup/b/0/0")]


def test_store_holds_little_however_much_went_through() -> None:
    store = FakeValues()
    producer, consumer = pair(store)
    for i in range(1, 3 * LOOKUP_ENTRIES_MAX):
        insert(producer, i)
        assert taken(consumer) == i
    entry_values = 6
    assert len(store.values) <= LOOKUP_ENTRIES_MAX + 2 * entry_values
    assert len(store.pins) <= LOOKUP_ENTRIES_MAX + 2 * entry_values


def test_entry_that_was_lost_is_passed_over() -> None:
    store = FakeValues()
    producer, consumer = pair(store)
    for first in (1, 2, 3):
        insert(producer, first)
    store.delete("lookup/b/0/0.0")
    store.delete("lookup/b/1")
    assert taken(consumer) == 3
    # The producer hears of all three, and has room again.
    insert(producer, 4)
    assert sorted(k for k in store.pins if k.endswith("head")) == ["lookup/b/3/head"]


def test_word_that_the_store_declined_is_said_later() -> None:
    store = FakeValues()
    producer, consumer = pair(store, entries_max=1)
    insert(producer, 1)
    store.capacity = 0
    assert taken(consumer) == 1
    store.capacity = 1000
    with pytest.raises(DeadlineError):
        insert(producer, 2, timeout_s=0)
    assert taken(consumer) is None
    insert(producer, 2, timeout_s=SOON_S)
    assert taken(consumer) == 2


def test_insert_that_fails_half_way_leaves_nothing_pinned() -> None:
    store = FakeValues(capacity=3)
    producer, consumer = pair(store)
    with pytest.raises(DeadlineError, match="all is pinned"):
        insert(producer, 1, timeout_s=SOON_S)
    assert not store.pins
    store.capacity = 100
    insert(producer, 1)
    assert taken(consumer) == 1


def test_close_takes_back_what_was_not_taken() -> None:
    store = FakeValues()
    producer, consumer = pair(store)
    insert(producer, 1)
    producer.close(timeout_s=SOON_S)
    producer.close()
    assert not store.values
    assert taken(consumer) is None
    consumer.close()
    for use in (lambda: insert(producer, 2), consumer.drop_select):
        with pytest.raises(UsageError, match="is closed"):
            use()


def test_close_waits_for_the_entries_to_be_taken() -> None:
    store = FakeValues()
    producer, consumer = pair(store)
    insert(producer, 1)
    thread = threading.Thread(target=producer.close, args=(PATIENCE_S,))
    thread.start()
    assert taken(consumer) == 1
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
