"""A core whose blocks go down a tier: nothing is evicted, the coldest leave when they are taken."""

import random

import pytest
from each_input import each

from kvstore.core.demotion import DemotingCore
from kvstore.core.events import (
    Coldest,
    Commit,
    Drop,
    Hold,
    Mark,
    Pin,
    Reserve,
    Retain,
    Retire,
    SessionDead,
    Touch,
)
from kvstore.core.memory.slots import SlotState
from kvstore.core.outgoing.departures import GoneWhy
from kvstore.types import NO_SPACE, STORED, Retained

MIB = 1 << 20
KEYS = [bytes([i]) * 32 for i in range(100)]
WRITER, DEMOTER = 1, 2


class Driven:
    def __init__(self, size_bytes=2 * MIB):
        self.core = DemotingCore(node_id=7, epoch=1, size_bytes=size_bytes)
        self.writes = []

    def ask(self, event):
        effects = self.core.handle(event, 0.0)
        self.writes += effects.writes
        return effects.replies[0].body if effects.replies else None

    def reserve(self, *keys, size=256 << 10):
        n = len(keys)
        return self.ask(
            Reserve(WRITER, 1, keys, [size] * n, 5, [0] * n, [0] * n, [None] * n, [0] * n)
        )

    def save(self, *keys, size=256 << 10):
        granted = self.reserve(*keys, size=size)
        return self.ask(Commit(WRITER, 1, [(slot, gen, 0) for slot, gen, _ in granted]))

    def save_apart(self, *keys):
        for key in keys:
            self.save(key)

    def coldest(self, free_bytes, at_most=100):
        return self.ask(Coldest(DEMOTER, 1, free_bytes, at_most))

    def retire(self, blocks):
        return self.ask(Retire(DEMOTER, 1, [(b.slot, b.generation) for b in blocks]))


@pytest.fixture
def driven():
    return Driven()


def test_a_full_node_refuses_rather_than_evict(driven):
    driven.save(*KEYS[:8])
    assert driven.reserve(KEYS[8]) == [NO_SPACE]
    assert driven.reserve(KEYS[8], size=4096) == [NO_SPACE]
    assert driven.core.blocks.counts["evicted"] == 0
    assert set(driven.core.blocks.by_key) == set(KEYS[:8])


def test_free_bytes_count_what_was_freed_and_what_was_never_handed_out(driven):
    free = [driven.core.blocks.allocator.free_bytes]
    for key in KEYS[:8]:
        driven.save(key)
        free.append(driven.core.blocks.allocator.free_bytes)
    assert free == [2 * MIB - i * (256 << 10) for i in range(9)]
    driven.ask(Drop(WRITER, 1, [KEYS[3]]))
    assert driven.core.blocks.allocator.free_bytes == 256 << 10


def test_the_coldest_leave_and_only_as_many_as_are_needed(driven):
    driven.save_apart(*KEYS[:8])
    driven.ask(Touch(WRITER, [KEYS[0]]))
    cold = driven.coldest(300 << 10)
    assert [block.key for block in cold] == [KEYS[1], KEYS[2]]
    assert {block.namespace_id for block in cold} == {5}
    assert [block.offset for block in cold] == [256 << 10, 512 << 10]


def test_with_enough_free_nothing_leaves(driven):
    driven.save(*KEYS[:4])
    assert driven.coldest(MIB) == []


def test_what_is_taken_stays_readable_until_it_is_retired_and_is_then_free(driven):
    driven.save_apart(*KEYS[:8])
    cold = driven.coldest(256 << 10)
    assert driven.core.blocks.by_key[KEYS[0]].state is SlotState.SEALED
    assert KEYS[0] not in [block.key for block in driven.coldest(512 << 10)]
    driven.retire(cold)
    assert KEYS[0] not in driven.core.blocks.by_key
    assert Mark(cold[0].slot, SlotState.FREE, cold[0].generation) in driven.writes
    assert driven.save(KEYS[8]) == [STORED]


def test_what_was_dropped_meanwhile_is_freed_once(driven):
    driven.save_apart(*KEYS[:8])
    cold = driven.coldest(256 << 10)
    driven.ask(Drop(WRITER, 1, [KEYS[0]]))
    assert driven.reserve(KEYS[9]) == [NO_SPACE]
    driven.retire(cold)
    driven.retire(cold)
    assert driven.save(KEYS[9]) == [STORED]


def test_a_demoter_that_ends_lets_go(driven):
    driven.save(*KEYS[:8])
    cold = driven.coldest(2 * MIB)
    assert len(cold) == 8
    driven.ask(SessionDead(DEMOTER))
    driven.retire(cold)
    assert set(driven.core.blocks.by_key) == set(KEYS[:8])
    assert len(driven.coldest(2 * MIB)) == 8


