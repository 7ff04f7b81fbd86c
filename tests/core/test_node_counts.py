"""What a node counts, and the limits at which its answers change."""

import pytest

from kvstore.core.events import (
    NOBODY,
    Abort,
    Clear,
    Commit,
    Corrupt,
    Drop,
    Explain,
    Listing,
    Pin,
    Reserve,
    Reset,
    SessionDead,
    SessionResumed,
    Stat,
    Suspect,
    Touch,
    Unpin,
)
from kvstore.core.holdings import FORMER
from kvstore.core.node import NodeCore
from kvstore.keys import Namespace
from kvstore.limits import CHECKED_BYTES_PER_S_MAX, Limits
from kvstore.types import EXISTS, IN_PROGRESS, STORED

SIZE = 64 << 10
KEYS = Namespace.named("test").block_keys(range(40), 1)
A, B = 1, 2


class Driven:
    def __init__(self, **limits):
        self.core = NodeCore(node_id=5, epoch=9, size_bytes=SIZE, limits=Limits(**limits))

    def ask(self, event, now=0.0):
        effects = self.core.handle(event, now)
        return effects.replies[0].body if effects.replies else None

    def reserve(self, *keys, size=8192, session=A, space=3, now=0.0):
        n = len(keys)
        zeros = [0] * n
        return self.ask(
            Reserve(session, 1, keys, [size] * n, space, zeros, zeros, [None] * n, zeros), now
        )

    def put(self, *keys, checksum=7, **options):
        for key in keys:
            ((slot, generation, _),) = self.reserve(key, **options)
            assert self.ask(Commit(A, 1, [(slot, generation, checksum)])) == [STORED]


@pytest.fixture
def driven():
    return Driven()


def test_each_thing_that_happens_is_counted_once(driven):
    driven.put(*KEYS[:2])
    assert driven.reserve(KEYS[0]) == [EXISTS]
    ((slot, generation, _),) = driven.reserve(KEYS[2])
    assert driven.reserve(KEYS[2], session=B) == [IN_PROGRESS]
    driven.ask(Commit(A, 1, [(slot, generation + 1, 0)]))
    driven.reserve(KEYS[3], size=SIZE + 1)
    assert driven.ask(Clear(A, 1, 3)) == 2
    driven.ask(Commit(A, 1, [(slot, generation, 0)]))
    driven.reserve(KEYS[4], KEYS[5])
    driven.ask(SessionDead(A))
    driven.put(*KEYS[6:15])
    last = driven.core.blocks.by_key[KEYS[14]]
    driven.ask(Corrupt(last.slot_id, last.generation + 1))
    assert KEYS[14] in driven.core.blocks.by_key
    driven.ask(Corrupt(last.slot_id, last.generation))
    driven.ask(Corrupt(last.slot_id, last.generation))
    assert driven.core.blocks.counts == {
        "stored": 11,
        "exists": 1,
        "in_progress": 1,
        "rejected": 3,
        "evicted": 1,
        "expired": 0,
        "moved": 0,
        "retentions": 0,
        "retentions_refused": 0,
        "retentions_broken": 0,
        "aborted": 3,
        "dropped": 3,
        "corrupt": 1,
        "writers_died": 2,
        "tasks_failed": 0,
        "recovered": 0,
        "recovery_dropped": 0,
        "repaired": 0,
    }


def test_a_value_is_at_least_a_byte_and_at_most_what_the_node_takes(driven):
    most = driven.core.blocks.allocator.value_bytes_max
    for size in (0, most + 1):
        (answer,) = driven.reserve(KEYS[0], size=size)
        assert answer.reason == f"size_bytes={size}: must be 1 to {most}"
    driven.put(KEYS[0], size=1)
    driven.ask(Drop(A, 1, KEYS[:1]))
    driven.put(KEYS[1], size=most)


def test_a_client_holds_something_while_it_has_reservations_or_pins(driven):
    assert not driven.core.holds(A)
    ((slot, generation, _),) = driven.reserve(KEYS[0])
    assert driven.core.holds(A)
    driven.ask(Commit(A, 1, [(slot, generation, 0)]))
    assert not driven.core.holds(A)
    driven.ask(Pin(A, 1, KEYS[:1]))
    assert driven.core.holds(A)
    assert not driven.core.holds(B)
    driven.ask(Unpin(A, 1, [(slot, generation + 1)]))
    assert driven.core.holds(A), "of another generation"
    driven.ask(Unpin(B, 1, [(slot, generation)]))
    assert driven.core.holds(A), "of another client"
    driven.ask(Unpin(A, 1, [(slot, generation)]))
    assert not driven.core.holds(A)


