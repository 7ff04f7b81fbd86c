"""What a start makes of headers that contradict each other or lie at a border."""

import pytest
from stepwise import StepwiseSegment

from kvstore.core.events import Abort, Bounds, Drop, Keep, Mark, Reserve, Seal, SessionDead
from kvstore.core.holdings import FORMER
from kvstore.core.memory.allocator import Allocator
from kvstore.core.memory.granules import GRANULE_BYTES, PAGE
from kvstore.core.memory.slots import SlotState
from kvstore.core.node import NodeCore
from kvstore.core.recovery import HeldSlot, Seen, fits, recover
from kvstore.limits import RETAINED_S_MAX, Limits
from kvstore.record import unpack_record
from kvstore.segment.header import Superblock
from kvstore.segment.scan import scan

PAGES = 16
SIZE = PAGES * PAGE * GRANULE_BYTES
KEY, OTHER = b"k" * 32, b"o" * 32


def block(page, generation, key=KEY, *, granule=0, length=4096, meta_length=0):
    return Seal(page, generation, key, length, granule, 0, meta_length, 7, 3)


def started(*sealed, pinned=(), held=(), gone=()):
    core = NodeCore(node_id=7, epoch=2, size_bytes=SIZE)
    seen = Seen(Bounds(99, 8, PAGES), list(sealed), set(pinned), list(held), [], list(gone))
    return core, recover(core, seen, 1, 0.0)


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_blocks_of_one_key_the_later_stays_and_the_place_of_the_other_is_free(order):
    core, writes = started(*(block(0, 5), block(1, 6))[::order])
    assert core.blocks.by_key[KEY].slot_id == 1
    assert writes == [Mark(0, SlotState.FREE, 5)]
    assert core.blocks.counts["recovery_dropped"] == 1
    assert core.blocks.counts["recovered"] == 1
    assert core.blocks.allocator.free_bytes == SIZE - 4096
    assert core.blocks.allocator.take(SIZE - 2 * 4096 + 1) == []
    assert core.blocks.outbox.publications_pending == 1


def test_of_two_blocks_of_one_key_a_pinned_one_keeps_its_place_until_its_client_is_gone():
    core, writes = started(block(0, 5), block(1, 6), pinned={0})
    assert core.blocks.by_key[KEY].slot_id == 1
    assert writes == [Mark(0, SlotState.FREE, 5)]
    assert core.blocks.allocator.free_bytes == SIZE - 2 * 4096
    assert core.former().pins == {0: 1}
    core.handle(SessionDead(FORMER), 0.0)
    assert core.blocks.allocator.free_bytes == SIZE - 4096


def test_what_a_client_of_then_holds_is_counted_if_it_was_being_written():
    held = (HeldSlot(0, 5, 0, PAGE, True), HeldSlot(1, 6, 0, PAGE, False))
    core, writes = started(held=held)
    assert writes == [Keep(0, 0, 0)], "the term of the slot's former block is over"
    assert core.blocks.counts["recovery_dropped"] == 1
    assert list(core.former().reserved) == [0]
    assert core.former().pins == {1: 1}
    assert core.blocks.allocator.free_bytes == SIZE - 2 * 4096


def test_the_record_of_a_block_that_left_says_where_it_was():
    core, _ = started(gone=[block(3, 5, granule=2, length=5000)])
    ((key, record),) = core.blocks.outbox.take_removals(9)
    place = unpack_record(key, record)
    assert (key, place.epoch, place.slot, place.granule) == (KEY, 1, 3, 2)
    assert (place.generation, place.length, place.checksum) == (5, 5000, 7)


def test_a_start_takes_over_how_far_the_segment_was_ever_used():
    core, _ = started(block(0, 5))
    assert core.blocks.bounds == (99, 8, PAGES)
    assert (core.blocks.allocator.used_below, core.blocks.allocator.used_from) == (
        8 * PAGE,
        PAGES * PAGE,
    )
    writes = core.handle(Reserve(1, 1, [OTHER], [9 * 4096], 3, [0], [0], [None], [0]), 0.0).writes
    (bounds,) = (write for write in writes if isinstance(write, Bounds))
    assert bounds.used_below >= 10


def test_a_value_that_reaches_where_small_ones_were_is_still_its_writers_after_a_restart():
    """Rule 5: its header lies behind both bounds of what was used unless the bounds meet."""
    size = 32 << 20
    segment = StepwiseSegment(Superblock(7, 1, 0, size))
    core = NodeCore(node_id=7, epoch=1, size_bytes=size, limits=Limits())

    def handle(event):
        effects = core.handle(event, 0.0)
        for write in effects.writes:
            for _ in segment.steps(write):
                pass
        return effects.replies

    def reserve(key, length):
        (reply,) = handle(Reserve(1, 1, [key], [length], 3, [0], [0], [None], [0]))
        return reply.body[0]

    small = reserve(KEY, 4096)
    handle(Abort(1, 2, [small[:2]]))
    large = reserve(OTHER, size)
    seen = scan(size, segment.bounds, segment.headers, memoryview(segment.held))
    assert [(held.slot_id, held.reserved) for held in seen.held] == [(large.slot_id, True)]


