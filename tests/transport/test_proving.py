"""A way to read from a node is tried in a thread of its own, one attempt at a time."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest

from kvstore.errors import NodeUnavailableError
from kvstore.transport import proving
from kvstore.transport.proving import ProvedPeer

WAIT_S = 10.0


class Tried:
    """A peer whose attempts go as the test says."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.peer = ProvedPeer(1, self.lock)
        self.go_on = threading.Event()
        self.failure: Exception | None = None
        self.begun = 0
        self.given_up: list[str] = []

    def _prove(self) -> None:
        self.begun += 1
        assert self.go_on.wait(WAIT_S)
        if self.failure is not None:
            raise self.failure
        with self.lock:
            self.peer.succeeded()

    def _give_up(self, reason: str) -> None:
        with self.lock:
            self.peer.failed(reason)
        self.given_up.append(reason)

    def soon(self) -> threading.Event | None:
        with self.lock:
            return self.peer.prove_soon(self._prove, self._give_up, "test-probe")


@pytest.fixture
def tried() -> Tried:
    return Tried()


def test_who_comes_while_it_is_tried_gets_the_same_attempt(tried: Tried) -> None:
    first = tried.soon()
    assert first is not None
    assert tried.soon() is first
    tried.go_on.set()
    assert first.wait(WAIT_S)
    assert (tried.begun, tried.given_up) == (1, [])


def test_what_failed_is_left_alone_until_it_is_time(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried.failure = NodeUnavailableError("it says no")
    tried.go_on.set()
    now = [100.0]
    monkeypatch.setattr(proving, "time", SimpleNamespace(monotonic=lambda: now[0]))
    first = tried.soon()
    assert first is not None
    assert first.wait(WAIT_S)
    assert tried.given_up == [tried.peer.reason] == ["it says no"]
    assert tried.soon() is None
    now[0] += proving.RETRY_AFTER_S
    second = tried.soon()
    assert second is not None
    assert second.wait(WAIT_S)
    assert tried.begun == 2


def test_the_same_reason_once_more_is_no_warning(tried: Tried) -> None:
    levels = [tried.peer.failed(reason) for reason in ("a", "a", "b")]
    assert levels == [logging.WARNING, logging.DEBUG, logging.WARNING]


def test_a_host_without_threads_to_give_is_told_and_tried_later(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        refused.append(thread.daemon)
        raise RuntimeError("can't start new thread")

    refused: list[bool] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert tried.soon() is None
    assert refused == [True], "it does not keep the process alive"
    assert tried.peer.reason == "can't start new thread"
    assert tried.soon() is None
    assert len(refused) == 1, "not at once again"


def test_an_attempt_that_our_own_bug_ends_is_not_tried_again_at_once(
    tried: Tried, caplog: pytest.LogCaptureFixture
) -> None:
    """Else each read would start a thread for the next one."""
    tried.failure = KeyError("a bug")
    tried.go_on.set()
    first = tried.soon()
    assert first is not None
    assert first.wait(WAIT_S)
    assert tried.soon() is None
    assert (tried.begun, tried.given_up) == (1, ["KeyError('a bug')"])
    assert "unexpected" in caplog.text


def test_after_a_success_it_is_left_alone_no_longer_than_at_first(
    tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(proving, "time", SimpleNamespace(monotonic=lambda: now[0]))
    tried.go_on.set()
    for failure in (NodeUnavailableError("no"), NodeUnavailableError("no"), None):
        tried.failure = failure
        now[0] += 10 * proving.RETRY_AFTER_S
        attempt = tried.soon()
        assert attempt is not None
        assert attempt.wait(WAIT_S)
    tried.peer.failed("it broke")
    now[0] += proving.RETRY_AFTER_S
    again = tried.soon()
    assert again is not None
    assert again.wait(WAIT_S)
