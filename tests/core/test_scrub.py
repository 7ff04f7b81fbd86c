"""What the index lost without saying so is found and published again."""

import pytest

from kvstore.core.events import Drop, Reserve
from kvstore.core.node import NodeCore
from kvstore.core.scrub import Scrub
from kvstore.keys import Namespace
from kvstore.record import pack_record, unpack_record

KEYS = Namespace.named("test").block_keys(range(10), 1)


@pytest.fixture
def core():
    core = NodeCore(node_id=5, epoch=9, size_bytes=64 << 10)
    put(core, KEYS)
    core.blocks.outbox.published(core.blocks.outbox.take_publications(100))
    return core


def put(core, keys):
    n = len(keys)
    core.handle(Reserve(1, 1, keys, [5] * n, 3, [0] * n, [0] * n, [b"value"] * n, [0] * n), 0.0)


def test_it_goes_round_over_all_keys_and_begins_again(core):
    scrub = Scrub(core)
    first = [*scrub.next(4), *scrub.next(4), *scrub.next(4)]
    assert sorted(first) == sorted(KEYS)
    assert sorted(scrub.next(100)) == sorted(KEYS)


@pytest.mark.parametrize(
    "held",
    [
        lambda key, record: None,
        lambda key, record: b"damaged",
        lambda key, record: pack_record(key, unpack_record(key, record)._replace(epoch=8)),
        lambda key, record: pack_record(key, unpack_record(key, record)._replace(generation=7)),
    ],
    ids=["lost", "damaged", "of a former start", "of a former block"],
)
def test_a_block_whose_record_is_lost_or_wrong_is_published_again(core, held):
    record = core.blocks.by_key[KEYS[0]].record
    scrub = Scrub(core)
    assert scrub.found(KEYS[:1], [held(KEYS[0], record)], [None]) == 1
    assert core.blocks.outbox.take_publications(10) == [(KEYS[0], record)]


@pytest.mark.parametrize(
    ("changes", "lives", "lost"),
    [({}, True, 0), ({}, False, 1), ({"segment": 1}, True, 1)],
    ids=["it lives", "it does not", "its disk"],
)
def test_a_right_record_stays_and_so_does_one_of_memory_of_another_node_that_lives(
    core, changes, lives, lost
):
    """With its disk: both asked at once, and the one with the disk told the index last."""
    record = core.blocks.by_key[KEYS[0]].record
    own = unpack_record(KEYS[1], core.blocks.by_key[KEYS[1]].record)
    other = own._replace(node_id=6, **changes)
    records, elsewhere = [record, pack_record(KEYS[1], other)], [None, other if lives else None]
    assert Scrub(core).found(KEYS[:2], records, elsewhere) == lost
    assert core.blocks.outbox.publications_pending == lost


def test_a_block_that_left_while_the_index_was_asked_stays_away(core):
    scrub = Scrub(core)
    keys = scrub.next(10)
    core.handle(Drop(1, 1, keys[:1]), 0.0)
    assert scrub.found(keys, [None] * len(keys), [None] * len(keys)) == len(keys) - 1


def test_it_waits_while_there_is_something_to_publish(core):
    scrub = Scrub(core)
    put(core, Namespace.named("other").block_keys(range(1), 1))
    assert scrub.next(10) == []


def test_what_is_being_written_is_not_lost_and_what_is_repaired_is_counted(core):
    core.handle(Reserve(1, 1, [b"w" * 32], [5], 3, [0], [0], [None], [0]), 0.0)
    scrub = Scrub(core)
    assert scrub.found([b"w" * 32, *KEYS[:2]], [None] * 3, [None] * 3) == 2
    assert core.blocks.counts["repaired"] == 2


def test_there_is_an_answer_for_each_key_or_none_is_believed(core):
    for records, elsewhere in ([None], [None, None]), ([None, None], [None]):
        with pytest.raises(ValueError):
            Scrub(core).found(KEYS[:2], records, elsewhere)
