"""The node's decisions, one claim each. No I/O: events in, effects out."""

import pytest

from kvstore.core import blocks
from kvstore.core.answers import NOT_HELD, Grant
from kvstore.core.events import (
    Abort,
    Bounds,
    Clear,
    Commit,
    Drop,
    Fill,
    Listing,
    Mark,
    Pin,
    Reserve,
    Reset,
    Seal,
    SessionDead,
    SessionResumed,
    Stat,
    Touch,
    Unpin,
)
from kvstore.core.memory.listed import place_of
from kvstore.core.memory.slots import SlotState
from kvstore.core.node import NodeCore
from kvstore.keys import Namespace
from kvstore.record import RecordSigner, slot_of, unpack_record
from kvstore.types import EXISTS, IN_PROGRESS, NO_SPACE, STORED

ARENA = 64 << 10
KEYS = Namespace.named("test").block_keys(range(200), 1)
A, B = 1, 2


@pytest.fixture
def core():
    return NodeCore(node_id=5, epoch=9, size_bytes=ARENA)


def reserve(core, keys, size=8192, session=A, values=None, namespace=3):
    n = len(keys)
    event = Reserve(
        session, 1, keys, [size] * n, namespace, [0] * n, [0] * n, values or [None] * n, [0] * n
    )
    return core.handle(event, 0.0)


def commit(core, grants, session=A):
    return core.handle(Commit(session, 2, [(g[0], g[1], 0) for g in grants]), 0.0)


def put(core, keys, **kwargs):
    grants = reserve(core, keys, **kwargs).replies[0].body
    return commit(core, grants, session=kwargs.get("session", A))


def body(effects):
    return effects.replies[0].body


def test_a_reserve_grants_a_slot_and_marks_it_reserved_before_the_answer(core):
    effects = reserve(core, KEYS[:1])
    ((slot, generation, offset),) = body(effects)
    assert isinstance(effects.writes[0], Bounds)  # of the first slot there ever is
    assert effects.writes[1:] == [Mark(slot, SlotState.RESERVED, generation, 0, 8)]
    assert offset % 4096 == 0
    assert not effects.replies[0].after_publish


def test_a_commit_seals_and_then_publishes_and_answers_after_the_publication(core):
    grants = body(reserve(core, KEYS[:1]))
    assert core.blocks.outbox.take_publications(10) == []
    effects = commit(core, grants)
    assert [type(w) for w in effects.writes] == [Seal]
    assert effects.replies[0].after_publish
    ((key, record),) = core.blocks.outbox.take_publications(10)
    location = unpack_record(key, record)
    assert (location.node_id, location.epoch, location.length) == (5, 9, 8192)


def test_a_small_value_is_stored_by_the_reserve_alone_in_the_right_order(core):
    effects = reserve(core, KEYS[:1], size=5, values=[b"hello"])
    assert [type(w) for w in effects.writes] == [Bounds, Mark, Fill, Seal]
    assert body(effects) == [STORED]
    assert effects.replies[0].after_publish


def test_a_key_that_exists_is_skipped_at_reserve(core):
    put(core, KEYS[:1])
    assert body(reserve(core, KEYS[:2]))[0] is EXISTS


def test_a_key_another_client_is_writing_is_in_progress(core):
    reserve(core, KEYS[:1], session=A)
    assert body(reserve(core, KEYS[:1], session=B)) == [IN_PROGRESS]


def test_a_key_twice_in_one_batch_is_in_progress_the_second_time(core):
    answers = body(reserve(core, [KEYS[0], KEYS[0]]))
    assert isinstance(answers[0], Grant)
    assert answers[1] is IN_PROGRESS


def test_a_pool_under_pressure_rejects_nothing_that_can_be_evicted(core):
    for key in KEYS:
        assert body(put(core, [key])) == [STORED]
    assert core.blocks.counts["evicted"] == len(KEYS) - 8
    assert core.blocks.counts["rejected"] == 0


def test_an_evicted_block_is_marked_free_before_its_slot_is_given_away(core):
    put(core, KEYS[:8])
    effects = reserve(core, KEYS[8:9])
    freed, reserved = effects.writes
    assert (freed.state, reserved.state) == (SlotState.FREE, SlotState.RESERVED)
    assert reserved.generation == freed.generation + 1


