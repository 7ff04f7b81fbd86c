"""LookupBuffer: KV inserted on one side is found by its tokens on the other, once."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from connector_parts import PATIENCE_S
from each_input import each
from fake_values import FakeValues
from hypothesis import given
from hypothesis import strategies as st
from lookup_ends import SOON_S, insert, mask, pair, shared, taken, tokens
from stores import node_stats

from connector.limits import LOOKUP_ENTRIES_MAX, LOOKUP_PRODUCERS_MAX
from connector.transfer.lookup_buffer import LookupBuffer
from kvstore import Client, UsageError

if TYPE_CHECKING:
    from stores import NodeProcess

torch = pytest.importorskip("torch")


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


def test_tensor_is_one_value_that_is_read_into_its_place() -> None:
    places: list[Any] = []

    class Store(FakeValues):
        def get_many(self, keys: Any, *, out: Any = None) -> Any:
            places.extend([] if out is None else out)
            return super().get_many(keys, out=out)

    producer, consumer = pair(Store())
    kv = torch.arange(5 << 20, dtype=torch.uint8)
    producer.insert(tokens(1), None, kv, None, None)
    got = consumer.drop_select(tokens(1))
    assert got is not None
    assert [place.data_ptr() for place in places] == [got.tokens.data_ptr(), got.key.data_ptr()]
    assert torch.equal(got.key, kv)


def test_each_side_has_its_own_calls() -> None:
    producer, consumer = pair()
    with pytest.raises(UsageError, match="only the producer"):
        insert(consumer, 1)
    with pytest.raises(UsageError, match="only the consumer"):
        producer.drop_select()


@each(
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


@each(
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
    assert node_stats(client)["pinned"] == 0
