"""What a reader remembers of places, and what it says of a block whose bytes it checks."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import xxhash
from reader_parts import (
    AWAY,
    HERE,
    KEY,
    VALUE,
    Counting,
    Nodes,
    ReaderOf,
    found_by,
    key_of,
    nobody,
    save,
)
from segment_bytes import data_of

from kvstore.client import reader as reader_module
from kvstore.client.health import IndexWatch
from kvstore.client.nodes.fetch import RemoteBlock
from kvstore.client.reader import Place
from kvstore.core.events import Mark
from kvstore.errors import IndexDeadlineError, IndexUnavailableError
from kvstore.index.base import KeyRecord
from kvstore.index.memory import MemoryIndex
from kvstore.record import pack_record
from kvstore.segment.shm import OwnedShm
from kvstore.types import Key

RIGHT = xxhash.xxh3_64_intdigest(VALUE)


# --- what is remembered -----------------------------------------------------


def test_a_place_is_used_again_without_looking_only_where_that_is_asked_for(
    owned: OwnedShm, reader_of: ReaderOf
) -> None:
    reader = reader_of(MemoryIndex())
    save(owned)
    place = found_by(reader)
    assert found_by(reader, remembered=True) is place
    assert found_by(reader) is not place
    owned.apply(Mark(3, 0, 1))
    assert not found_by(reader, remembered=True).valid()
    assert reader.search([KEY]) == [None]


def test_a_block_on_another_host_is_used_again_while_its_node_can_be_reached(
    reader_of: ReaderOf,
) -> None:
    index, remote = Counting(), nobody(node=lambda *_: None)
    reader = reader_of(index, remote)
    reader.seen_remote(KEY, AWAY)
    assert reader.search([KEY]) == [None]
    assert index.asked == [[KEY]]
    reader = reader_of(index)
    reader.seen_remote(KEY, AWAY)
    assert reader.search([KEY]) == [RemoteBlock(KEY, AWAY, remembered=True)]
    assert index.asked == [[KEY]]


def test_what_was_forgotten_is_looked_for_anew(owned: OwnedShm, reader_of: ReaderOf) -> None:
    reader = reader_of(MemoryIndex())
    save(owned)
    for forget in (lambda: reader.forget(KEY), reader.close):
        place = found_by(reader)
        reader.seen_remote(key_of(2), AWAY)
        reader.seen_remote(KEY, AWAY)
        forget()
        assert found_by(reader, remembered=True) is not place
        assert not reader.forget_remote([KEY])
    assert not reader.forget_remote([key_of(2)])  # `close` forgets all


def test_only_blocks_of_other_hosts_that_were_asked_for_are_forgotten(reader_of: ReaderOf) -> None:
    reader = reader_of(MemoryIndex())
    for number in (1, 2, 3):
        reader.seen_remote(key_of(number), AWAY)
    assert not reader.forget_remote([])
    assert not reader.forget_remote([KEY])
    assert reader.forget_remote([KEY, key_of(1)])
    assert not reader.forget_remote([key_of(1)])
    assert reader.forget_remote([key_of(2), key_of(3)])


def test_the_oldest_place_goes_when_as_many_are_kept_as_may_be(
    owned: OwnedShm, reader_of: ReaderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "PLACES_KEPT_MAX", 2)
    reader = reader_of(MemoryIndex())
    keys = [key_of(number) for number in (1, 2, 3)]
    for slot_id, key in enumerate(keys, 1):
        save(owned, key=key, slot_id=slot_id)
    for shown, kept in ((1, 1), (2, 2), (3, 2)):
        found_by(reader, keys[shown - 1])
        reader.seen_remote(keys[shown - 1], AWAY)
        assert list(reader.remembered) == keys[shown - kept : shown]
    assert [reader.forget_remote([key]) for key in keys] == [False, True, True]


def test_places_of_a_dead_node_are_let_go_and_no_others(
    owned: OwnedShm, nodes: Nodes, reader_of: ReaderOf
) -> None:
    """Each keeps a segment mapped."""
    reader = reader_of(MemoryIndex())
    save(owned)
    there = found_by(reader)
    reader.let_go()
    nodes.gone = 1  # another one
    reader.let_go()
    assert found_by(reader, remembered=True) is there
    nodes.attached.gone = True
    nodes.gone = 2
    reader.let_go()
    assert reader.remembered == {}


def test_the_first_node_that_dies_is_noticed(
    owned: OwnedShm, nodes: Nodes, reader_of: ReaderOf
) -> None:
    reader = reader_of(MemoryIndex())
    save(owned)
    found_by(reader)
    nodes.attached.gone, nodes.gone = True, 1
    reader.let_go()
    assert reader.remembered == {}


def test_a_place_in_a_segment_that_goes_while_it_is_found_is_not_remembered(
    owned: OwnedShm, nodes: Nodes, reader_of: ReaderOf
) -> None:
    reader = reader_of(MemoryIndex())
    save(owned)
    nodes.attached.gone = True
    assert not found_by(reader).valid()
    assert reader.remembered == {}


# --- what a place is --------------------------------------------------------


@pytest.mark.parametrize("meta_length", [0, 40, 1000])
def test_a_place_is_the_value_and_its_description_read_only_with_its_pages_mapped(
    owned: OwnedShm, nodes: Nodes, reader_of: ReaderOf, meta_length: int
) -> None:
    asked: list[tuple[int, int]] = []
    nodes.attached.shm.populate = lambda *part: asked.append(part) or True  # type: ignore[method-assign]
    save(owned, granule=1, meta_length=meta_length)
    place = found_by(reader_of(MemoryIndex()))
    offset = 3 * 4096 + 1024
    payload = nodes.attached.shm.payload[offset : offset + 1000]
    assert place.buffer == payload
    assert place.buffer.readonly
    assert place.size_bytes == 1000 - meta_length
    assert (place.data, place.meta) == (payload[: 1000 - meta_length], payload[place.size_bytes :])
    assert asked == [(offset, 1000)]


class Suspected:
    """A reporter, and what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, object, Key]] = []

    def report(self, directory: object, announcement: object, key: Key) -> None:
        self.told.append((directory, announcement, key))


