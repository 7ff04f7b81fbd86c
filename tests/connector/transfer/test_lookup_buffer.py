"""LookupBuffer: KV inserted on one side is found by its tokens on the other, once."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from connector_parts import PATIENCE_S
from fake_values import FakeValues
from hypothesis import given
from hypothesis import strategies as st

from connector.limits import LOOKUP_ENTRIES_MAX, LOOKUP_PRODUCERS_MAX
from connector.transfer import posting_lists, tensor_messages
from connector.transfer.lookup_buffer import LookupBuffer
from kvstore import Client, DeadlineError, UsageError

if TYPE_CHECKING:
    from stores import NodeProcess

torch = pytest.importorskip("torch")

SOON_S = 0.05


def pair(store: Any = None, **options: Any) -> tuple[LookupBuffer, LookupBuffer]:
    store = store or FakeValues()
    options = {"timeout_s": PATIENCE_S, **options}
    return (
        LookupBuffer(store, "b", producer=True, **options),
        LookupBuffer(store, "b", producer=False, **options),
    )


def tokens(*ids: int) -> Any:
    return torch.tensor(ids, dtype=torch.int64)


def mask(text: str) -> Any:
    return torch.tensor([c == "x" for c in text])


def insert(buffer: LookupBuffer, *ids: int, roi: Any = None, **options: Any) -> None:
    buffer.insert(tokens(*ids), roi, torch.full((2, 2), ids[0]), None, None, **options)


def taken(buffer: LookupBuffer, *ids: int, roi: Any = None, timeout_s: float = 0.0) -> int | None:
    """The first token of the entry that a query takes."""
    entry = buffer.drop_select(tokens(*ids) if ids else None, roi, timeout_s)
    return None if entry is None else int(entry.key[0, 0])


def test_entry_comes_back_as_it_was_inserted() -> None:
    producer, consumer = pair()
    sent = (
        tokens(1, 2, 3),
        mask("xx."),
        torch.randn(2, 3).bfloat16(),
        torch.arange(6).to(torch.float8_e4m3fn),
        torch.randn(3, 4),
    )
    producer.insert(*sent)
    got = consumer.drop_select(tokens(1, 2, 9), mask("xx."))
    assert got is not None
    for one, other in zip(got, sent, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_what_was_none_comes_back_as_none() -> None:
    producer, consumer = pair()
    producer.insert(tokens(1), None, None, None, None)
    got = consumer.drop_select()
    assert got is not None
    assert torch.equal(got.tokens, tokens(1))
    assert got[1:] == (None, None, None, None)


def test_entry_is_taken_once() -> None:
    producer, consumer = pair()
    insert(producer, 1, 2)
    assert taken(consumer, 1, 2) == 1
    assert taken(consumer, 1, 2) is None
    assert taken(consumer) is None


def test_no_tokens_take_the_oldest_entry() -> None:
    producer, consumer = pair()
    for first in (5, 6, 7):
        insert(producer, first)
    assert [taken(consumer) for _ in range(4)] == [5, 6, 7, None]


def test_oldest_of_those_that_match_is_taken_and_the_others_stay() -> None:
    producer, consumer = pair()
    for ids in ((5, 1), (6, 1), (6, 2)):
        insert(producer, *ids)
    assert taken(consumer, 6, 2) == 6
    assert taken(consumer, 6) == 6
    assert taken(consumer, 6) is None
    assert taken(consumer, 5) == 5


@given(
    st.lists(st.integers(0, 2), max_size=4),
    st.lists(st.integers(0, 2), max_size=4),
    st.data(),
)
def test_selected_tokens_match_when_the_longer_begins_with_the_shorter(
    inserted: list[int], asked: list[int], data: Any
) -> None:
    def masked(ids: list[int]) -> tuple[Any, Any, list[int]]:
        kept = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
        roi = torch.tensor(kept, dtype=torch.bool)
        return tokens(*ids), roi, [i for i, k in zip(ids, kept, strict=True) if k]

    producer, consumer = pair()
    one, one_roi, one_ids = masked(inserted)
    other, other_roi, other_ids = masked(asked)
    producer.insert(one, one_roi, None, None, None)
    matches = shared(one_ids, other_ids)
    assert (consumer.drop_select(other, other_roi, timeout_s=0) is not None) == matches


def test_query_waits_for_an_entry_that_comes_in_time() -> None:
    producer, consumer = pair()
    insert(producer, 8)
    timer = threading.Timer(SOON_S, insert, (producer, 9))
    timer.start()
    assert taken(consumer, 9, timeout_s=PATIENCE_S) == 9
    timer.join()


def test_query_without_a_match_is_a_miss_at_its_deadline() -> None:
    producer, consumer = pair()
    insert(producer, 8)
    started = time.monotonic()
    assert taken(consumer, 9, timeout_s=SOON_S) is None
    assert SOON_S <= time.monotonic() - started < PATIENCE_S


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


def shared(one: list[int], other: list[int]) -> bool:
    """vLLM's rule."""
    shorter = min(len(one), len(other))
    return shorter > 0 and one[:shorter] == other[:shorter]


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


