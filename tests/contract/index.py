"""What every index must do. One suite; tests/index/test_contract.py runs it on each of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from each_input import each
from threads_at_once import at_once

from kvstore.errors import UsageError
from kvstore.index.base import ANNOUNCEMENT_BYTES_MAX, Index, KeyRecord
from kvstore.keys import Namespace
from kvstore.limits import BATCH_KEYS_MAX, REDIS_ARGS_MAX


class Subject(NamedTuple):
    index: Index
    lose_everything: Callable[[], None]


def prefix_keys(count: int) -> list[bytes]:
    """Keys of one prompt's blocks: runs of 64 that share a tag."""
    tokens = list(os.urandom(1)) + list(range(count))
    return Namespace({"salt": os.urandom(8).hex()}).block_keys(tokens, 1)[:count]


def records_of(keys: list[bytes]) -> list[KeyRecord]:
    return [KeyRecord(key, os.urandom(44)) for key in keys]


def every_call(index: Index, records: Sequence[KeyRecord]) -> dict[str, Callable[[], object]]:
    """All that an index can be asked and told, by name."""
    keys = [key for key, _ in records]
    return {
        "match": lambda: index.match(keys),
        "lookup": lambda: index.lookup(keys),
        "node": lambda: index.node(1),
        "nodes": index.nodes,
        "ping": index.ping,
        "publish": lambda: index.publish(records),
        "remove": lambda: index.remove(records),
        "announce": lambda: index.announce(1, b"", 1),
        "renew": lambda: index.renew(1, 1),
        "withdraw": lambda: index.withdraw(1),
        "scan": lambda: index.scan((0, 0)),
        "incarnation": index.incarnation,
    }


def scanned(index: Index) -> dict[bytes, bytes]:
    """Return the records of a whole scan."""
    found: dict[bytes, bytes] = {}
    place, rounds = (0, 0), 0
    while rounds == 0 or place != (0, 0):
        place, some = index.scan(place)
        found.update(some)
        rounds += 1
        assert rounds < 100
    return found


