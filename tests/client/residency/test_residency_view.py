"""What a router knows of one node's blocks, message by message."""

from __future__ import annotations

import pytest

from kvstore.client.residency import view as module
from kvstore.client.residency.view import EventsMessage, NodeView, message_of
from kvstore.errors import PeerError
from kvstore.limits import EVENTS_ANSWER_S, EVENTS_SILENT_S
from kvstore.protocol.block_events import (
    END,
    BlockChanges,
    Source,
    pack_changes,
    sequence_bytes,
    topic_of,
)

NODE = Source("host", "node", 5)
LATER_START = NODE._replace(epoch=6)
NOW = 100.0


def key(number: int) -> bytes:
    return bytes([number]) * 32


def keys(*numbers: int) -> set[bytes]:
    return set(map(key, numbers))


def held(view: NodeView) -> set[bytes]:
    return set(view.keys.tolist())


def stored(sequence: int, *numbers: int, source: Source = NODE) -> EventsMessage:
    return EventsMessage(source, sequence, [BlockChanges(False, [], list(map(key, numbers)))])


def part(sequence: int, *numbers: int, cleared: bool = False, source: Source = NODE) -> list[bytes]:
    changes = BlockChanges(cleared, [], list(map(key, numbers)))
    return [topic_of(source), sequence_bytes(sequence), pack_changes(0.0, changes, "CPU")]


LAST = [topic_of(NODE), END, b""]


def in_sync(*numbers: int, sequence: int = 7, now: float = NOW) -> NodeView:
    """A view of a node that has these blocks."""
    view = NodeView()
    assert view.overdue(now) == 0
    assert view.answered(part(sequence, *numbers, cleared=True), now) is None
    assert view.answered(LAST, now) is None
    assert (held(view), view.in_sync(now), view.snapshots) == (keys(*numbers), True, 1)
    return view


def test_at_first_everything_is_asked_for_and_nothing_is_known() -> None:
    view = NodeView()
    assert (view.gaps, view.snapshots, held(view)) == (0, 0, set())
    assert not view.alive(NOW)
    assert not view.in_sync(NOW)
    assert view.published(stored(3, 1), NOW) is None
    assert (held(view), view.alive(NOW), view.in_sync(NOW)) == (set(), True, False)
    assert view.overdue(NOW) == 0
    assert view.overdue(NOW + EVENTS_ANSWER_S * 0.99) is None, "the answer is awaited"
    assert view.overdue(NOW + EVENTS_ANSWER_S) == 0
    assert view.gaps == 0


def test_an_answer_to_nothing_and_one_in_other_parts_are_refused() -> None:
    view = NodeView()
    with pytest.raises(PeerError, match="not asked for"):
        view.answered(LAST, NOW)
    with pytest.raises(PeerError, match="not asked for"):
        in_sync(1).answered(part(8, 2), NOW)
    view.overdue(NOW)
    with pytest.raises(PeerError, match="not asked for"):
        view.answered(LAST[:2], NOW)
    with pytest.raises(PeerError, match="not asked for"):
        view.answered([*LAST, b""], NOW)
    assert not view.alive(NOW), "that was no node"


def test_each_part_of_an_answer_puts_off_what_is_overdue() -> None:
    view = NodeView()
    assert view.overdue(NOW) == 0
    late = NOW + EVENTS_ANSWER_S - 0.5
    view.answered(part(7, 1, cleared=True), late)
    assert view.alive(late + EVENTS_SILENT_S)
    assert not view.alive(late + EVENTS_SILENT_S + 0.01)
    assert view.overdue(NOW + EVENTS_ANSWER_S) is None
    assert view.overdue(late + EVENTS_ANSWER_S) == 0


def test_a_snapshot_takes_the_place_of_all_keys_when_it_is_complete() -> None:
    view = in_sync(1, 2)
    assert view.published(stored(20, 9), NOW) == 8
    assert held(view) == keys(1, 2), "those of before stand"
    view.answered(part(20, 3, cleared=True), NOW)
    view.answered(part(20, 4), NOW)
    assert (held(view), view.in_sync(NOW)) == (keys(1, 2), False)
    assert view.overdue(NOW) is None
    view.answered(LAST, NOW)
    assert (held(view), view.snapshots, view.gaps) == (keys(3, 4), 2, 1)
    assert view.published(stored(21, 5), NOW) is None
    assert held(view) == keys(3, 4, 5)


def test_a_snapshot_is_followed_by_what_came_after_it_in_the_same_answer() -> None:
    view = NodeView()
    view.overdue(NOW)
    view.answered(part(7, 1, cleared=True), NOW)
    assert view.answered(part(8, 2), NOW) is None
    assert view.answered(part(9, 3), NOW) is None
    with pytest.raises(PeerError, match="lacks number 10"):
        view.answered(part(11, 4), NOW)
    view.answered(LAST, NOW)
    assert held(view) == keys(1, 2, 3)
    assert view.published(stored(10, 5), NOW) is None
    assert held(view) == keys(1, 2, 3, 5)


def test_what_was_missed_is_asked_for_and_added() -> None:
    view = in_sync(1, sequence=7)
    assert view.published(stored(8, 2), NOW) is None
    assert view.published(stored(11, 5), NOW) == 9, "two are missing"
    assert (view.gaps, view.in_sync(NOW), held(view)) == (1, False, keys(1, 2))
    assert view.published(stored(12, 6), NOW) is None
    for sequence in (9, 10, 11):
        assert view.answered(part(sequence, sequence), NOW) is None
    assert held(view) == keys(1, 2, 9, 10, 11)
    assert view.answered(LAST, NOW) is None
    assert held(view) == keys(1, 2, 9, 10, 11, 6), "what was said meanwhile follows"
    assert (view.snapshots, view.in_sync(NOW)) == (1, True)


