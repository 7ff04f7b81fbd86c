"""What is done for a run of blocks at once is what would be done for one after the other."""

import random

import pytest
from each_input import each

from kvstore.core.events import Abort, Commit, Drop, Pin, Reserve, Touch, Unpin
from kvstore.core.memory.allocator import Allocator
from kvstore.core.memory.eviction import POLICIES
from kvstore.core.memory.slots import SlotState
from kvstore.core.node import NodeCore
from kvstore.types import NO_SPACE, STORED

KIB = 1 << 10
SIZES = (900, 4096, 9000, 20_000, 300 * KIB, 700 * KIB)
"""Of a node of 16 MiB the first two count as small."""


class OneByOne(NodeCore):
    """Takes a slot for one key at a time."""

    def _alike(self, event, at):
        return 1


def key_of(number):
    return number.to_bytes(2, "little") * 16


def reserve(rng, request):
    """Runs of new keys, known ones and repeated ones, of one size and of several, with values or
    without."""
    count = rng.randint(1, 12)
    first, size = rng.randrange(200), rng.choice(SIZES)
    numbers = [rng.randrange(200) if rng.random() < 0.2 else first + i for i in range(count)]
    sizes = [rng.choice(SIZES) if rng.random() < 0.15 else size for _ in numbers]
    inline = rng.random() < 0.3
    values = [bytes(one) if inline and rng.random() < 0.8 else None for one in sizes]
    zeros = [0] * count
    return Reserve(1, request, list(map(key_of, numbers)), sizes, 5, zeros, zeros, values, zeros)


def event_of(rng, request, held, pinned):
    """Something that a client may ask, by what it holds."""
    chance, keys = rng.random(), [key_of(rng.randrange(200)) for _ in range(6)]
    some = rng.sample(sorted(held), min(len(held), rng.randint(1, 10)))
    if chance < 0.5 or not held:
        return reserve(rng, request)
    if chance < 0.85:
        held.difference_update(some)
        return Commit(1, request, [(slot, generation, 0) for slot, generation in some])
    if chance < 0.9:
        held.difference_update(some)
        return Abort(1, request, some)
    if chance < 0.93:
        return Drop(1, request, keys)
    if chance < 0.96 or not pinned:
        return Pin(1, request, keys) if len(pinned) < 8 else Touch(1, keys)
    return Unpin(1, request, [pinned.pop()])


def books(core):
    """All that is known of each block, and in which order they would go."""
    slots = {
        key: (
            *(slot.slot_id, slot.offset, slot.generation, slot.state, slot.last_use, slot.record),
            *(slot.uses, slot.counted_at, slot.placed_at),
        )
        for key, slot in core.blocks.by_key.items()
    }
    order = [core.blocks.allocator.slot(i).key for i in core.blocks.allocator._evictable.coldest()]
    return (
        slots,
        order,
        core.blocks.counts,
        core.blocks.outbox.take_publications(1000),
        core.blocks.listed.page(b"", 999),
    )


@pytest.mark.parametrize("policy", sorted(POLICIES))
@each("seed", range(10))
def test_a_run_gets_the_slots_and_answers_that_it_would_get_one_by_one(seed, policy, monkeypatch):
    monkeypatch.setattr("kvstore.core.blocks.GONE_KEYS_MAX", 50)
    rng = random.Random(seed)
    monkeypatch.setattr("kvstore.core.node.RESERVATIONS_MAX", 20)
    cores = [
        kind(node_id=7, epoch=1, size_bytes=16 << 20, policy=POLICIES[policy])
        for kind in (NodeCore, OneByOne)
    ]
    held, pinned, full = set(), [], 0
    for request in range(1, 150):
        event = event_of(rng, request, held, pinned)
        (one, other) = (core.handle(event, float(request)) for core in cores)
        assert one.replies == other.replies, f"seed {seed}, {event}"
        if isinstance(event, Reserve):
            answers = one.replies[0].body
            held.update((a[0], a[1]) for a in answers if len(a) == 3)
            full += answers.count(NO_SPACE)
        if isinstance(event, Pin):
            slots = map(cores[0].blocks.by_key.get, event.keys)
            found = [slot for slot in slots if slot is not None]
            pinned += [
                (slot.slot_id, slot.generation)
                for slot in found
                if slot.state is SlotState.SEALED and slot.pins
            ]
        assert books(cores[0]) == books(cores[1]), f"seed {seed}, {event}"
        list(cores[0].blocks.allocator.extents())
    assert cores[0].blocks.counts["evicted"] > 0


@each("length", [4096, 5000, 16 * KIB, 100 * KIB, 3 << 20])
def test_side_by_side_is_where_one_after_the_other_would_be(length):
    for count in (1, 2, 5, 100):
        run, single = Allocator(64 << 20), Allocator(64 << 20)
        for allocator in (run, single):  # something at either end, so that no end is whole
            allocator.take(4096)
            allocator.take(60_000)
        slots = run.take(length, count)
        expected = [slot for _ in range(len(slots)) for slot in single.take(length)]
        assert [slot.start for slot in slots] == [slot.start for slot in expected]
        bounds = [(one.used_below, one.used_from) for one in (run, single)]
        assert bounds[0] == bounds[1]
        assert len(slots) == count or single.take(length) == []


def test_blocks_of_one_size_make_room_for_as_many_at_once():
    """Their places go whole to who asked, in one step of the decision."""
    core = NodeCore(node_id=7, epoch=1, size_bytes=256 * KIB)
    for start in (0, 8):
        keys = [key_of(start + i) for i in range(8)]
        n = [0] * 8
        event = Reserve(1, 1, keys, [32 * KIB] * 8, 5, n, n, [bytes(32 * KIB)] * 8, n)
        assert core.handle(event, 1.0).replies[0].body == [STORED] * 8
    assert core.blocks.counts["evicted"] == 8
    assert sorted(core.blocks.by_key) == sorted(keys)
    assert core.blocks.allocator.free_bytes == 0