@pytest.mark.parametrize("meta_length", [0, 40])
def test_a_checksum_is_that_of_value_and_description_as_they_lie_or_were_copied(
    owned: OwnedShm, reader_of: ReaderOf, meta_length: int
) -> None:
    save(owned, checksum=RIGHT, meta_length=meta_length)
    reader = reader_of(MemoryIndex())
    place = found_by(reader)
    copied = bytes(place.data)
    assert reader.verified(KEY, place)
    assert reader.verified(KEY, place, copied)
    assert reader.verified(KEY, place, memoryview(copied))
    assert KEY in reader.remembered
    assert reader.miss_reasons == {}
    wrong = b"x" + copied[1:]
    assert not place.verified(wrong)
    data_of(owned)[3 * 4096] ^= 1
    assert not place.verified()
    assert place.verified(copied)
    if meta_length:
        data_of(owned)[3 * 4096] ^= 1
        data_of(owned)[3 * 4096 + 999] ^= 1
        assert not place.verified(copied)


def test_damage_is_a_miss_that_is_counted_and_its_node_is_told(
    owned: OwnedShm, nodes: Nodes, reader_of: ReaderOf, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = Suspected()
    save(owned, checksum=RIGHT ^ 1)
    for options in ({"reporter": reporter}, {}):
        reader = reader_of(MemoryIndex(), **options)
        with caplog.at_level(logging.WARNING, "kvstore.client"):
            assert not reader.verified(KEY, found_by(reader))
        assert "damaged" in caplog.text
        assert reader.miss_reasons == {"corrupt": 1}
        assert reader.remembered == {}
    attached = nodes.attached
    assert reporter.told == [(attached.directory, attached.announcement, KEY)]


@pytest.mark.parametrize("checksum", [0, RIGHT ^ 1], ids=["none was saved", "another block"])
def test_what_cannot_be_judged_is_a_miss_and_no_damage(
    owned: OwnedShm, reader_of: ReaderOf, checksum: int
) -> None:
    reporter = Suspected()
    save(owned, checksum=checksum)
    reader = reader_of(MemoryIndex(), reporter=reporter)
    place = found_by(reader)
    if checksum:
        owned.apply(Mark(3, 0, 1))
    assert not reader.verified(KEY, place)
    assert reader.miss_reasons == {"load-failed": 1}
    assert reader.remembered == {}
    assert reporter.told == []


# --- an index that fails ----------------------------------------------------


class Watch(IndexWatch):
    def __init__(self) -> None:
        super().__init__(MemoryIndex())
        self.told: list[IndexUnavailableError] = []

    def failed(self, error: IndexUnavailableError) -> None:
        self.told.append(error)


def test_failures_of_the_index_are_counted_and_said_and_misses_where_they_were(
    reader_of: ReaderOf,
) -> None:
    watch = Watch()
    reader = reader_of(MemoryIndex(), watch=watch)
    assert reader.index_failures == 0
    errors = [IndexUnavailableError("away"), IndexDeadlineError("late"), IndexDeadlineError("late")]
    reader.index_failed(errors[0], missed=False)
    assert reader.miss_reasons == {}
    for error in errors[1:]:
        reader.index_failed(error)
    assert reader.index_failures == 3
    assert reader.miss_reasons == {"deadline": 2}
    assert watch.told == errors


def test_without_a_watch_of_its_own_a_reader_warns_of_its_index(
    reader_of: ReaderOf, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvstore.client"):
        reader_of(MemoryIndex()).index_failed(IndexUnavailableError("away"))
    assert "the index cannot be asked" in caplog.text


@pytest.mark.parametrize("lies_in_an_unmapped_one", [True, False])
def test_an_index_that_fails_leaves_what_was_found_and_what_lies_on_this_host(
    owned: OwnedShm,
    nodes: Nodes,
    reader_of: ReaderOf,
    lies_in_an_unmapped_one: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader_module, "BATCH_KEYS_MAX", 1)
    index = Counting(answers=1)
    index.publish([KeyRecord(key_of(1), pack_record(key_of(1), AWAY))])
    save(owned)
    nodes.mapped, unmapped = (), nodes.mapped
    if lies_in_an_unmapped_one:
        nodes.unmapped = unmapped
    reader = reader_of(index)
    first, second, third = reader.search([key_of(1), KEY, key_of(2)])
    assert first == RemoteBlock(key_of(1), AWAY)
    assert isinstance(second, Place) is lies_in_an_unmapped_one
    assert third is None
    assert reader.index_failures == 1
    assert reader.miss_reasons == {"index-error": 1}


def test_of_an_index_that_answers_no_other_segments_are_asked(
    owned: OwnedShm, nodes: Nodes, reader_of: ReaderOf
) -> None:
    nodes.unmapped = (nodes.attached,)
    reader = reader_of(MemoryIndex())
    assert reader.search([key_of(1), key_of(2)]) == [None, None]
    assert nodes.unmapped
    assert reader.index_failures == 0


def damaged(record: bytes) -> bytes:
    return bytes([record[0] ^ 1]) + record[1:]


def test_each_key_has_its_own_answer(owned: OwnedShm, nodes: Nodes, reader_of: ReaderOf) -> None:
    """An absent first key hides no later one, and a record without a place is a miss."""
    index = MemoryIndex()
    records: dict[Key, Any] = {
        key_of(2): pack_record(key_of(2), AWAY),
        key_of(3): damaged(pack_record(key_of(3), AWAY)),
        key_of(4): pack_record(key_of(4), HERE),  # that slot has no such block
    }
    index.publish([KeyRecord(key, record) for key, record in records.items()])
    reader = reader_of(index)
    away = RemoteBlock(key_of(2), AWAY)
    keys = [key_of(number) for number in (1, 2, 3, 4)]
    assert reader.search(keys) == [None, away, None, None]
    assert reader.search(keys[:2]) == [None, away]
    assert reader.search(keys[:1]) == [None]
    assert reader.search(keys[1:2]) == [away]
    assert reader.search([]) == []
    assert reader.search(keys).remote == {1: AWAY}
    assert nodes.checks == 6
