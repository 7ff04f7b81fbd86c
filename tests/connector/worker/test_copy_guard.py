"""A transfer is ended by another thread only while no copy of it runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from connector.limits import COPY_STUCK_S
from connector.worker import copy_guard
from connector.worker.copy_guard import CopyGuard
from kvstore import InternalError


class SignalledError(Exception):
    pass


@contextmanager
def raising_handler() -> Iterator[None]:
    def handle(*_: object) -> None:
        raise SignalledError

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def in_another_thread(call: Callable[[], bool]) -> bool:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    thread.join(60)
    return answers[0]


def test_it_is_not_ended_while_a_copy_runs_and_no_copy_begins_afterwards() -> None:
    guard = CopyGuard()
    with guard.copying() as allowed:
        assert allowed
        assert not in_another_thread(guard.try_end)
        assert not guard.ended
    assert in_another_thread(guard.try_end)
    with guard.copying() as allowed:
        assert not allowed


def test_a_handler_amid_the_copy_ends_nothing_and_waits_for_nothing() -> None:
    guard = CopyGuard()
    tried: list[bool] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: tried.append(guard.try_end()))
    try:
        with guard.copying():
            signal.raise_signal(signal.SIGUSR1)
            with pytest.raises(InternalError, match="did not end within 60 s"):
                guard.end(60.0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert tried == [False]
    assert not guard.ended


class Interrupting:
    """A lock; once it `interrupts`, the signal arrives just when it was got."""

    def __init__(self, lock: threading.RLock) -> None:  # type: ignore[valid-type]
        self._lock = lock
        self.interrupts = True

    def acquire(self, *args: float, **options: float) -> bool:
        got: bool = self._lock.acquire(*args, **options)  # type: ignore[attr-defined]
        if self.interrupts:
            signal.raise_signal(signal.SIGUSR1)
        return got

    def __getattr__(self, name: str) -> object:
        return getattr(self._lock, name)


def copy(guard: CopyGuard) -> None:
    with guard.copying():
        pytest.fail("interrupted before")


@pytest.mark.parametrize("call", [copy, CopyGuard.try_end, lambda guard: guard.end(1.0)])
def test_who_is_interrupted_when_it_gets_the_guard_does_not_keep_it(
    call: Callable[[CopyGuard], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = Interrupting(threading.RLock())
    with monkeypatch.context() as patched:
        patched.setattr(threading, "RLock", lambda: lock)
        guard = CopyGuard()
    with raising_handler(), pytest.raises(SignalledError):
        call(guard)
    lock.interrupts = False
    assert not guard.ended
    assert in_another_thread(guard.try_end)


def test_a_copy_that_is_under_way_for_too_long_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(copy_guard.time, "monotonic", lambda: now[0])
    guard = CopyGuard()
    assert guard.stuck_s() == 0
    for _ in range(2):  # each copy anew
        with guard.copying():
            now[0] += COPY_STUCK_S
            assert guard.stuck_s() == 0
            now[0] += 1
            assert guard.stuck_s() == COPY_STUCK_S + 1
            assert guard.stuck_s() == 0
        now[0] += 2 * COPY_STUCK_S
        assert guard.stuck_s() == 0, "nothing is under way"
