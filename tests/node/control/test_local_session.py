"""Threads of the node's process that speak to its event loop."""

import queue
import time

import pytest

from kvstore.core.events import Abort, Reply, Stat, Touch
from kvstore.errors import DeadlineError
from kvstore.limits import TOLD_MAX
from kvstore.node.control.local_session import LocalSessions


class Loop:
    """One that is busy until `run`."""

    def __init__(self):
        self.waiting = []

    def call_soon_threadsafe(self, what):
        self.waiting.append(what)

    def run(self):
        waiting, self.waiting = self.waiting, []
        for what in waiting:
            what()


def test_what_nobody_waits_for_is_passed_over_while_too_much_of_it_waits():
    loop, heard = Loop(), []
    inside = LocalSessions(loop, None, heard.append)
    for round_ in range(1, 3):
        for _ in range(TOLD_MAX + 10):
            inside.tell(Touch(0, []))
        assert len(loop.waiting) == TOLD_MAX
        loop.run()
        assert len(heard) == round_ * TOLD_MAX


def test_what_the_core_cannot_take_leaves_room_for_the_next():
    loop = Loop()

    def refuse(event):
        raise ValueError("no")

    inside = LocalSessions(loop, None, refuse)
    for _ in range(TOLD_MAX + 1):
        inside.tell(Touch(0, []))
        try:
            loop.run()
        except ValueError:
            continue
        raise AssertionError("it was not heard")


class Sessions:
    """Of one session, number 7."""

    number = 7

    def enter_inside(self, speaker):
        self.speaker = speaker
        return self


class Node:
    """Answers each request with its own number, in a list, once its loop runs."""

    def __init__(self):
        self.loop, self.acted = Loop(), []
        self._sessions = Sessions()
        self.session = LocalSessions(self.loop, self._sessions, self._act).open()

    def _act(self, event):
        self.acted.append(event)
        self._sessions.speaker.send(
            Reply(self._sessions.number, event.request, [event.request], False)
        )


stat = Stat(0, 0)


def give_back(answer):
    return Abort(0, 0, answer)


@pytest.fixture
def node():
    return Node()


def test_an_answer_that_comes_too_late_is_given_back_and_is_nobody_elses(node):
    with pytest.raises(DeadlineError):
        node.session.ask(stat, time.monotonic(), give_back)
    assert node.session.busy
    node.loop.run()
    assert not node.session.busy
    node.loop.run()
    assert node.acted[1:] == [Abort(7, 2, [1])]
    node.loop.call_soon_threadsafe = lambda what: what()
    assert node.session.ask(stat, time.monotonic() + 5) == [3]


class Interrupting(queue.SimpleQueue):
    """Ctrl-C comes with the first wait, after `before` was called."""

    def __init__(self, before):
        self._before = before

    def get(self, *args, **options):
        if self._before is None:
            return super().get(*args, **options)
        before, self._before = self._before, None
        before()
        raise KeyboardInterrupt


@pytest.mark.parametrize("answered", [False, True])
def test_an_interrupted_request_leaves_its_answer_to_nobody(node, answered):
    node.session._answers = Interrupting(node.loop.run if answered else lambda: None)
    with pytest.raises(KeyboardInterrupt):
        node.session.ask(stat, time.monotonic() + 5, give_back)
    for _ in range(2):
        node.loop.run()
    assert node.acted[1:] == [Abort(7, 2, [1])]
    node.loop.call_soon_threadsafe = lambda what: what()
    assert node.session.ask(stat, time.monotonic() + 5) == [3]