@each("seed", range(20))
def test_free_bytes_are_all_that_no_block_takes(seed):
    """Whatever was saved, dropped and retired before, of whatever sizes."""
    rng = random.Random(seed)
    driven = Driven(4 * MIB)
    for _ in range(200):
        key, size = rng.choice(KEYS), rng.choice([4096, 200_000, 300_000, MIB])
        if rng.random() < 0.5 and key not in driven.core.blocks.by_key:
            (granted,) = driven.reserve(key, size=size)
            if granted != 3:
                driven.ask(Commit(WRITER, 1, [(granted[0], granted[1], 0)]))
        elif rng.random() < 0.5:
            driven.ask(Drop(WRITER, 1, [key]))
        else:
            driven.retire(driven.coldest(rng.randrange(2 * MIB), 3))
        extents = list(driven.core.blocks.allocator.extents())
        held = [e for e in extents if e.slot is not None and e.slot.state is not SlotState.FREE]
        taken = sum(e.size for e in held) << 10
        assert driven.core.blocks.allocator.free_bytes + taken == 4 * MIB, f"seed {seed}"


def test_the_end_of_a_run_leaves_before_its_head(driven):
    driven.save(*KEYS[:8])
    assert driven.coldest(256 << 10)[0].key == KEYS[7]
    driven.ask(Touch(WRITER, KEYS[:8]))
    assert driven.coldest(256 << 10)[0].key == KEYS[6]


def test_blocks_leave_when_enough_is_free_but_not_in_one_piece(driven):
    """Else a large block would never find room: nothing is evicted here."""
    for key in KEYS[:32]:
        driven.save(key, size=64 << 10)
    slots = sorted(driven.core.blocks.by_key.values(), key=lambda slot: slot.offset)
    driven.ask(Drop(WRITER, 1, [slot.key for slot in slots[::2]]))
    assert driven.coldest(256 << 10) == []
    assert driven.reserve(KEYS[50]) == [NO_SPACE]
    cold = driven.coldest(256 << 10)
    assert len(cold) == 2
    driven.retire(cold)
    assert driven.save(KEYS[50]) == [STORED]
    assert driven.coldest(256 << 10) == []


def test_nothing_is_promised_to_stay_where_everything_goes_down(driven):
    driven.save(*KEYS[:4])
    assert driven.ask(Retain(WRITER, 1, KEYS[:4], 60, 1)) == [Retained.ABSENT] * 4
    driven.retire(driven.coldest(2 * MIB))
    assert driven.core.blocks.by_key == {}
    assert driven.core.blocks.counts["retentions_broken"] == 0


def test_what_leaves_is_pinned_for_who_asked_and_no_more_than_asked_for(driven):
    driven.save_apart(*KEYS[:8])
    driven.writes.clear()
    cold = driven.coldest(2 * MIB, at_most=3)
    assert [block.key for block in cold] == KEYS[:3]
    assert driven.writes == [Hold(block.slot, True) for block in cold]
    assert driven.core.holds(DEMOTER)
    assert [driven.core.blocks.by_key[key].pins for key in KEYS[:4]] == [1, 1, 1, 0]
    assert [block.key for block in driven.coldest(2 * MIB, at_most=1)] == [KEYS[3]], "not twice"


def test_as_many_bytes_leave_as_are_short_and_not_a_block_more(driven):
    driven.save_apart(*KEYS[:8])
    assert [b.key for b in driven.coldest(512 << 10)] == [KEYS[0], KEYS[1]]
    driven = Driven()
    driven.save_apart(*KEYS[:8])
    assert [b.key for b in driven.coldest((512 << 10) + 1)] == [KEYS[0], KEYS[1], KEYS[2]]
    driven = Driven()
    driven.save_apart(*KEYS[:7])
    assert driven.coldest(256 << 10) == []
    assert len(driven.coldest((256 << 10) + 1)) == 1


def test_only_who_took_a_block_of_that_generation_retires_it(driven):
    driven.save(*KEYS[:8])
    (block,) = driven.coldest(256 << 10)
    for event in (
        Retire(WRITER, 1, [(block.slot, block.generation)]),
        Retire(DEMOTER, 1, [(block.slot, block.generation + 1)]),
        Retire(DEMOTER, 1, [(4321, block.generation)]),
    ):
        driven.ask(event)
        assert driven.core.blocks.by_key[block.key].pins == 1
    assert driven.core.blocks.counts["evicted"] == 0
    driven.retire([block])
    assert block.key not in driven.core.blocks.by_key
    assert driven.core.blocks.counts["evicted"] == 1
    assert driven.core.blocks.departures.get(block.key).why is GoneWhy.EVICTED


