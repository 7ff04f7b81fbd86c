"""What the index has forgotten in silence is published again, and nothing else."""

import pytest

from kvstore.core.events import Drop, Reserve
from kvstore.core.node import NodeCore
from kvstore.core.record import pack_record, unpack_record
from kvstore.core.slots import SlotState
from kvstore.hashing import Namespace

KEYS = Namespace.named("audit").block_keys(range(40), 1)
NODE_ID, EPOCH, OTHER = 7, 3, 8


@pytest.fixture
def core():
    core = NodeCore(node_id=NODE_ID, epoch=EPOCH, arenas=4, arena_bytes=64 << 10)
    put(core, KEYS)
    core.outbox.published(core.outbox.take_publications(100))
    return core


def put(core, keys):
    count = len(keys)
    none = [0] * count
    core.handle(Reserve(1, 1, keys, [1] * count, 0, none, none, [b"v"] * count, none), 0.0)


def records(slots):
    return [slot.record for slot in slots]


def of_node(slot, node_id, epoch):
    location = unpack_record(slot.key, slot.record)
    return pack_record(slot.key, location._replace(node_id=node_id, epoch=epoch))


def test_a_round_takes_each_block_once(core):
    keys = [slot.key for _ in range(12) for slot in core.audit.take(7)]
    assert set(keys) == set(KEYS)
    first_round = keys[: len(KEYS)]
    assert len(set(first_round)) == len(KEYS)


def test_one_take_never_has_a_block_twice(core):
    for _ in range(5):
        slots = core.audit.take(1000)
        assert len({slot.key for slot in slots}) == len(slots)


def test_blocks_that_are_gone_or_not_published_yet_are_left_out(core):
    core.handle(Drop(1, 2, KEYS[:5]), 0.0)
    core.republish()
    assert not [slot for _ in range(8) for slot in core.audit.take(100)]
    core.outbox.published(core.outbox.take_publications(100))
    taken = {slot.key for _ in range(8) for slot in core.audit.take(100)}
    assert taken == set(KEYS[5:])


def test_what_the_index_has_is_left_alone(core):
    slots = core.audit.take(100)
    assert core.audit.compare(slots, records(slots), {}) == 0
    assert core.outbox.publications_pending == 0


def test_what_it_lacks_or_has_wrong_is_published_again(core):
    slots = core.audit.take(100)[:4]
    old = of_node(slots[1], NODE_ID, EPOCH - 1)
    assert core.audit.compare(slots, [None, old, b"?", slots[3].record], {}) == 3
    assert core.outbox.take_publications(100) == [(s.key, s.record) for s in slots[:3]]


@pytest.mark.parametrize(("epoch", "repaired"), [(5, 0), (6, 1), (None, 1)])
def test_a_record_of_another_node_is_as_good_as_ours_while_that_start_is_announced(
    core, epoch, repaired
):
    slots = core.audit.take(100)[:1]
    theirs = [of_node(slots[0], OTHER, 5)]
    assert core.audit.owners(slots, theirs) == {OTHER}
    assert core.audit.compare(slots, theirs, {OTHER: epoch}) == repaired


def test_a_block_that_left_meanwhile_is_not_published(core):
    slots = core.audit.take(100)[:1]
    core.handle(Drop(1, 2, [slots[0].key]), 0.0)
    assert slots[0].state is SlotState.FREE
    assert core.audit.compare(slots, [None], {}) == 0
