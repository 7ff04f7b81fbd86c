"""What the index has yet to hear: nothing that changed meanwhile counts as told."""

from kvstore.core.outbox import Outbox
from kvstore.core.slots import Slot

KEY = bytes(range(32))


def sealed(record: bytes) -> Slot:
    slot = Slot(0, 4)
    slot.key, slot.record = KEY, record
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
    other = sealed(b"other")
    other.key = KEY[::-1]
    outbox.publish(other)
    assert outbox.awaited == 1
    assert outbox.take_publications(10) == [(other.key, b"other"), *work]


def test_beyond_the_limit_the_oldest_removals_are_dropped_and_counted():
    outbox = Outbox(2)
    for record in (b"1", b"2", b"3"):
        outbox.remove(KEY, record)
    assert outbox.take_removals(10) == [(KEY, b"2"), (KEY, b"3")]
    assert outbox.forgotten == 1
