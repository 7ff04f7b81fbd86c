"""What is told of stored and removed blocks adds up to the blocks that are there."""

import random

import pytest

from kvstore.core.events import Clear, Commit, Drop, Reserve, Reset, Retain
from kvstore.core.memory.slots import SlotState
from kvstore.core.node import NodeCore
from kvstore.core.outgoing.changes import Changes
from kvstore.keys import Namespace

KEYS = Namespace.named("test").block_keys(range(60), 1)


@pytest.fixture
def core():
    core = NodeCore(node_id=5, epoch=9, size_bytes=256 << 10)
    core.blocks.changes = Changes()
    return core


def reserve(core, keys, size=4096, values=True):
    count = len(keys)
    value = b"v" * size if values else None
    event = Reserve(
        *(1, 1, keys, [size] * count, 3, [0] * count, [0] * count, [value] * count, [0] * count)
    )
    return core.handle(event, 0.0).replies[0].body


def sealed(core):
    return {key for key, slot in core.blocks.by_key.items() if slot.state is SlotState.SEALED}


def test_a_reserved_block_is_told_when_it_is_sealed_and_not_before(core):
    grants = reserve(core, KEYS[:1], values=False)
    assert not core.blocks.changes.take()
    core.handle(Commit(1, 2, [(grants[0][0], grants[0][1], 0)]), 0.0)
    assert core.blocks.changes.take() == (KEYS[:1], [])
    assert not core.blocks.changes.take()


def test_what_came_and_went_since_the_last_look_is_not_told(core):
    reserve(core, KEYS[:2])
    core.handle(Drop(1, 2, KEYS[:1]), 0.0)
    assert core.blocks.changes.take() == ([KEYS[1]], [])
    core.handle(Drop(1, 2, [KEYS[1]]), 0.0)
    reserve(core, [KEYS[1]])
    assert not core.blocks.changes.take()


def test_an_evicted_block_is_told_and_one_that_moved_is_not(core):
    reserve(core, KEYS[:32], size=8192)
    core.handle(Retain(1, 2, KEYS[:16:2], 50, 7), 0.0)
    core.handle(Retain(1, 2, KEYS[16:32:2], 50, 8), 0.0)
    core.blocks.changes.take()
    before = sealed(core)
    reserve(core, KEYS[50:51], size=16384)
    assert core.blocks.counts["moved"]
    stored, removed = core.blocks.changes.take()
    assert stored == [KEYS[50]]
    assert set(removed) == before - sealed(core)


def test_whatever_happens_the_sum_of_all_changes_is_what_is_sealed(core):
    rng = random.Random(1)
    told = set()
    for _ in range(4000):
        some = rng.sample(KEYS, rng.randint(1, 4))
        match rng.randrange(8):
            case 0 | 1 | 2 | 3:
                reserve(core, some, size=rng.choice([4096, 4096, 4096, 60_000]))
            case 4:
                core.handle(Drop(1, 1, rng.sample(KEYS, 20)), 0.0)
            case 5:
                core.handle(Retain(1, 1, some, rng.choice([0, 50]), 7), 0.0)
            case 6 if rng.random() < 0.1:
                core.handle(rng.choice([Clear(1, 1, 3), Reset(1, 1, 0, ())]), 0.0)
        if rng.random() < 0.5:
            stored, removed = core.blocks.changes.take()
            assert not told.intersection(stored)
            assert told.issuperset(removed)
            told = (told - set(removed)) | set(stored)
            assert told == sealed(core) == set(core.blocks.listed.keys())
    assert core.blocks.counts["evicted"]