def test_what_is_in_sync_is_not_asked_for_and_is_so_only_while_it_is_heard() -> None:
    view = in_sync(1)
    assert view.overdue(NOW + 10 * EVENTS_ANSWER_S) is None
    assert view.in_sync(NOW + EVENTS_SILENT_S)
    assert not view.in_sync(NOW + EVENTS_SILENT_S + 0.01)


def test_a_sign_of_life_in_an_answer_changes_no_key() -> None:
    view = in_sync(1, sequence=7)
    view.published(stored(10, 9), NOW)
    assert view.answered(part(8), NOW) is None
    view.answered(LAST, NOW)
    assert held(view) == keys(1)


def test_an_answer_that_repeats_what_is_known_is_not_applied_again() -> None:
    view = in_sync(1, sequence=7)
    view.published(stored(10, 9), NOW)
    assert view.answered(part(7, 5), NOW) is None
    view.answered(part(8, 2), NOW)
    view.answered(LAST, NOW)
    assert held(view) == keys(1, 2)


def test_what_was_said_before_is_not_applied_again() -> None:
    view = in_sync(1, 2, sequence=7)
    changes = [BlockChanges(False, [key(1)], [])]
    assert view.published(EventsMessage(NODE, 7, changes), NOW) is None
    assert held(view) == keys(1, 2)
    assert view.published(EventsMessage(NODE, 8, changes), NOW) is None
    assert held(view) == keys(2)
    assert view.gaps == 0


def test_what_waited_and_does_not_follow_either_is_asked_for() -> None:
    view = in_sync(1, sequence=7)
    assert view.published(stored(9, 9), NOW) == 8
    for sequence in (9, 12):
        view.published(stored(sequence, sequence), NOW)
    view.answered(part(8, 8), NOW)
    assert view.answered(LAST, NOW) == 10
    assert (held(view), view.gaps) == (keys(1, 8, 9), 2)
    assert not view.in_sync(NOW)


def test_another_start_of_the_node_is_asked_for_everything() -> None:
    view = in_sync(1, sequence=7)
    assert view.published(stored(8, 2, source=LATER_START), NOW) == 0
    assert (view.gaps, held(view)) == (1, keys(1))
    with pytest.raises(PeerError, match="comes from"):
        view.answered(part(8, 2, source=LATER_START), NOW)
    view.answered(part(8, 3, cleared=True, source=LATER_START), NOW)
    with pytest.raises(PeerError, match="comes from"):
        view.answered(part(8, 4), NOW)
    view.answered(LAST, NOW)
    assert (held(view), view.source) == (keys(3), LATER_START)
    assert view.published(stored(9, 4, source=LATER_START), NOW) is None
    assert held(view) == keys(3, 4)


def test_a_snapshot_that_begins_anew_forgets_what_it_said_of_another_start() -> None:
    view = NodeView()
    view.overdue(NOW)
    view.answered(part(7, 1, cleared=True), NOW)
    view.answered(part(3, 2, cleared=True, source=LATER_START), NOW)
    view.answered(LAST, NOW)
    assert (held(view), view.source) == (keys(2), LATER_START)
    assert view.published(stored(4, 3, source=LATER_START), NOW) is None


def test_a_second_clearing_in_one_snapshot_is_one_of_its_messages() -> None:
    view = NodeView()
    view.overdue(NOW)
    view.answered(part(7, 1, cleared=True), NOW)
    with pytest.raises(PeerError, match="lacks number 8"):
        view.answered(part(9, 2, cleared=True), NOW)
    view.answered(part(8, 2, cleared=True), NOW)
    view.answered(LAST, NOW)
    assert held(view) == keys(2)
    assert view.published(stored(9, 3), NOW) is None


def test_a_snapshot_that_broke_off_is_not_gone_on_with() -> None:
    view = in_sync(1)
    assert view.published(stored(20, 9), NOW) == 8
    view.answered(part(20, 3, cleared=True), NOW)
    assert view.overdue(NOW + EVENTS_ANSWER_S) == 0
    view.answered(part(21, 4, cleared=True), NOW + 10)
    view.answered(LAST, NOW + 10)
    assert held(view) == keys(4)


def test_a_message_clears_first_then_removes_then_adds_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view = in_sync(1, 2, sequence=7)
    changes = [
        BlockChanges(True, [], []),
        BlockChanges(False, [key(4)], [key(4), key(5)]),
        BlockChanges(False, [key(5)], [key(6)]),
    ]
    view.published(EventsMessage(NODE, 8, changes), NOW)
    assert held(view) == keys(4, 6)
    monkeypatch.setattr(module, "EVENT_BLOCKS_MAX", 3)
    view.published(stored(9, 7), NOW)
    assert held(view) == keys(4, 6, 7)
    view.published(stored(10, 8), NOW)
    assert held(view) == keys(4, 6, 7), "no more are kept"


def test_only_so_much_waits_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVENT_MESSAGES_WAITING_MAX", 2)
    view = NodeView()
    for sequence in (8, 9, 10):
        view.published(stored(sequence, sequence), NOW)
    view.overdue(NOW)
    view.answered(part(8, 8, cleared=True), NOW)
    view.answered(LAST, NOW)
    assert held(view) == keys(8, 9, 10)
    for sequence in (13, 14, 15):
        view.published(stored(sequence, sequence), NOW)
    view.answered(part(12, 12, cleared=True), NOW)
    assert view.answered(LAST, NOW) == 13


def test_what_no_node_sends_is_refused() -> None:
    whole = part(1, 2)
    for at in range(3):
        broken = [*whole[:at], b"?", *whole[at + 1 :]]
        with pytest.raises(PeerError):
            message_of(*broken)
    assert message_of(*whole) == stored(1, 2)