def test_what_is_being_written_or_read_does_not_leave(driven):
    driven.save_apart(*KEYS[:6])
    driven.reserve(*KEYS[6:8])
    driven.ask(Pin(WRITER, 1, KEYS[:2]))
    assert [block.key for block in driven.coldest(2 * MIB)] == KEYS[2:6]


def test_room_is_made_for_the_largest_that_found_none_until_as_large_a_one_did(driven):
    for key in KEYS[:32]:
        driven.save(key, size=64 << 10)
    slots = sorted(driven.core.blocks.by_key.values(), key=lambda slot: slot.offset)
    driven.ask(Drop(WRITER, 1, [slot.key for slot in slots[::2]]))
    for size in (256 << 10, 128 << 10):
        assert driven.reserve(KEYS[50], size=size) == [NO_SPACE]
    driven.save(KEYS[51], size=64 << 10)
    cold = driven.coldest(256 << 10, at_most=1)
    assert len(cold) == 1, "at most so many"
    assert driven.coldest(256 << 10) == [], "once for each that was refused"


def in_pieces():
    """Half of it is free, and no two free places touch."""
    driven = Driven()
    for key in KEYS[:32]:
        driven.save(key, size=64 << 10)
    slots = sorted(driven.core.blocks.by_key.values(), key=lambda slot: slot.offset)
    driven.ask(Drop(WRITER, 1, [slot.key for slot in slots[::2]]))
    return driven, [slot.key for slot in slots[1::2]]


def test_with_just_as_much_free_as_is_wanted_room_is_made_in_one_piece():
    driven, _ = in_pieces()
    assert driven.reserve(KEYS[50]) == [NO_SPACE]
    assert len(driven.coldest(1 * MIB)) == 2


def test_once_as_large_a_value_found_room_none_is_made_for_it():
    driven, left = in_pieces()
    assert driven.reserve(KEYS[50]) == [NO_SPACE]
    driven.ask(Drop(WRITER, 1, left[:3]))
    driven.save(KEYS[50])
    assert driven.coldest(256 << 10) == []


def test_what_leaves_already_is_not_in_the_way_of_another():
    driven, _ = in_pieces()
    leaving = driven.coldest(2 * MIB, at_most=4)
    assert driven.reserve(KEYS[50]) == [NO_SPACE]
    cold = driven.coldest(256 << 10)
    assert cold
    assert not {block.key for block in cold} & {block.key for block in leaving}


def test_what_was_never_refused_and_what_found_room_since_makes_nothing_leave(driven):
    driven.save_apart(*KEYS[:4])
    assert driven.coldest(4096) == []
    driven.save_apart(*KEYS[4:8])
    assert driven.reserve(KEYS[8]) == [NO_SPACE]
    driven.ask(Drop(WRITER, 1, KEYS[:2]))
    assert driven.save(KEYS[8]) == [STORED]
    assert driven.coldest(4096) == []


def test_a_refusal_makes_blocks_leave_once(driven):
    driven.save_apart(*KEYS[:8])
    driven.ask(Drop(WRITER, 1, [KEYS[1], KEYS[3]]))
    assert driven.reserve(KEYS[8], size=512 << 10) == [NO_SPACE]
    assert driven.coldest(4096)
    assert driven.coldest(4096) == []


def test_nothing_leaves_a_full_node_of_which_no_room_is_asked_unless_a_save_found_none(driven):
    driven.save_apart(*KEYS[:8])
    assert driven.coldest(0) == []
    assert driven.reserve(KEYS[8]) == [NO_SPACE]
    driven.ask(Drop(WRITER, 1, [KEYS[0]]))
    driven.save(KEYS[8])
    assert driven.coldest(0) == [], "one as large found room"
    assert driven.reserve(KEYS[9]) == [NO_SPACE]
    assert [block.key for block in driven.coldest(0)] == [KEYS[1]]
    assert driven.coldest(0) == [], "room is being made"


@pytest.mark.parametrize(
    "event", [Coldest(DEMOTER, 3, MIB, 1), Retire(DEMOTER, 3, [])], ids=["coldest", "retire"]
)
def test_the_demoter_is_answered_without_waiting_for_the_index(driven, event):
    (reply,) = driven.core.handle(event, 0.0).replies
    assert (reply.session, reply.request, reply.after_publish) == (DEMOTER, 3, False)
