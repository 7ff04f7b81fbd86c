"""What the index is told of a block, whatever its slot had before and whoever has it pinned."""

import pytest

from kvstore.core import blocks
from kvstore.core.events import (
    Bounds,
    Commit,
    Copy,
    Drop,
    Hold,
    Keep,
    Mark,
    Named,
    Pin,
    Reserve,
    Retain,
    Seal,
    Touch,
    Unpin,
)
from kvstore.core.memory.slots import SlotState
from kvstore.core.node import NodeCore
from kvstore.keys import Namespace
from kvstore.limits import Limits
from kvstore.record import unpack_record

SIZE = 8192
KEYS = Namespace.named("test").block_keys(range(20), 1)


@pytest.fixture
def core():
    return NodeCore(node_id=5, epoch=9, size_bytes=64 << 10)


def put(core, key, checksum=0, size=SIZE):
    """(slot, generation) of a block with that checksum; the effects of its commit."""
    reserved = core.handle(Reserve(1, 1, [key], [size], 3, [0], [0], [None], [0]), 0.0)
    slot, generation, _ = reserved.replies[0].body[0]
    return (slot, generation), core.handle(Commit(1, 2, [(slot, generation, checksum)]), 0.0)


def published(core):
    work = core.blocks.outbox.take_publications(100)
    core.blocks.outbox.published(work)
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
    assert core.blocks.republish() == 2
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
    assert core.blocks.allocator.slot(slot[0]).pins == 1
    assert core.holds(2)
    core.handle(Unpin(2, 1, [slot]), 0.0)
    assert not core.holds(2)


def test_a_block_is_held_from_its_first_pin_to_its_last_and_nothing_in_between_says_so(core):
    (slot_id, generation), _ = put(core, KEYS[0])
    slot = core.blocks.allocator.slot(slot_id)
    holds = []
    for event in (
        *(Pin(2, 1, KEYS[:1]), Pin(3, 1, KEYS[:1]), Unpin(2, 1, [(slot_id, generation)])),
        *(Unpin(3, 1, [(slot_id, generation)]),),
    ):
        holds.append(core.handle(event, 0.0).writes)
        assert core.blocks.allocator.may_go(slot) == (slot.pins == 0)
    assert holds == [[Hold(slot_id, True)], [], [], [Hold(slot_id, False)]]


def test_what_is_being_written_is_never_published(core):
    core.handle(Reserve(1, 1, KEYS[:1], [SIZE], 3, [0], [0], [None], [0]), 0.0)
    assert core.blocks.republish() == 0
    assert published(core) == {}


def test_what_goes_before_it_was_published_leaves_no_record_to_remove(core):
    put(core, KEYS[0])
    core.handle(Drop(1, 3, KEYS[:1]), 0.0)
    assert published(core) == {}
    assert core.blocks.outbox.take_removals(9) == []


def test_a_node_that_ends_forgets_what_is_published_and_gives_its_records_back(core):
    put(core, KEYS[0])
    put(core, KEYS[1])
    records = published(core)
    assert core.blocks.take_published(1) == [(KEYS[0], records[KEYS[0]])]
    assert core.blocks.listed.page(b"", 9) == KEYS[1:2]
    assert dict(core.blocks.take_published(9)) == {KEYS[1]: records[KEYS[1]]}
    assert core.blocks.listed.bytes == len(core.blocks.by_key) == 0


def test_a_record_says_the_first_and_only_segment(core):
    put(core, KEYS[0])
    assert unpack_record(KEYS[0], published(core)[KEYS[0]]).segment == 0


class TestBounds:
    """What a restart must know of is said before it is so, some way ahead."""

    @pytest.fixture(autouse=True)
    def near(self, monkeypatch):
        monkeypatch.setattr(blocks, "GENERATIONS_AHEAD", 2)
        monkeypatch.setattr(blocks, "PAGES_AHEAD", 3)

    def said(self, core, key, pages):
        event = Reserve(1, 1, [key], [pages * 4096], 3, [0], [0], [None], [0])
        return [w for w in core.handle(event, 0.0).writes if isinstance(w, Bounds)]

    def test_a_new_node_has_used_nothing_and_counts_generations_from_one(self, core):
        assert core.blocks.bounds == Bounds(0, 0, 16)
        (_, generation), _ = put(core, KEYS[0])
        assert generation == 1

    def test_they_move_only_when_something_would_be_beyond_them_and_each_by_itself(self):
        """Large values come from the lower end, small ones from the upper end."""
        core = NodeCore(node_id=5, epoch=9, size_bytes=8 << 20)
        pages = (8, 3, 1, 1, 1, 1, 3, 1, 3, 1)
        said = [self.said(core, KEYS[i], count) for i, count in enumerate(pages)]
        assert said == [
            *([Bounds(3, 11, 2048)], [], [Bounds(3, 11, 2044)], [Bounds(6, 11, 2044)], [], []),
            *([Bounds(9, 17, 2044)], [Bounds(9, 17, 2040)], [], [Bounds(12, 17, 2040)]),
        ]

    def test_they_end_with_the_segment(self, monkeypatch):
        monkeypatch.setattr(blocks, "PAGES_AHEAD", 1 << 12)
        core = NodeCore(node_id=5, epoch=9, size_bytes=8 << 20)
        assert self.said(core, KEYS[0], 8) == [Bounds(3, 2048, 2048)]
        assert self.said(core, KEYS[1], 1) == [Bounds(3, 2048, 0)]


