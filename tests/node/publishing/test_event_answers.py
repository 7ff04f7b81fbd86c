"""What listeners to a node's events have asked for and not taken is bounded."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.limits import EVENT_ANSWERS_MAX, EVENT_MESSAGES_WAITING_MAX, EVENT_REPLAYS_MAX
from kvstore.node.publishing import block_events, event_answers
from kvstore.node.publishing.event_answers import Answers, EventMessage, Snapshot
from kvstore.protocol.block_events import BlockChanges, Source, endpoints_of, sequence_bytes
from kvstore.testing.ports import held_ports

SNAPSHOT = Snapshot(7, 0.0, [bytes([i]) * 32 for i in range(100)])
PATIENCE_S = 20.0


class Listeners:
    """What each was sent, and which have taken it."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.trackers: list[Any] = []
        self.sent: list[list[bytes]] = []

    def ask(self, name: bytes) -> bool:
        """Whether it was answered."""
        before = len(self.trackers)
        self.answers.asked([name, b""], 0)
        if self.answers.needs_snapshot:
            self.answers.needs_snapshot = False
            self.answers.renew(SNAPSHOT)
        self.answers.give(self.sent.append, self._last)
        return len(self.trackers) > before

    def _last(self, parts: list[bytes]) -> Any:
        self.trackers.append(SimpleNamespace(done=False))
        return self.trackers[-1]


@pytest.fixture
def listeners() -> Listeners:
    answers = Answers(b"topic", "CPU")
    for number in range(SNAPSHOT.sequence + 1):
        answers.keep(EventMessage(number, 0.0, BlockChanges(False, [], [])), b"")
    return Listeners(answers)


