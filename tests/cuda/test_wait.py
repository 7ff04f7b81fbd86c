"""How much longer than a copy the wait for it takes."""

from __future__ import annotations

import pytest
from each_input import each

from kvstore.cuda import base

POLL_S = 8e-6
"""What asking a driver takes."""
SLACK_S = 60e-6
"""What a sleep is longer than it was asked for."""


class Clock:
    """Time that goes on by polls and sleeps alone."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept_s = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, pause_s: float) -> None:
        self.now += pause_s + SLACK_S
        self.slept_s += pause_s + SLACK_S


class Event:
    """Is done at a moment of the clock."""

    def __init__(self, clock: Clock, done_at: float) -> None:
        self._clock, self._done_at = clock, done_at

    def done(self) -> bool:
        self._clock.now += POLL_S
        return self._clock.now >= self._done_at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(base, "time", clock)
    return clock


@each("copy_ms", [0.1, 0.5, 0.7, 0.99, 1.1, 2, 5, 20, 100])
def test_a_wait_is_at_most_a_tenth_longer_than_the_copy(clock: Clock, copy_ms: float) -> None:
    began, copy_s = clock.now, copy_ms / 1e3
    assert base.wait(Event(clock, began + copy_s), began + 60)
    assert clock.now - began <= 1.1 * copy_s + POLL_S


def test_a_long_wait_leaves_the_processor_to_others(clock: Clock) -> None:
    began = clock.now
    assert base.wait(Event(clock, began + 1.0), began + 60)
    assert clock.slept_s > 0.95


def test_a_wait_ends_at_its_deadline_and_looks_once_more(clock: Clock) -> None:
    began = clock.now
    assert not base.wait(Event(clock, began + 60), began + 0.5)
    assert clock.now - began < 0.51
    assert base.wait(Event(clock, clock.now), clock.now - 1)