def test_an_evicted_block_that_was_published_is_removed_from_the_index(core):
    put(core, KEYS[:8])
    work = core.blocks.outbox.take_publications(100)
    core.blocks.outbox.published(work)
    reserve(core, KEYS[8:9])
    assert core.blocks.outbox.take_removals(10) == [work[0]]


def test_what_the_index_has_not_taken_stays_pending(core):
    put(core, KEYS[:3])
    first = core.blocks.outbox.take_publications(2)
    core.blocks.outbox.published(first)
    assert [key for key, _ in core.blocks.outbox.take_publications(10)] == [KEYS[0]]


def test_removals_are_repeated_when_the_index_may_have_gone_back(core):
    """Found by the simulation: a replica that takes over still has the record."""
    put(core, KEYS[:1])
    core.blocks.outbox.published(core.blocks.outbox.take_publications(10))
    core.handle(Drop(A, 1, KEYS[:1]), 0.0)
    work = core.blocks.outbox.take_removals(10)
    core.blocks.outbox.removed(work)
    assert core.blocks.outbox.take_removals(10) == []
    core.blocks.republish()
    assert core.blocks.outbox.take_removals(10) == work


def test_removals_of_two_records_of_one_key_are_both_kept(core):
    """Seed 4 of the simulator: the second once hid the first."""
    put(core, KEYS[:1])
    core.blocks.outbox.take_publications(10)
    core.handle(Drop(A, 1, KEYS[:1]), 0.0)
    put(core, KEYS[:1])
    core.blocks.outbox.take_publications(10)
    core.handle(Drop(A, 1, KEYS[:1]), 0.0)
    assert len(core.blocks.outbox.take_removals(10)) == 2


def test_a_value_larger_than_the_node_is_rejected_with_the_limit_and_the_rest_is_stored(core):
    event = Reserve(A, 1, KEYS[:2], [ARENA + 1, 5], 3, [0, 0], [0, 0], [None, b"abcde"], [0, 0])
    answers = body(core.handle(event, 0.0))
    assert str(ARENA) in answers[0].reason
    assert answers[1] is STORED


def test_when_every_slot_is_reserved_the_answer_says_so(core):
    reserve(core, KEYS[:8])
    assert body(reserve(core, KEYS[8:9])) == [NO_SPACE]


def test_a_client_may_not_reserve_beyond_its_limit(core, monkeypatch):
    monkeypatch.setattr("kvstore.core.node.RESERVATIONS_MAX", 2)
    answers = body(reserve(core, KEYS[:3]))
    assert "at most 2 a client" in answers[2].reason


def test_a_commit_of_somebody_elses_reservation_is_refused(core):
    grants = body(reserve(core, KEYS[:1], session=A))
    (answer,) = body(commit(core, grants, session=B))
    assert answer is NOT_HELD
    assert body(commit(core, grants, session=A)) == [STORED]


def test_a_commit_with_an_old_generation_is_refused(core):
    ((slot, generation, _),) = body(reserve(core, KEYS[:1]))
    assert body(commit(core, [(slot, generation - 1)]))[0] is NOT_HELD


def test_a_second_commit_is_refused(core):
    grants = body(reserve(core, KEYS[:1]))
    commit(core, grants)
    assert body(commit(core, grants))[0] is NOT_HELD


def test_an_abort_frees_the_slot_and_the_key(core):
    ((slot, generation, _),) = body(reserve(core, KEYS[:1]))
    effects = core.handle(Abort(A, 1, [(slot, generation)]), 0.0)
    assert effects.writes == [Mark(slot, SlotState.FREE, generation)]
    assert not effects.replies[0].after_publish
    assert isinstance(body(reserve(core, KEYS[:1], session=B))[0], Grant)


def test_a_dead_writer_loses_its_reservations_and_nothing_was_published(core):
    reserve(core, KEYS[:8], session=A)
    core.handle(SessionDead(A), 0.0)
    assert core.blocks.outbox.publications_pending == 0
    assert all(isinstance(a, Grant) for a in body(reserve(core, KEYS[:8], session=B)))


def test_a_client_that_is_back_keeps_what_it_holds_and_loses_what_it_never_heard_of(core):
    grants = body(reserve(core, KEYS[:2]))
    core.handle(SessionResumed(A, dict([grants[0][:2]]), {}), 0.0)
    assert body(commit(core, grants))[0] is STORED
    assert body(commit(core, grants))[1] is NOT_HELD