def test_nobody_lets_go_of_anothers_pin(core):
    slot, _ = put(core, KEYS[0])
    core.handle(Pin(2, 1, KEYS[:1]), 0.0)
    for _ in range(2):
        core.handle(Unpin(3, 1, [slot]), 0.0)
    assert core.blocks.allocator.slot(slot[0]).pins == 1
    assert core.holds(2)
    assert not core.holds(3)


class TestMoves:
    """Eight blocks of 8 KiB, of which every second is retained: 16 KiB need one of them to move."""

    @pytest.fixture
    def core(self):
        core = NodeCore(node_id=5, epoch=9, size_bytes=64 << 10, limits=Limits())
        for key in KEYS[:8]:
            put(core, key, checksum=key[0])
        for tenant, keys in ((7, KEYS[1:4:2]), (8, KEYS[5:8:2])):
            core.handle(Retain(1, 1, keys, 60, tenant), 0.0)
        published(core)
        return core

    def reserve(self, core, *keys, now=0.0):
        zeros = [0] * len(keys)
        event = Reserve(1, 2, keys, [2 * SIZE] * len(keys), 3, zeros, zeros, [None, *zeros], zeros)
        return core.handle(event._replace(values=[None] * len(keys)), now)

    def test_a_block_is_sealed_elsewhere_before_its_old_place_is_free(self, core):
        before = {key: core.blocks.by_key[key].slot_id for key in KEYS[1:8:2]}
        effects = self.reserve(core, KEYS[10])
        (moved,) = (
            key for key, slot_id in before.items() if core.blocks.by_key[key].slot_id != slot_id
        )
        new, old_id = core.blocks.by_key[moved], before[moved]
        what = [(type(w), getattr(w, "slot_id", None)) for w in effects.writes[:7]]
        assert what == [
            *((Mark, new.slot_id), (Mark, new.slot_id), (Copy, None), (Keep, new.slot_id)),
            *((Seal, new.slot_id), (Keep, old_id), (Mark, old_id)),
        ]
        evicted, reserved, copy, _, seal, _, freed, *_ = effects.writes
        states = evicted.state, reserved.state, freed.state
        assert states == (SlotState.FREE, SlotState.RESERVED, SlotState.FREE)
        assert reserved.generation == seal.generation > freed.generation
        assert (copy.source, copy.destination) == (old_id * 4096, new.offset)
        assert (copy.length, seal.length, seal.key, seal.checksum) == (SIZE, SIZE, moved, moved[0])
        assert core.blocks.counts["moved"] == 1
        assert core.blocks.counts["evicted"] == 2
        assert core.blocks.counts["stored"] == 8

    def test_the_index_is_told_of_the_new_place_and_the_old_record_goes(self, core):
        records = {key: core.blocks.by_key[key].record for key in KEYS[1:8:2]}
        self.reserve(core, KEYS[10])
        ((moved, record),) = published(core).items()
        assert record == core.blocks.by_key[moved].record != records[moved]
        assert (moved, records[moved]) in core.blocks.outbox.take_removals(100)

    def test_what_is_known_of_a_block_moves_with_it(self, core):
        core.handle(Touch(1, KEYS[1:8:2]), 7.0)
        core.handle(Named(1, KEYS[1:8:2], [b"name"] * 4), 7.0)
        before = {key: vars_of(core.blocks.by_key[key]) for key in KEYS[1:8:2]}
        self.reserve(core, KEYS[10], now=9.0)
        assert core.blocks.counts["moved"] == 1
        assert {key: vars_of(core.blocks.by_key[key]) for key in before} == before
        assert all(core.blocks.names.get(key) == b"name" for key in before)
        assert set(core.blocks.listed.page(b"", 100)) > set(before)

    def test_for_a_value_that_finds_room_nothing_moves(self, core):
        core.handle(Drop(1, 1, KEYS[1:2]), 0.0)
        self.reserve(core, KEYS[10])
        assert core.blocks.counts["moved"] == 0

    def test_one_request_moves_no_more_than_the_limit_and_the_next_goes_on(self, core, monkeypatch):
        monkeypatch.setattr("kvstore.core.blocks.MOVED_BYTES_MAX", (128 << 10) + SIZE)
        self.reserve(core, KEYS[10], KEYS[11])
        assert (core.blocks.counts["moved"], core.blocks.counts["rejected"]) == (1, 1)
        self.reserve(core, KEYS[11])
        assert (core.blocks.counts["moved"], core.blocks.counts["rejected"]) == (2, 1)


def vars_of(slot):
    return slot.key, slot.length, slot.namespace_id, slot.checksum, slot.reserved_at, slot.used_at