def test_with_a_block_of_a_former_start_goes_the_record_of_then():
    core, _ = started(block(0, 5))
    core.handle(Drop(1, 1, [KEY]), 0.0)
    ((key, record),) = core.blocks.outbox.take_removals(9)
    assert (key, unpack_record(key, record).epoch) == (KEY, 1)


def test_a_write_of_then_that_ends_is_not_remembered_as_a_departure_of_no_key():
    core, _ = started(held=(HeldSlot(0, 5, 0, PAGE, True),))
    core.handle(SessionDead(FORMER), 0.0)
    assert core.blocks.counts["aborted"] == 1
    assert len(core.blocks.departures) == 0


def test_no_more_records_are_to_be_removed_than_there_is_room_for(monkeypatch):
    least = 1024
    for module in ("blocks", "recovery"):
        monkeypatch.setattr(f"kvstore.core.{module}.PENDING_REMOVE_MAX", least)
    gone = [block(0, 5, i.to_bytes(32, "little")) for i in range(least + 2)]
    core, _ = started(gone=gone)
    assert core.blocks.outbox.removals_pending == least
    assert core.blocks.outbox.forgotten == 0


def test_a_header_fits_up_to_the_segments_end_and_its_values_whole_length():
    last = PAGES - 1
    assert fits(block(last, 5), SIZE)
    assert not fits(block(last + 1, 5), SIZE)
    assert not fits(block(last, 5, length=4097), SIZE)
    assert not fits(block(last, 5, granule=1), SIZE)
    assert fits(block(0, 5, granule=PAGE - 1), SIZE)
    assert not fits(block(0, 5, granule=PAGE), SIZE)
    assert fits(block(0, 5, meta_length=4096), SIZE)
    assert not fits(block(0, 5, meta_length=4097), SIZE)
    assert not fits(block(0, 5, meta_length=-1), SIZE)


@pytest.mark.parametrize(
    ("until_s", "goes_on"),
    [(100, False), (101, True), (101 + RETAINED_S_MAX, True), (102 + RETAINED_S_MAX, False)],
)
def test_a_retention_goes_on_if_it_is_not_over_and_one_that_can_have_been_promised(
    until_s, goes_on
):
    core = NodeCore(node_id=7, epoch=2, size_bytes=SIZE, limits=Limits())
    seen = Seen(Bounds(99, 8, PAGES), [block(0, 5)], set(), [], [], [], [Keep(0, until_s, 11)])
    writes = recover(core, seen, 1, 100.0)
    slot = core.blocks.by_key[KEY]
    assert (slot.kept_until, slot.tenant) == ((until_s, 11) if goes_on else (0, 0))
    assert len(core.blocks.retained) == goes_on
    assert writes == ([] if goes_on else [Keep(0, 0, 0)])


def test_of_two_blocks_of_one_key_the_one_that_goes_is_retained_no_more():
    core = NodeCore(node_id=7, epoch=2, size_bytes=SIZE, limits=Limits())
    sealed, retained = [block(0, 5), block(1, 6)], [Keep(0, 200, 11)]
    writes = recover(
        core, Seen(Bounds(99, 8, PAGES), sealed, set(), [], [], [], retained), 1, 100.0
    )
    assert writes == [Mark(0, SlotState.FREE, 5), Keep(0, 0, 0)]
    assert len(core.blocks.retained) == 0


@pytest.mark.parametrize("size", [PAGES * PAGE, PAGES * PAGE - 1])
def test_slots_up_to_the_segments_end_leave_no_room_behind_them(size):
    allocator = Allocator(SIZE)
    allocator.restore([(0, size)], 0, 0)
    left = PAGES * PAGE - size
    assert list(allocator._space) == ([(size, left)] if left else [])


def test_a_start_looks_where_small_blocks_lie_though_the_large_ones_came_first():
    """Small blocks are placed from the end of a segment, large ones from its beginning."""
    size, keys = 64 << 20, [KEY, OTHER]
    core = NodeCore(node_id=7, epoch=1, size_bytes=size)
    segment = StepwiseSegment(Superblock(7, 1, 0, size))
    for key, length in zip(keys, (1 << 20, 1024), strict=True):
        value = bytes(length)
        event = Reserve(1, 1, [key], [length], 3, [0], [0], [value], [0])
        for write in core.handle(event, 0.0).writes:
            for _ in segment.steps(write):
                pass
    assert core.blocks.by_key[OTHER].offset > size // 2
    seen = scan(size, segment.bounds, segment.headers, memoryview(segment.held))
    assert {block.key for block in seen.sealed} == set(keys)
