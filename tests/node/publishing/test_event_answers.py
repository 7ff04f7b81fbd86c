"""What listeners to a node's events have asked for and not taken is bounded."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.limits import (
    EVENT_ANSWER_TAKEN_S,
    EVENT_ANSWERS_MAX,
    EVENT_MESSAGES_WAITING_MAX,
    EVENT_REPLAYS_MAX,
)
from kvstore.node.publishing import event_answers
from kvstore.node.publishing.event_answers import Answers, EventMessage, Snapshot
from kvstore.protocol.block_events import BlockChanges, sequence_of

SNAPSHOT = Snapshot(7, 0.0, [bytes([i]) * 32 for i in range(100)])


class Connected:
    """How a listener asks."""

    def __init__(self) -> None:
        self.gone = False
        self.hung_up = 0

    def hang_up(self) -> None:
        self.hung_up += 1


CONNECTED = Connected()


class Listeners:
    """What each was sent, and which have taken it."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.now = 100.0
        self.trackers: list[Any] = []
        self.sent: list[list[bytes]] = []
        self.lasts: list[list[bytes]] = []

    def ask(self, name: bytes, start: int = 0, origin: Any = CONNECTED) -> bool:
        """Whether it was answered, with a snapshot where one is needed."""
        before = len(self.answered)
        self.answers.asked([name, b""], start, origin)
        self.give()
        if self.answers.needs_snapshot:
            self.renew()
        return name in self.answered[before:]

    def renew(self, snapshot: Snapshot = SNAPSHOT) -> None:
        self.answers.needs_snapshot = False
        self.answers.renew(snapshot)
        self.give()

    def give(self) -> None:
        self.answers.give(self.sent.append, self._last, self.now)

    @property
    def answered(self) -> list[bytes]:
        """Who, one after the other."""
        return [parts[0] for parts in self.lasts]

    def sequences(self, name: bytes) -> set[int]:
        """The numbers of all that it was sent."""
        return {sequence_of(parts[-2]) for parts in self.sent if parts[0] == name}

    def publish(self, number: int) -> None:
        self.answers.keep(EventMessage(number, 0.0, BlockChanges(False, [], [])), b"")

    def _last(self, parts: list[bytes]) -> Any:
        self.lasts.append(parts)
        self.trackers.append(SimpleNamespace(done=False))
        return self.trackers[-1]


def given(listeners: Listeners) -> Any:
    return listeners.answers._going


def waiting(listeners: Listeners) -> Any:
    return listeners.answers._waiting


@pytest.fixture
def listeners() -> Listeners:
    listeners = Listeners(Answers(b"topic", "CPU"))
    for number in range(SNAPSHOT.sequence + 1):
        listeners.publish(number)
    return listeners