def test_tensor_is_one_value_that_is_read_into_its_place() -> None:
    places: list[Any] = []

    class Store(FakeValues):
        def get_many(self, keys: Any, out: Any = None) -> Any:
            places.extend([] if out is None else out)
            return super().get_many(keys, out)

    producer, consumer = pair(Store())
    kv = torch.arange(5 << 20, dtype=torch.uint8)
    producer.insert(tokens(1), None, kv, None, None)
    got = consumer.drop_select(tokens(1))
    assert got is not None
    assert [place.data_ptr() for place in places] == [got.tokens.data_ptr(), got.key.data_ptr()]
    assert torch.equal(got.key, kv)


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


def several(count: int, store: Any) -> tuple[list[LookupBuffer], LookupBuffer]:
    producers = [LookupBuffer(store, "b", producer=True, number=i) for i in range(count)]
    return producers, LookupBuffer(store, "b", producer=False, producers=count)


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


def consumers_of(count: int, store: Any) -> list[LookupBuffer]:
    return [LookupBuffer(store, "b", producer=False) for _ in range(count)]


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

    threads = [threading.Thread(target=take, args=(one,)) for one in consumers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
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


def test_each_side_has_its_own_calls() -> None:
    producer, consumer = pair()
    with pytest.raises(UsageError, match="only the producer"):
        insert(consumer, 1)
    with pytest.raises(UsageError, match="only the consumer"):
        producer.drop_select()


@pytest.mark.parametrize(
    ("ids", "roi", "field"),
    [
        (None, None, "tokens"),
        (None, "mask", "roi"),
        ([1, 2], None, "tokens"),
        ("floats", None, "tokens"),
        ("two-dimensional", None, "tokens"),
        ("ids", "short", "roi"),
        ("ids", "numbers", "roi"),
    ],
)
def test_tokens_and_masks_that_do_not_fit_are_refused(ids: Any, roi: Any, field: str) -> None:
    made = {
        "ids": tokens(1, 2),
        "floats": torch.zeros(2),
        "two-dimensional": torch.zeros(2, 2, dtype=torch.int64),
        "mask": mask("xx"),
        "short": mask("x"),
        "numbers": torch.tensor([1, 1]),
    }
    ids, roi = (made[v] if isinstance(v, str) else v for v in (ids, roi))
    with pytest.raises(UsageError) as caught:
        pair()[0].insert(ids, roi, None, None, None)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("", {}, "name"),
        ("b", {"entries_max": 0}, "entries_max"),
        ("b", {"entries_max": LOOKUP_ENTRIES_MAX + 1}, "entries_max"),
        ("b", {"bytes_max": -1}, "bytes_max"),
        ("b", {"number": LOOKUP_PRODUCERS_MAX}, "number"),
        ("b", {"number": -1}, "number"),
        ("b", {"producers": 0}, "producers"),
        ("b", {"producers": LOOKUP_PRODUCERS_MAX + 1}, "producers"),
    ],
)
def test_settings_out_of_range_are_refused(name: str, options: Any, field: str) -> None:
    with pytest.raises(UsageError) as caught:
        LookupBuffer(FakeValues(), name, producer=True, **options)
    assert caught.value.field == field


PRODUCER = """
import sys, pathlib, torch
from connector.transfer import posting_lists, tensor_messages
from connector.transfer.lookup_buffer import LookupBuffer
from kvstore import Client, Limits
url, run_dir, prefix = sys.argv[1:4]
patient = Limits(redis_timeout_s=5.0, request_timeout_s=10.0)
with Client(url, run_dir=pathlib.Path(run_dir), key_prefix=prefix, limits=patient) as client:
    buffer = LookupBuffer(client, "prefill", producer=True, timeout_s=60, entries_max=2)
    for first in range(5):
        ids = torch.tensor([first, 7, 8])
        kv = torch.full((2, 3, 1 << 18), first, dtype=torch.bfloat16)
        buffer.insert(ids, torch.ones(3, dtype=torch.bool), kv, -kv, None)
    buffer.close(60)
"""


def test_prefill_process_hands_kv_to_a_decode_process(node: NodeProcess, client: Client) -> None:
    options = [node.redis.url, str(node.run_dir), node.key_prefix]
    process = subprocess.Popen([sys.executable, "-c", PRODUCER, *options])
    buffer = LookupBuffer(client, "prefill", producer=False, timeout_s=60)
    try:
        for first in (1, 0, 2, 3, 4):
            entry = buffer.drop_select(tokens(first, 7, 8, 9), mask("xxx."))
            assert entry is not None
            assert torch.equal(entry.tokens, tokens(first, 7, 8))
            assert entry.key.shape == (2, 3, 1 << 18)
            assert bool((entry.key == first).all())
            assert bool((entry.value == -first).all())
            assert entry.hidden is None
        assert process.wait(60) == 0
        assert buffer.drop_select(timeout_s=0) is None
        buffer.close()
    finally:
        process.kill()
        process.wait(10)
    assert client.stats()["node"]["pinned"] == 0
