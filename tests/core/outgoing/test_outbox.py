"""What the index has yet to hear: nothing that changed meanwhile counts as told."""

import pytest

from kvstore.core.memory.slots import Slot
from kvstore.core.outgoing import outbox as module
from kvstore.core.outgoing.outbox import Outbox

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))


def sealed(record: bytes, key: bytes = KEY) -> Slot:
    slot = Slot(0, 4)
    slot.key, slot.record = key, record
    return slot


def resealed_while_published() -> tuple[Outbox, list[tuple[bytes, bytes]]]:
    """The block of a key was dropped and saved anew while the index took its older record."""
    outbox, old = Outbox(10), sealed(b"old")
    outbox.publish(old)
    work = outbox.take_publications(10)
    outbox.withdraw(old)
    outbox.publish(sealed(b"new"))
    return outbox, work


def test_a_block_sealed_anew_while_its_older_record_was_published_stays_pending():
    outbox, work = resealed_while_published()
    outbox.published(work)
    assert outbox.awaited == 1
    assert outbox.take_publications(10) == [(KEY, b"new")]
    assert outbox.take_removals(10) == [(KEY, b"old")]


def test_answers_wait_for_a_block_sealed_anew_while_its_older_record_was_postponed():
    outbox, work = resealed_while_published()
    outbox.postpone(work)
    assert outbox.awaited == 1


def test_what_is_postponed_stays_pending_behind_all_else_and_nobody_waits_for_it():
    outbox = Outbox(10)
    outbox.publish(sealed(b"away"))
    work = outbox.take_publications(10)
    outbox.postpone(work)
    outbox.publish(sealed(b"other", OTHER))
    assert outbox.awaited == 1
    assert outbox.take_publications(10) == [(OTHER, b"other"), *work]


def test_beyond_the_limit_the_oldest_removals_are_dropped_and_counted():
    outbox = Outbox(2)
    for record in (b"1", b"2", b"3"):
        outbox.remove(KEY, record)
    assert outbox.take_removals(10) == [(KEY, b"2"), (KEY, b"3")]
    assert outbox.forgotten == 1


def test_what_is_postponed_again_lets_the_others_that_nobody_waits_for_go_first():
    outbox = Outbox(10)
    outbox.publish_again(sealed(b"away"))
    outbox.publish_again(sealed(b"other", OTHER))
    outbox.postpone([(KEY, b"away")])
    assert outbox.take_publications(10) == [(OTHER, b"other"), (KEY, b"away")]


def test_what_is_gone_is_not_published_and_leaves_no_record_to_remove():
    outbox = Outbox(10)
    for publish in (outbox.publish, outbox.publish_again):
        slot = sealed(b"gone")
        publish(slot)
        outbox.withdraw(slot)
        outbox.postpone([(KEY, b"gone")])
        assert outbox.take_publications(10) == []
        assert outbox.take_removals(10) == []


def test_what_somebody_waits_for_is_published_once_though_the_index_lost_everything():
    outbox, slot = Outbox(10), sealed(b"new")
    outbox.publish(slot)
    outbox.publish_again(slot)
    assert (outbox.awaited, outbox.publications_pending) == (1, 1)
    assert outbox.take_publications(10) == [(KEY, b"new")]


def test_after_a_failover_just_the_latest_removals_are_repeated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "REMOVALS_REPEATED_MAX", 2)
    outbox = Outbox(10)
    for record in (b"1", b"2", b"1", b"3"):
        outbox.removed([(KEY, record)])
    outbox.remove_again()
    assert outbox.take_removals(10) == [(KEY, b"1"), (KEY, b"3")]


def test_the_record_of_a_copy_takes_the_place_of_the_removal_of_the_one_before():
    outbox, slot = Outbox(10), sealed(b"memory")
    outbox.publish(slot)
    outbox.published(outbox.take_publications(10))
    outbox.withdraw(slot)
    outbox.publish_copy(KEY, b"disk", b"memory")
    assert outbox.take_removals(10) == []
    assert outbox.take_publications(10) == [(KEY, b"disk")]
    assert outbox.awaited == 0
    outbox.published([(KEY, b"disk")])
    assert outbox.publications_pending == 0


@pytest.mark.parametrize("how", ["it left the disk", "it was saved anew"])
def test_where_a_copys_record_was_not_taken_the_one_before_is_removed_after_all(how):
    outbox, slot = Outbox(10), sealed(b"memory")
    outbox.publish(slot)
    outbox.published(outbox.take_publications(10))
    outbox.withdraw(slot)
    outbox.publish_copy(KEY, b"disk", b"memory")
    if how == "it was saved anew":
        outbox.publish(sealed(b"new"))
        assert outbox.take_publications(10) == [(KEY, b"new")]
        assert outbox.take_removals(10) == [(KEY, b"memory")]
    else:
        outbox.withdraw_copy(KEY, b"disk")
        assert outbox.take_publications(10) == []
        assert sorted(outbox.take_removals(10)) == [(KEY, b"disk"), (KEY, b"memory")]


def test_copies_go_last_and_beyond_the_limit_a_round_over_all_is_due(monkeypatch):
    monkeypatch.setattr(module, "COPIES_MAX", 2)
    outbox = Outbox(10)
    for i in range(3):
        outbox.publish_copy(bytes([i]) * 32, b"%d" % i)
    assert outbox.rounds_due == 1
    outbox.publish(sealed(b"memory"))
    outbox.publish_again(sealed(b"again", OTHER))
    for only_copies, records in (False, [b"memory", b"again"]), (True, [b"1", b"2"]):
        assert outbox.only_copies == only_copies
        taken = outbox.take_publications(10)
        assert [record for _, record in taken] == records
        outbox.published(taken)


def test_copies_whose_part_of_the_index_is_away_go_behind_the_others():
    outbox = Outbox(10)
    outbox.publish_copy(KEY, b"1")
    outbox.publish_copy(OTHER, b"2")
    outbox.postpone([(KEY, b"1")])
    assert outbox.take_publications(10) == [(OTHER, b"2"), (KEY, b"1")]