def test_what_was_not_taken_is_bounded_in_all_and_told_once(
    listeners: Listeners, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert listeners.ask(b"first")
    (going,) = given(listeners)
    monkeypatch.setattr(event_answers, "EVENT_ANSWER_BYTES_MAX", 3 * going.size_bytes)
    monkeypatch.setattr(event_answers, "EVENT_REPLAYS_MAX", 4)
    with caplog.at_level(logging.WARNING, "kvstore.node"):
        answered = [listeners.ask(b"%d" % i) for i in range(10)]
    assert answered == [True] * 2 + [False] * 8
    assert listeners.answers.dropped == 4
    assert [record.message for record in caplog.records] == [
        "a question of a listener to events is not answered: 4 wait, 0 of them its own; "
        f"3 answers of {3 * going.size_bytes} bytes were not taken yet"
    ]
    listeners.trackers[1].done = True
    assert not listeners.ask(b"too late"), "others came before"
    assert listeners.answered[3:] == [b"2"]
    for tracker in listeners.trackers:
        tracker.done = True
    listeners.give()
    assert listeners.answered[4:] == [b"3", b"4", b"5"]
    assert listeners.answers.stuck is False


def test_that_it_is_full_again_is_told_again(
    listeners: Listeners, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_answers, "EVENT_ANSWER_BYTES_MAX", 1)
    monkeypatch.setattr(event_answers, "EVENT_REPLAYS_MAX", 1)
    for _ in range(2):
        for name in (b"one", b"two", b"three", b"four"):
            listeners.ask(name)
        while given(listeners):
            listeners.trackers[-1].done = True
            listeners.give()
    assert listeners.answers.dropped == 4
    assert len(caplog.records) == 2


def test_one_listener_has_few_answers_at_a_time(listeners: Listeners) -> None:
    asked = [listeners.ask(b"one") for _ in range(EVENT_ANSWERS_MAX + 3)]
    assert asked == [True] * EVENT_ANSWERS_MAX + [False] * 3
    assert listeners.ask(b"other")
    listeners.trackers[0].done = True
    assert listeners.ask(b"one")


def test_questions_that_come_together_have_no_more_answers(listeners: Listeners) -> None:
    assert listeners.ask(b"one")
    for _ in range(EVENT_ANSWERS_MAX):
        listeners.answers.asked([b"one", b""], 0, CONNECTED)
    listeners.give()
    assert len(given(listeners)) == EVENT_ANSWERS_MAX
    assert len(waiting(listeners)) == 1


def test_a_question_that_does_not_fit_is_answered_once_an_earlier_answer_was_taken(
    listeners: Listeners,
) -> None:
    for _ in range(EVENT_ANSWERS_MAX):
        assert listeners.ask(b"one")
    assert not listeners.answers.stuck
    assert not listeners.ask(b"one")
    assert listeners.answers.stuck, "somebody is to look for what was taken"
    listeners.give()
    assert len(listeners.trackers) == EVENT_ANSWERS_MAX
    listeners.trackers[0].done = True
    listeners.give()
    assert listeners.answered == [b"one"] * (EVENT_ANSWERS_MAX + 1)
    assert not listeners.answers.stuck
    assert not listeners.answers.dropped


def test_who_waits_for_its_own_answers_keeps_nobody_else_waiting(listeners: Listeners) -> None:
    for _ in range(2 * EVENT_ANSWERS_MAX):
        listeners.ask(b"one")
    assert listeners.ask(b"other")


def test_who_waits_for_room_is_not_passed_by_smaller_answers(
    listeners: Listeners, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert listeners.ask(b"first")
    (going,) = given(listeners)
    monkeypatch.setattr(event_answers, "EVENT_ANSWER_BYTES_MAX", 2 * going.size_bytes - 1)
    assert not listeners.ask(b"large")
    assert not listeners.ask(b"small", SNAPSHOT.sequence)
    listeners.trackers[0].done = True
    listeners.give()
    assert listeners.answered == [b"first", b"large", b"small"]


def test_what_an_answer_consists_of_is_chosen_when_it_is_given(
    listeners: Listeners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was there when it was asked for is not kept any more, and the snapshot is too old."""
    monkeypatch.setattr(event_answers, "EVENT_ANSWER_BYTES_MAX", 1)
    assert listeners.ask(b"first")
    listeners.ask(b"since", SNAPSHOT.sequence)
    listeners.ask(b"whole")
    listeners.sent.clear()
    monkeypatch.setattr(event_answers, "EVENT_BACKLOG_MAX", 3)
    number = SNAPSHOT.sequence + 10
    listeners.publish(number)
    for _ in range(2):
        listeners.trackers[-1].done = True
        listeners.give()
        if listeners.answers.needs_snapshot:
            listeners.renew(SNAPSHOT._replace(sequence=number - 1))
    assert listeners.answered == [b"first", b"since", b"whole"]
    for name in (b"since", b"whole"):
        assert listeners.sequences(name) == {number - 1, number}


def test_a_snapshot_answers_who_waits_for_it_whatever_came_since(listeners: Listeners) -> None:
    """Another would be as old when it comes."""
    listeners.answers.asked([b"one", b""], 0, CONNECTED)
    listeners.give()
    assert listeners.answers.needs_snapshot
    for number in range(EVENT_MESSAGES_WAITING_MAX + 1):
        listeners.publish(SNAPSHOT.sequence + 1 + number)
    listeners.renew()
    assert listeners.answered == [b"one"]


def test_a_question_whose_listener_is_gone_leaves_its_place(
    listeners: Listeners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_answers, "EVENT_ANSWER_BYTES_MAX", 1)
    monkeypatch.setattr(event_answers, "EVENT_REPLAYS_MAX", 1)
    assert listeners.ask(b"deaf")
    origin = Connected()
    assert not listeners.ask(b"gone", 0, origin)
    origin.gone = True
    listeners.give()
    assert not listeners.answers.stuck
    assert not listeners.ask(b"other")
    assert not listeners.answers.dropped
    listeners.trackers[0].done = True
    listeners.give()
    assert listeners.answered == [b"deaf", b"other"]


def test_a_listener_is_one_however_it_puts_its_requests(listeners: Listeners) -> None:
    """It chooses what stands between its name and the request."""
    for _ in range(EVENT_ANSWERS_MAX):
        assert listeners.ask(b"one")
    listeners.answers.asked([b"one"], 0, CONNECTED)
    listeners.give()
    assert len(listeners.trackers) == EVENT_ANSWERS_MAX


def test_one_listener_does_not_take_the_places_of_all_that_wait_for_a_snapshot(
    listeners: Listeners,
) -> None:
    for number in range(EVENT_REPLAYS_MAX):
        listeners.answers.asked([b"one", b""][: 1 + number % 2], number // 2 % 2, CONNECTED)
    assert len(waiting(listeners)) == EVENT_ANSWERS_MAX
    for number in range(EVENT_REPLAYS_MAX - EVENT_ANSWERS_MAX - 1):
        listeners.answers.asked([b"%d" % number, b""], 0, CONNECTED)
    assert listeners.ask(b"other")
    assert [parts[0] for parts in listeners.sent if parts[0] == b"other"]
    for number in range(EVENT_REPLAYS_MAX + 1):
        listeners.answers.asked([b"%d" % number, b""], 0, CONNECTED)
    assert len(waiting(listeners)) == EVENT_REPLAYS_MAX


def test_an_answer_that_is_larger_than_all_may_be_is_given_alone(
    listeners: Listeners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_answers, "EVENT_ANSWER_BYTES_MAX", 1)
    assert listeners.ask(b"one")
    assert not listeners.ask(b"other")
    listeners.trackers[0].done = True
    assert listeners.ask(b"other")


def test_a_snapshot_that_needs_very_many_messages_after_it_is_made_anew(
    listeners: Listeners,
) -> None:
    assert listeners.ask(b"one")
    for number in range(1, EVENT_MESSAGES_WAITING_MAX + 2):
        listeners.publish(SNAPSHOT.sequence + number)
    listeners.answers.asked([b"two", b""], 0, CONNECTED)
    listeners.give()
    assert listeners.answers.needs_snapshot
    assert listeners.answered == [b"one"]


@pytest.fixture
def pressed(monkeypatch: pytest.MonkeyPatch, listeners: Listeners) -> tuple[Listeners, Connected]:
    """One has an answer and has not taken it; there is room for no other."""
    monkeypatch.setattr(event_answers, "EVENT_ANSWER_BYTES_MAX", 1)
    deaf = Connected()
    assert listeners.ask(b"deaf", 0, deaf)
    return listeners, deaf


def test_who_has_not_taken_its_answer_in_time_makes_room_for_others(
    pressed: tuple[Listeners, Connected],
) -> None:
    listeners, deaf = pressed
    assert not listeners.ask(b"other")
    listeners.now += EVENT_ANSWER_TAKEN_S - 0.01
    listeners.give()
    assert not deaf.hung_up
    listeners.now += 0.02
    listeners.give()
    assert deaf.hung_up == 1
    listeners.trackers[0].done = True
    listeners.give()
    assert listeners.answered == [b"deaf", b"other"]
    listeners.give()
    assert not CONNECTED.hung_up


def test_who_keeps_nobody_waiting_may_take_its_time(pressed: tuple[Listeners, Connected]) -> None:
    listeners, deaf = pressed
    listeners.now += 10 * EVENT_ANSWER_TAKEN_S
    listeners.give()
    assert not deaf.hung_up


def test_who_waits_for_its_own_answers_is_not_hung_up_on(listeners: Listeners) -> None:
    """It may be slow, and be asking again because parts are long in coming."""
    slow = Connected()
    for _ in range(2 * EVENT_ANSWERS_MAX):
        listeners.ask(b"slow", 0, slow)
    listeners.now += 10 * EVENT_ANSWER_TAKEN_S
    listeners.give()
    assert listeners.answers.stuck
    assert not slow.hung_up


def test_listeners_that_take_all_places_are_hung_up_on(
    listeners: Listeners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though their answers are small."""
    monkeypatch.setattr(event_answers, "EVENT_REPLAYS_MAX", EVENT_ANSWERS_MAX)
    deaf = Connected()
    for _ in range(2 * EVENT_ANSWERS_MAX):
        listeners.ask(b"deaf", 0, deaf)
    listeners.now += 2 * EVENT_ANSWER_TAKEN_S
    listeners.give()
    assert deaf.hung_up == EVENT_ANSWERS_MAX