class IndexContract:
    """Subclasses give a fixture `subject`."""

    @pytest.fixture
    def index(self, subject: Subject) -> Index:
        return subject.index

    def test_is_an_index(self, index: Index) -> None:
        assert isinstance(index, Index)

    def test_unknown_keys_are_misses(self, index: Index) -> None:
        keys = prefix_keys(3)
        assert index.match(keys) == []
        assert index.lookup(keys) == [None, None, None]

    def test_published_records_come_back_in_order(self, index: Index) -> None:
        records = records_of(prefix_keys(200))
        index.publish(records)
        keys = [key for key, _ in records]
        assert index.match(keys) == [record for _, record in records]
        assert index.lookup(keys[::-1]) == [record for _, record in records[::-1]]

    def test_match_ends_at_the_first_missing_key_and_lookup_does_not(self, index: Index) -> None:
        records = records_of(prefix_keys(10))
        index.publish(records[:4] + records[5:])
        keys = [key for key, _ in records]
        assert index.match(keys) == [record for _, record in records[:4]]
        assert index.lookup(keys)[3:6] == [records[3].record, None, records[5].record]

    def test_publish_replaces(self, index: Index) -> None:
        (key,) = prefix_keys(1)
        index.publish([KeyRecord(key, b"old")])
        index.publish([KeyRecord(key, b"new"), KeyRecord(key, b"newer")])
        assert index.lookup([key]) == [b"newer"]

    @each("record", [b"", b"\r\n$-1\r\n", b"\x00" * 44, bytes(range(44))])
    def test_a_record_is_any_bytes(self, index: Index, record: bytes) -> None:
        (key,) = prefix_keys(1)
        index.publish([KeyRecord(key, record)])
        assert index.match([key]) == [record]

    def test_keys_of_any_tag_are_found(self, index: Index) -> None:
        namespace = Namespace.named(os.urandom(4).hex())
        records = records_of([namespace.value_key(f"value {i}") for i in range(50)])
        index.publish(records)
        assert index.match([key for key, _ in records]) == [record for _, record in records]

    def test_keys_that_differ_in_the_tag_only_are_two(self, index: Index) -> None:
        one = os.urandom(32)
        other = os.urandom(8) + one[8:]
        index.publish([KeyRecord(one, b"one")])
        assert index.lookup([other, one]) == [None, b"one"]

    def test_remove_drops_a_key_only_while_it_holds_that_record(self, index: Index) -> None:
        records = records_of(prefix_keys(4))
        index.publish(records)
        stale = [records[0], KeyRecord(records[1].key, b"older"), records[2]]
        assert index.remove(stale) == 2
        held = index.lookup([key for key, _ in records])
        assert held == [None, records[1].record, None, records[3].record]

    def test_remove_counts_a_key_once(self, index: Index) -> None:
        (record,) = records_of(prefix_keys(1))
        index.publish([record])
        assert index.remove([KeyRecord(record.key, b"x"), record, record]) == 1
        assert index.remove([record]) == 0

    def test_empty_batches_do_nothing(self, index: Index) -> None:
        index.publish([])
        assert index.match([]) == []
        assert index.lookup([]) == []
        assert index.remove([]) == 0

    def test_a_full_batch_is_one_call(self, index: Index) -> None:
        assert BATCH_KEYS_MAX > REDIS_ARGS_MAX
        records = records_of(prefix_keys(BATCH_KEYS_MAX))
        keys = [key for key, _ in records]
        index.publish(records)
        assert index.match(keys) == [record for _, record in records]
        hole = REDIS_ARGS_MAX + 500
        assert index.remove(records[hole : hole + 1]) == 1
        assert index.match(keys) == [record for _, record in records[:hole]]
        assert index.remove(records) == BATCH_KEYS_MAX - 1

    def test_a_longer_batch_is_refused_by_name(self, index: Index) -> None:
        keys = [bytes(32)] * (BATCH_KEYS_MAX + 1)
        records = [KeyRecord(key, b"") for key in keys]
        for call, argument in (
            (index.match, keys),
            (index.lookup, keys),
            (index.publish, records),
            (index.remove, records),
        ):
            with pytest.raises(UsageError, match=f"(keys|records)=.*at most {BATCH_KEYS_MAX}"):
                call(argument)

    @each("key", [b"", b"k" * 31, b"k" * 33, "k" * 32, 7, None])
    def test_what_is_no_key_is_refused_and_nothing_is_changed(
        self, index: Index, key: object
    ) -> None:
        good = os.urandom(32)
        for call in (index.match, index.lookup):
            with pytest.raises(UsageError, match="keys="):
                call([good, key])
        with pytest.raises(UsageError, match="key="):
            index.publish([KeyRecord(good, b"r"), KeyRecord(key, b"r")])
        assert index.lookup([good]) == [None]

    @each("record", [b"r" * 61, "text", None])
    def test_what_is_no_record_is_refused(self, index: Index, record: object) -> None:
        for call in (index.publish, index.remove):
            with pytest.raises(UsageError, match="record="):
                call([KeyRecord(bytes(32), record)])

    def test_an_announcement_is_found_until_it_is_withdrawn(self, index: Index) -> None:
        one, other = 7, (1 << 64) - 1
        index.announce(one, b"first", 60)
        index.announce(one, b"\x00second\r\n", 60)
        index.announce(other, b"", 60)
        assert index.node(one) == b"\x00second\r\n"
        assert index.nodes() == {one: b"\x00second\r\n", other: b""}
        index.withdraw(one)
        index.withdraw(one)
        assert index.node(one) is None
        assert index.nodes() == {other: b""}

    def test_an_announcement_vanishes_after_its_time(self, index: Index) -> None:
        index.announce(1, b"here", 0.05)
        deadline = time.monotonic() + 5
        while index.node(1) is not None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert index.nodes() == {}

    def test_a_renewed_announcement_stays_as_it_is_and_another_is_not_made(
        self, index: Index
    ) -> None:
        index.announce(1, b"here", 0.2)
        assert index.renew(1, 60)
        time.sleep(0.25)
        assert index.node(1) == b"here"
        assert not index.renew(2, 60)
        assert index.nodes() == {1: b"here"}
        assert index.renew(1, 0.05)
        deadline = time.monotonic() + 5
        while index.renew(1, 0.05):
            assert time.monotonic() < deadline
            time.sleep(0.06)
        for ttl_s in (0, -1, float("nan"), float("inf")):
            with pytest.raises(UsageError, match="ttl_s="):
                index.renew(1, ttl_s)

    def test_a_scan_lists_every_record_and_nothing_else(self, index: Index) -> None:
        namespace = Namespace.named(os.urandom(4).hex())
        records = records_of(prefix_keys(150))
        records += records_of([namespace.value_key(f"value {i}") for i in range(2500)])
        assert scanned(index) == {}
        index.publish(records)
        index.announce(1, b"here", 60)
        index.incarnation()
        assert scanned(index) == dict(records)
        index.remove(records[:5])
        assert scanned(index) == dict(records[5:])

    def test_nodes_finds_each_of_many_among_blocks(self, index: Index) -> None:
        index.publish(records_of(prefix_keys(300)))
        for node_id in range(30):
            index.announce(node_id, b"%d" % node_id, 60)
        assert index.nodes() == {i: b"%d" % i for i in range(30)}

    def test_announcements_have_limits(self, index: Index) -> None:
        index.announce(1, bytes(ANNOUNCEMENT_BYTES_MAX), 60)
        with pytest.raises(UsageError, match="announcement="):
            index.announce(1, bytes(ANNOUNCEMENT_BYTES_MAX + 1), 60)
        for ttl_s in (0, -1, float("nan"), float("inf")):
            with pytest.raises(UsageError, match="ttl_s="):
                index.announce(1, b"", ttl_s)
        for node_id in (-1, 1 << 64):
            with pytest.raises(UsageError, match="node_id="):
                index.node(node_id)

    def test_ping_answers(self, index: Index) -> None:
        assert index.ping() is None

    def test_the_incarnation_changes_exactly_when_keys_were_lost(self, subject: Subject) -> None:
        index = subject.index
        before = index.incarnation()
        index.publish(records_of(prefix_keys(3)))
        assert index.incarnation() == before
        subject.lose_everything()
        after = index.incarnation()
        assert after != before
        assert index.incarnation() == after

    def test_threads_get_their_own_answers(self, index: Index) -> None:
        wrong: list[object] = []

        def work() -> None:
            try:
                for size in (1, 70, 3, 130):
                    records = records_of(prefix_keys(size))
                    index.publish(records)
                    found = index.match([key for key, _ in records])
                    if found != [record for _, record in records]:
                        wrong.append(found)
                    if index.remove(records) != size:
                        wrong.append("remove")
            except Exception as e:
                wrong.append(e)

        at_once([work] * 12)
        assert wrong == []

    def test_close_may_be_called_twice(self, index: Index) -> None:
        index.close()
        index.close()