def test_a_client_that_is_back_keeps_as_many_pins_of_a_block_as_it_says(core):
    """It never heard of the second pin, or could not say that it let go of it."""
    commit(core, grants := body(reserve(core, KEYS[:1])))
    (slot, generation, _) = grants[0]
    for _ in range(2):
        core.handle(Pin(A, 1, KEYS[:1]), 0.0)
    core.handle(SessionResumed(A, {}, {slot: 1}), 0.0)
    assert core.blocks.allocator.slot(slot).pins == 1
    core.handle(Unpin(A, 1, [(slot, generation)]), 0.0)
    assert core.blocks.allocator.slot(slot).pins == 0
    assert not core.holds(A)


def test_a_pinned_block_is_not_evicted(core):
    put(core, KEYS[:8])
    core.handle(Pin(B, 1, KEYS[:1]), 0.0)
    for key in KEYS[8:40]:
        put(core, [key])
    assert body(reserve(core, KEYS[:1])) == [EXISTS]


def test_a_pinned_block_that_is_dropped_misses_at_once_and_keeps_its_slot_until_unpinned(core):
    ((slot, generation, _),) = grants = body(reserve(core, KEYS[:1]))
    commit(core, grants)
    core.handle(Pin(B, 1, KEYS[:1]), 0.0)
    effects = core.handle(Drop(A, 1, KEYS[:1]), 0.0)
    assert effects.writes == [Mark(slot, SlotState.FREE, generation)]
    others = [g[0] for g in body(reserve(core, KEYS[1:8]))]
    assert slot not in others
    assert body(reserve(core, KEYS[8:9])) == [NO_SPACE]
    core.handle(Unpin(B, 1, [(slot, generation)]), 0.0)
    assert body(reserve(core, KEYS[9:10]))[0][0] == slot


def test_a_dead_clients_pins_end(core):
    put(core, KEYS[:8])
    core.handle(Pin(B, 1, KEYS[:8]), 0.0)
    assert body(reserve(core, KEYS[8:9])) == [NO_SPACE]
    core.handle(SessionDead(B), 0.0)
    assert isinstance(body(reserve(core, KEYS[9:10]))[0], Grant)


def test_a_touched_block_outlives_one_that_was_not(core):
    put(core, [*KEYS[1:8][::-1], KEYS[0]])
    core.handle(Touch(B, KEYS[:1]), 0.0)
    put(core, KEYS[8:9])
    touched, untouched = body(reserve(core, KEYS[:2]))
    assert touched is EXISTS
    assert isinstance(untouched, Grant)


def test_a_clear_drops_the_namespace_and_leaves_the_others(core):
    put(core, KEYS[:2], namespace=1)
    put(core, KEYS[2:3], namespace=2)
    assert body(core.handle(Clear(A, 1, 1), 0.0)) == 2
    assert [row[0] for row in body(core.handle(Listing(A, 1, b"", 10), 0.0))] == [KEYS[2]]


def test_who_drops_blocks_hears_of_it_after_the_index(core):
    for event in (Drop(A, 1, KEYS[:1]), Clear(A, 1, 3), Reset(A, 1, 0, [3])):
        put(core, KEYS[:1])
        assert core.handle(event, 0.0).replies[0].after_publish
        assert KEYS[0] not in core.blocks.by_key


def test_a_block_being_written_while_its_namespace_is_cleared_is_not_stored(core):
    grants = body(reserve(core, KEYS[:1], namespace=1))
    core.handle(Clear(B, 1, 1), 0.0)
    (answer,) = body(commit(core, grants))
    assert "cleared" in answer.reason
    assert core.blocks.outbox.publications_pending == 0


def test_republish_brings_every_sealed_block_back_to_the_index_the_latest_first(core):
    put(core, KEYS[:3])
    core.blocks.outbox.published(core.blocks.outbox.take_publications(10))
    assert core.blocks.republish() == 3
    assert [key for key, _ in core.blocks.outbox.take_publications(10)] == KEYS[2::-1]


def test_stats_add_up(core):
    put(core, KEYS[:3])
    reserve(core, KEYS[3:5])
    stats = body(core.handle(Stat(A, 1), 4.0))
    assert (stats["blocks"], stats["block_bytes"], stats["reserved"]) == (3, 3 * 8192, 2)
    assert stats["oldest_reservation_s"] == 4.0


