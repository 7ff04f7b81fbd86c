"""LookupBuffer: an entry is found by few questions, through lists by prefix that go with it."""

from __future__ import annotations

from typing import Any

import pytest
from fake_values import FakeValues
from hypothesis import given
from hypothesis import strategies as st
from lookup_ends import insert, pair, several, shared, taken, tokens

from connector.limits import LOOKUP_PRODUCERS_MAX
from connector.transfer import posting_lists
from connector.transfer.lookup_buffer import LookupBuffer


def test_entry_is_taken_by_tokens_that_have_a_whole_part_of_it_or_more() -> None:
    producer, consumer = pair()
    long = [*range(1, 200)]
    for part in (1, 63, 64, 65, 199):
        insert(producer, *long)
        assert taken(consumer, *long[:part]) == 1, part
        insert(producer, *long[:part])
        assert taken(consumer, *long, 7) == 1, part
        assert taken(consumer, *long) is None


@given(st.data())
def test_the_oldest_that_matches_is_taken_whatever_prefixes_have_lists(data: Any) -> None:
    few_tokens = st.lists(st.integers(-1, 1), max_size=9)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(posting_lists, "RUNG_FACTOR", data.draw(st.sampled_from([2, 3, 64])))
        producer, consumer = pair()
        inserted: list[list[int]] = []
        for _ in range(data.draw(st.integers(1, 12))):
            if data.draw(st.booleans()):
                ids = data.draw(few_tokens)
                producer.insert(tokens(*ids), None, None, None, None)
                inserted.append(ids)
                continue
            wanted = data.draw(st.none() | few_tokens)
            got = consumer.drop_select(None if wanted is None else tokens(*wanted), timeout_s=0)
            match = next((ids for ids in inserted if wanted is None or shared(ids, wanted)), None)
            assert (None if got is None else got.tokens.tolist()) == match
            if match is not None:
                inserted.remove(match)


class Counted:
    """Counts what a store is asked."""

    def __init__(self, store: FakeValues) -> None:
        self._store, self.calls = store, 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self._store, name)


def test_questions_do_not_grow_with_the_entries_that_are_there() -> None:
    """Before, one was asked for each entry and each producer: 1,029 for a thousand entries."""
    system_prompt = [7] * 100

    def calls(entries: int, wanted: list[int]) -> int:
        store = FakeValues(capacity=1 << 20)
        producers, _ = several(min(entries, LOOKUP_PRODUCERS_MAX), store)
        for i in range(entries):
            producers[i % len(producers)].insert(
                tokens(*system_prompt, i, *range(50)), None, None, None, None
            )
        counted: Any = Counted(store)
        consumer = LookupBuffer(counted, "b", producer=False, producers=len(producers))
        assert consumer.drop_select(tokens(*wanted), timeout_s=0) is not None
        return counted.calls

    for length in (160, 101):
        wanted = [*system_prompt, 0, *range(50), *range(50)][:length]
        assert calls(1, wanted) == calls(10, wanted) == calls(1000, wanted) <= 9
    counted: Any = Counted(FakeValues())
    consumer = LookupBuffer(counted, "b", producer=False, producers=LOOKUP_PRODUCERS_MAX)
    assert consumer.drop_select(tokens(1, 2), timeout_s=0) is None
    assert counted.calls == 1


def test_entry_is_listed_again_when_its_lists_were_lost_with_a_node() -> None:
    store = FakeValues()
    producer, consumer = pair(store)
    insert(producer, 1, 2)
    for key in [key for key in store.values if "/ends/" in key]:
        store.delete(key)
    assert taken(consumer, 1, 2) is None
    insert(producer, 3)
    assert taken(consumer, 1, 2) == 1


def test_entry_is_found_while_its_list_is_written() -> None:
    """The version before is there until the next is."""
    store = FakeValues()
    producer, consumer = pair(store)
    insert(producer, 1, 2)
    found: list[int | None] = []

    class Writing(FakeValues):
        def _put(self, key: str, value: Any) -> Any:
            if "/ends/" in key or "/on/" in key:
                found.append(taken(consumer, 1, 2) if not found else None)
            return super()._put(key, value)

    store.__class__ = Writing
    insert(producer, 1, 5)
    assert found[0] == 1
    assert taken(consumer, 1, 5) == 1


def test_lists_go_with_their_entries() -> None:
    store = FakeValues()
    producer, consumer = pair(store)
    for i in range(1, 40):
        insert(producer, i, *range(100))
        assert taken(consumer, i, *range(100)) == i
    insert(producer, 50)
    lists = [key for key in store.values if "/ends" in key or "/on" in key]
    assert len(lists) == 2  # that of all entries and that of this one


@pytest.mark.parametrize("value", [b"", b"short", b"\xff" * 11, b"\xff" * 53])
def test_a_list_that_no_producer_wrote_is_passed_over(value: bytes) -> None:
    producer, consumer = pair(store := FakeValues())
    insert(producer, 1, 2, 3)
    lists = [key for key in store.values if key.endswith(("/0", "/1")) and "/ends/" in key]
    for key in lists:
        other = key[:-1] + ("1" if key.endswith("0") else "0")
        store.values[other] = value
    assert lists
    assert taken(consumer, 1, 2, 3, 4) == 1


def test_entry_whose_tokens_were_lost_is_left_to_who_needs_them_not() -> None:
    store = FakeValues()
    producer, consumer = pair(store)
    insert(producer, 1, 2, 3)
    store.delete("lookup/b/0/head")
    assert taken(consumer, 1) is None
    assert taken(consumer, 1, 2, 3) == 1