def test_what_was_not_taken_is_bounded_in_all_and_told_once(
    listeners: Listeners, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert listeners.ask(b"first")
    (going,) = listeners.answers._going
    monkeypatch.setattr(event_answers, "EVENT_ANSWER_BYTES_MAX", 3 * going.size_bytes)
    with caplog.at_level(logging.WARNING, "kvstore.node"):
        answered = [listeners.ask(b"%d" % i) for i in range(10)]
    assert answered == [True] * 2 + [False] * 8
    assert listeners.answers.dropped == 8
    assert [record.message for record in caplog.records] == [
        f"a listener to events is not answered now: 3 answers of {3 * going.size_bytes} bytes were "
        "not taken yet, 0 of them its own"
    ]
    listeners.trackers[1].done = True
    assert listeners.ask(b"later")
    assert not listeners.ask(b"too late")


def test_one_listener_has_few_answers_at_a_time(listeners: Listeners) -> None:
    asked = [listeners.ask(b"one") for _ in range(EVENT_ANSWERS_MAX + 3)]
    assert asked == [True] * EVENT_ANSWERS_MAX + [False] * 3
    assert listeners.ask(b"other")
    listeners.trackers[0].done = True
    assert listeners.ask(b"one")


def test_a_listener_is_one_however_it_puts_its_requests(listeners: Listeners) -> None:
    """It chooses what stands between its name and the request."""
    for _ in range(EVENT_ANSWERS_MAX):
        assert listeners.ask(b"one")
    listeners.answers.asked([b"one"], 0)
    listeners.answers.give(listeners.sent.append, listeners._last)
    assert len(listeners.trackers) == EVENT_ANSWERS_MAX


def test_one_listener_does_not_take_the_places_of_all_that_wait_for_a_snapshot(
    listeners: Listeners,
) -> None:
    for number in range(EVENT_REPLAYS_MAX):
        listeners.answers.asked([b"one", b""][: 1 + number % 2], number // 2 % 2)
    assert len(listeners.answers._whole) + len(listeners.answers._since) == EVENT_ANSWERS_MAX
    for number in range(EVENT_REPLAYS_MAX - EVENT_ANSWERS_MAX - 1):
        listeners.answers.asked([b"%d" % number, b""], 0)
    assert listeners.ask(b"other")
    assert [parts[0] for parts in listeners.sent if parts[0] == b"other"]
    listeners.answers.renew(SNAPSHOT)
    for number in range(EVENT_REPLAYS_MAX + 1):
        listeners.answers.asked([b"%d" % number, b""], 0)
    assert len(listeners.answers._whole) == EVENT_REPLAYS_MAX


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
        listeners.answers.keep(
            EventMessage(SNAPSHOT.sequence + number, 0.0, BlockChanges(False, [], [])), b""
        )
    listeners.answers.asked([b"two", b""], 0)
    assert listeners.answers.needs_snapshot


def test_listeners_that_never_read_are_hung_up_on_and_others_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Real sockets: 40 listeners ask for 3 MB each and read nothing; a node went from 33 to 302
    MiB in 30 s."""
    zmq = pytest.importorskip("zmq")
    monkeypatch.setattr(event_answers, "EVENT_ANSWER_BYTES_MAX", 16 << 20)
    monkeypatch.setattr(block_events, "EVENT_ANSWER_TAKEN_S", 1.0)
    keys = [os.urandom(32) for _ in range(100_000)]
    core: Any = SimpleNamespace(listed=SimpleNamespace(keys=lambda: keys), changes=None)

    async def scenario(place: str, replay: str, context: Any) -> None:
        source = Source("host", "node", 1)
        events = block_events.BlockEvents(place, source, core, asyncio.get_running_loop())
        events.start()
        deaf = []
        try:
            for _ in range(40):
                socket = context.socket(zmq.DEALER)
                socket.set(zmq.RCVHWM, 1)
                socket.set(zmq.RCVBUF, 4096)
                socket.set(zmq.LINGER, 0)
                socket.connect(replay)
                socket.send_multipart([b"", sequence_bytes(0)])
                deaf.append(socket)
            give_up_at = time.monotonic() + PATIENCE_S
            while not events._answers.dropped and time.monotonic() < give_up_at:
                await asyncio.sleep(0.05)
            assert events._answers.dropped
            going = sum(answer.size_bytes for answer in events._answers._going)
            assert 0 < going <= 16 << 20
            asking = context.socket(zmq.DEALER)
            asking.set(zmq.LINGER, 0)
            asking.connect(replay)
            while not asking.poll(0) and time.monotonic() < give_up_at:
                asking.send_multipart([b"", sequence_bytes(0)])
                await asyncio.sleep(1.0)
            assert asking.poll(0), "a listener that reads is answered"
            asking.close()
        finally:
            for socket in deaf:
                socket.close()
            events.stop(keep=True)

    with held_ports(1) as (port,), zmq.Context() as context:
        place, replay = endpoints_of(str(port))
        asyncio.run(scenario(place, replay, context))


def test_requests_of_more_parts_than_any_has_are_not_answered() -> None:
    """Each message of an answer would have them all, which nobody counts."""
    zmq = pytest.importorskip("zmq")
    core: Any = SimpleNamespace(listed=SimpleNamespace(keys=list), changes=None)

    async def scenario(place: str, replay: str, context: Any) -> None:
        source = Source("host", "node", 1)
        events = block_events.BlockEvents(place, source, core, asyncio.get_running_loop())
        events.start()
        socket = context.socket(zmq.DEALER)
        try:
            socket.set(zmq.LINGER, 0)
            socket.connect(replay)
            socket.send_multipart([b"", b"", sequence_bytes(0)])
            socket.send_multipart([b"x", sequence_bytes(0)])
            socket.send_multipart([b"", sequence_bytes(0)])
            give_up_at = time.monotonic() + PATIENCE_S
            while not socket.poll(0) and time.monotonic() < give_up_at:
                await asyncio.sleep(0.01)
            first, topic, *_ = socket.recv_multipart(zmq.NOBLOCK)
            assert (first, topic) == (b"", events._topic)
        finally:
            socket.close()
            events.stop(keep=True)

    with held_ports(1) as (port,), zmq.Context() as context:
        place, replay = endpoints_of(str(port))
        asyncio.run(scenario(place, replay, context))