def test_a_listing_pages_through_all_keys_in_order(core):
    put(core, KEYS[:8])
    first = body(core.handle(Listing(A, 1, b"", 5), 0.0))
    rest = body(core.handle(Listing(A, 1, first[-1][0], 5), 0.0))
    assert [row[0] for row in [*first, *rest]] == sorted(KEYS[:8], key=place_of)


def fill_and_look(core, run, size=16 << 10):
    """Save one other block at a time until one of `run` goes; what is left of it."""
    for other in KEYS[100:]:
        put(core, [other], size=size)
        left = [key for key in run if key in core.blocks.by_key]
        if len(left) < len(run):
            return left
    raise AssertionError("nothing was evicted")


def pin_and_unpin(core, run):
    records = body(core.handle(Pin(B, 1, run), 0.0))
    core.handle(Unpin(B, 1, [slot_of(record) for record in records]), 0.0)


def pin_and_die(core, run):
    core.handle(Pin(B, 1, run), 0.0)
    core.handle(SessionDead(B), 0.0)


def save_inline(core, keys):
    size = 16 << 10
    reserve(core, keys, size=size, values=[bytes(size)] * len(keys))


@pytest.mark.parametrize(
    "use",
    [
        lambda core, run: None,
        lambda core, run: core.handle(Touch(A, run), 0.0),
        lambda core, run: reserve(core, run, size=16 << 10),
        lambda core, run: pin_and_unpin(core, run),
        lambda core, run: pin_and_die(core, run),
    ],
    ids=["saved", "touched", "found by a reserve", "unpinned", "unpinned by a death"],
)
@pytest.mark.parametrize("save", [put, save_inline], ids=["committed", "inline"])
def test_the_end_of_a_run_is_evicted_before_its_head(core, save, use):
    run = KEYS[:4]
    if save is put:
        put(core, run, size=16 << 10)
    else:
        save(core, run)
    use(core, run)
    assert fill_and_look(core, run) == run[:3]


def test_a_reserve_evicts_nothing_of_the_run_that_it_found(core):
    put(core, KEYS[:4], size=16 << 10)
    answers = body(reserve(core, [*KEYS[:2], KEYS[9]], size=16 << 10))
    assert answers[:2] == [EXISTS, EXISTS]
    assert {KEYS[0], KEYS[1]} <= set(core.blocks.by_key)


def test_generations_of_a_node_are_one_count_and_its_segment_says_first_how_far_it_goes(
    core, monkeypatch
):
    monkeypatch.setattr(blocks, "GENERATIONS_AHEAD", 2)
    seen, said = [], 0
    for i in range(40):
        effects = reserve(core, KEYS[i : i + 1], values=[bytes(8192)])
        for write in effects.writes:
            if isinstance(write, Bounds):
                said = write.generation
            elif isinstance(write, Mark) and write.state == SlotState.RESERVED:
                seen.append(write.generation)
                assert write.generation <= said
    assert seen == list(range(1, 41))


@pytest.mark.parametrize("sizes", [[4096, 20_000, 9000, 700], [8192]])
def test_what_a_restart_takes_for_never_used_was_never_used(sizes, monkeypatch):
    monkeypatch.setattr(blocks, "PAGES_AHEAD", 2)
    core = NodeCore(node_id=5, epoch=9, size_bytes=16 * ARENA)
    bounds = core.blocks.bounds
    for i in range(60):
        effects = reserve(core, KEYS[i : i + 1], size=sizes[i % len(sizes)])
        for write in effects.writes:
            if isinstance(write, Bounds):
                bounds = write
            elif isinstance(write, Mark) and write.state == SlotState.RESERVED:
                last = (write.slot_id * 4 + write.granule + write.size - 1) // 4
                below, above = last < bounds.used_below, write.slot_id >= bounds.used_from
                assert below or above
    assert bounds.used_from - bounds.used_below > 0


def test_with_a_secret_each_record_that_goes_to_the_index_is_signed_for_its_own_key():
    signer = RecordSigner(b"a secret of the tenant's", "kv:")
    core = NodeCore(node_id=5, epoch=9, size_bytes=ARENA, signer=signer)
    put(core, KEYS[:3])
    records = core.blocks.outbox.take_publications(9)
    assert [key for key, _ in records] == KEYS[2::-1]
    assert all(signer.right(key, record) for key, record in records)
    assert not signer.right(KEYS[0], records[0][1])
