"""What the index is told of a block, whatever its slot had before and whoever has it pinned."""

import pytest

from kvstore.core.events import Commit, Drop, Pin, Reserve, Seal, Unpin
from kvstore.core.node import NodeCore
from kvstore.keys import Namespace
from kvstore.record import unpack_record

SIZE = 8192
KEYS = Namespace.named("test").block_keys(range(20), 1)


@pytest.fixture
def core():
    return NodeCore(node_id=5, epoch=9, size_bytes=64 << 10)


def put(core, key, checksum=0):
    """(slot, generation) of a block with that checksum; the effects of its commit."""
    reserved = core.handle(Reserve(1, 1, [key], [SIZE], 3, [0], [0], [None], [0]), 0.0)
    slot, generation, _ = reserved.replies[0].body[0]
    return (slot, generation), core.handle(Commit(1, 2, [(slot, generation, checksum)]), 0.0)


def published(core):
    work = core.outbox.take_publications(100)
    core.outbox.published(work)
    return dict(work)


def test_a_record_has_the_checksum_of_its_own_block_and_not_of_the_slots_former_one(core):
    first, _ = put(core, KEYS[0], checksum=111)
    core.handle(Drop(1, 3, KEYS[:1]), 0.0)
    second, effects = put(core, KEYS[1], checksum=222)
    assert second[0] == first[0]
    assert [w.checksum for w in effects.writes if isinstance(w, Seal)] == [222]
    location = unpack_record(KEYS[1], published(core)[KEYS[1]])
    assert (location.slot, location.generation, location.checksum) == (*second, 222)


def test_what_is_published_again_includes_what_is_pinned(core):
    put(core, KEYS[0])
    put(core, KEYS[1])
    published(core)
    core.handle(Pin(2, 1, KEYS[:1]), 0.0)
    assert core.republish() == 2
    assert set(published(core)) == set(KEYS[:2])


def test_an_unpin_of_a_former_generation_lets_go_of_nothing(core):
    """It comes late, or twice: the slot has another block by now, which is pinned too."""
    former, _ = put(core, KEYS[0])
    core.handle(Pin(2, 1, KEYS[:1]), 0.0)
    core.handle(Unpin(2, 1, [former]), 0.0)
    core.handle(Drop(1, 3, KEYS[:1]), 0.0)
    slot, _ = put(core, KEYS[1])
    assert slot[0] == former[0]
    core.handle(Pin(2, 1, KEYS[1:2]), 0.0)
    core.handle(Unpin(2, 1, [former]), 0.0)
    assert core.allocator.slot(slot[0]).pins == 1
    assert core.holds(2)
    core.handle(Unpin(2, 1, [slot]), 0.0)
    assert not core.holds(2)


def test_nobody_lets_go_of_anothers_pin(core):
    slot, _ = put(core, KEYS[0])
    core.handle(Pin(2, 1, KEYS[:1]), 0.0)
    for _ in range(2):
        core.handle(Unpin(3, 1, [slot]), 0.0)
    assert core.allocator.slot(slot[0]).pins == 1
    assert core.holds(2)
    assert not core.holds(3)