def test_a_block_that_a_save_finds_counts_as_used(driven):
    driven.put(*KEYS[:8])
    assert driven.reserve(KEYS[0]) == [EXISTS]
    driven.put(KEYS[8])
    assert KEYS[0] in driven.core.blocks.by_key
    assert KEYS[1] not in driven.core.blocks.by_key


def test_of_two_blocks_that_a_save_finds_the_later_is_evicted_first(driven):
    driven.put(*KEYS[:8])
    assert driven.reserve(KEYS[0], KEYS[1]) == [EXISTS, EXISTS]
    driven.put(*KEYS[8:15])
    assert KEYS[0] in driven.core.blocks.by_key
    assert KEYS[1] not in driven.core.blocks.by_key


def test_what_is_being_written_is_not_among_the_published(driven):
    driven.put(KEYS[0])
    driven.core.blocks.outbox.published(driven.core.blocks.outbox.take_publications(1))
    driven.ask(Drop(A, 1, KEYS[:1]))
    driven.reserve(*KEYS[1:9])
    assert driven.core.blocks.take_published(9) == []


def test_a_client_may_pin_so_many_blocks_and_each_of_them_again():
    driven = Driven(pins_per_client=2)
    driven.put(*KEYS[:3])
    granted = driven.ask(Pin(A, 1, KEYS[:3]))
    assert [type(answer) for answer in granted] == [bytes, bytes, str]
    assert granted[2] == "pins=2: at most this many a client"
    assert [type(answer) for answer in driven.ask(Pin(B, 1, KEYS[:3]))] == [bytes, bytes, str]


def test_a_reset_of_some_namespaces_leaves_the_others_and_one_of_none_leaves_nothing(driven):
    driven.put(KEYS[0], space=3)
    driven.put(KEYS[1], space=4)
    driven.put(KEYS[2], space=5)
    assert driven.ask(Reset(A, 1, 100, [3, 5])) == (100, 2)
    assert set(driven.core.blocks.by_key) == {KEYS[1]}
    assert driven.ask(Reset(NOBODY, 1, 100, [4])) == (100, 0), "it is known"
    assert driven.ask(Reset(NOBODY, 1, 101, [])) == (101, 1)
    assert not driven.core.blocks.by_key
    number, dropped = driven.ask(Reset(A, 1, 7, [4]))
    assert (number > 101, dropped) == (True, 0)


def test_a_suspect_is_checked_if_it_is_sealed_and_has_a_checksum(driven):
    driven.put(KEYS[0], checksum=9)
    driven.put(KEYS[1], checksum=0)
    driven.reserve(KEYS[2])
    (check,) = driven.core.handle(Suspect(B, KEYS[:4]), 0.0).checks
    slot = driven.core.blocks.by_key[KEYS[0]]
    assert check == (slot.slot_id, slot.generation, slot.offset, 8192, 9)
    asked = CHECKED_BYTES_PER_S_MAX // 8192 + 2
    checks = driven.core.handle(Suspect(B, KEYS[:1] * asked), 0.0).checks
    assert len(checks) < asked, "a bounded number of bytes each second"


def test_a_client_that_is_back_keeps_a_reservation_of_the_same_generation_alone(driven):
    ((one, generation, _), (other, _, _)) = driven.reserve(*KEYS[:2])
    driven.ask(SessionResumed(A, {one: generation, other: 99}, {}))
    assert driven.core.blocks.counts["aborted"] == 1
    assert set(driven.core.blocks.by_key) == {KEYS[0]}
    driven.put(KEYS[3])
    block = driven.core.blocks.by_key[KEYS[3]]
    for _ in range(3):
        driven.ask(Pin(A, 1, [KEYS[3]]))
    driven.ask(SessionResumed(A, {one: generation}, {block.slot_id: 2}))
    assert block.pins == 2
    driven.ask(SessionResumed(A, {one: generation}, {block.slot_id: 5}))
    assert block.pins == 2, "no more than it had"
    driven.ask(SessionResumed(A, {one: generation}, {}))
    assert block.pins == 0
    assert driven.core.holds(A)


def test_what_is_held_is_told_with_its_age_and_not_listed(driven):
    driven.put(KEYS[0])
    driven.reserve(KEYS[1], now=5.0)
    driven.reserve(KEYS[2], now=6.0, session=B)
    driven.ask(Pin(A, 1, KEYS[:1]))
    said = driven.ask(Stat(A, 1), 8.0)
    assert (said["reserved"], said["oldest_reservation_s"], said["pinned"]) == (2, 3.0, 1)
    assert (said["blocks"], said["block_bytes"], said["quarantined"]) == (1, 8192, 0)
    assert [row[0] for row in driven.ask(Listing(A, 1, b"", 9), 8.0)] == KEYS[:1]


def test_what_clients_of_a_former_start_hold_is_in_quarantine(driven):
    driven.put(KEYS[0], KEYS[1])
    driven.ask(Pin(FORMER, 1, KEYS[:2]))
    driven.reserve(KEYS[2], session=FORMER)
    assert driven.ask(Stat(A, 1))["quarantined"] == 3


def test_a_block_is_unpinned_as_often_as_it_was_pinned(driven):
    driven.put(KEYS[0])
    block = driven.core.blocks.by_key[KEYS[0]]
    item = (block.slot_id, block.generation)
    driven.ask(Pin(A, 1, [KEYS[0]] * 3))
    for left in (2, 1, 0, 0):
        driven.ask(Unpin(A, 1, [item, (4321, 1)]))
        assert block.pins == left
        assert driven.core.holds(A) == bool(left)
        assert driven.ask(Stat(A, 1))["pinned"] == bool(left)
    driven.ask(Pin(A, 1, KEYS[:1]))
    driven.ask(SessionResumed(A, {}, {}))
    assert driven.ask(Stat(A, 1))["pinned"] == 0
    driven.ask(SessionResumed(B, {1: 1}, {1: 1}))
    assert not driven.core.holds(B)


def test_what_is_not_a_sealed_block_is_not_corrupt(driven):
    ((slot, generation, _),) = driven.reserve(KEYS[0])
    driven.ask(Corrupt(slot, generation))
    driven.ask(Corrupt(4321, 1))
    assert driven.core.blocks.counts["corrupt"] == 0
    assert driven.ask(Commit(A, 1, [(slot, generation, 0)])) == [STORED]


def test_what_is_being_written_is_not_checked_for_the_checksum_of_the_slots_former_block(driven):
    driven.put(KEYS[0], checksum=9)
    before = driven.core.blocks.by_key[KEYS[0]].slot_id
    driven.ask(Drop(A, 1, KEYS[:1]))
    ((slot, _, _),) = driven.reserve(KEYS[1])
    assert slot == before
    assert driven.core.handle(Suspect(B, KEYS[1:2]), 0.0).checks == []


def test_what_is_not_there_or_is_being_written_is_not_pinned(driven):
    driven.reserve(KEYS[0])
    assert driven.ask(Pin(B, 1, KEYS[:2])) == [None, None]
    assert not driven.core.holds(B)


def test_the_end_of_a_client_that_held_nothing_changes_nothing(driven):
    driven.put(KEYS[0])
    driven.ask(SessionDead(B))
    assert driven.core.blocks.counts["writers_died"] == 0
    assert set(driven.core.blocks.by_key) == {KEYS[0]}


def test_what_is_being_written_is_not_used_by_a_touch(driven):
    ((slot, generation, _),) = driven.reserve(KEYS[0], now=1.0)
    driven.ask(Touch(B, KEYS[:1]), 5.0)
    driven.ask(Commit(A, 1, [(slot, generation, 0)]), 6.0)
    (row,) = driven.ask(Listing(A, 1, b"", 9), 8.0)
    assert row[6] == 7.0


def test_an_answer_that_changes_no_record_does_not_wait_for_the_index(driven):
    driven.put(KEYS[0])
    for event in (
        Stat(A, 1),
        Listing(A, 1, b"", 9),
        Pin(A, 1, KEYS[:1]),
        Unpin(A, 1, [(0, 1)]),
        Abort(A, 1, [(0, 1)]),
        Explain(A, 1, KEYS[:1]),
        Reserve(A, 1, KEYS[:2], [8192] * 2, 3, [0] * 2, [0] * 2, [None] * 2, [0] * 2),
    ):
        (reply,) = driven.core.handle(event, 0.0).replies
        assert not reply.after_publish


def test_an_answer_to_what_changes_a_record_waits_for_the_index(driven):
    driven.put(KEYS[0])
    ((slot, generation, _),) = driven.reserve(KEYS[1])
    for event in (
        Commit(A, 1, [(slot, generation, 0)]),
        Reserve(A, 1, KEYS[2:4], [1] * 2, 3, [0] * 2, [0] * 2, [b"v", None], [0] * 2),
        Drop(A, 1, KEYS[:1]),
        Clear(A, 1, 3),
        Reset(A, 1, 1, [3]),
    ):
        (reply,) = driven.core.handle(event, 0.0).replies
        assert reply.after_publish


def test_a_value_that_travels_in_the_request_is_stored_at_once_and_counted(driven):
    zeros = [0] * 2
    answers = driven.ask(Reserve(A, 1, KEYS[:2], [1] * 2, 3, zeros, zeros, [b"v", b"w"], zeros))
    assert answers == [STORED, STORED]
    assert driven.core.blocks.counts["stored"] == 2
    assert not driven.core.holds(A)
