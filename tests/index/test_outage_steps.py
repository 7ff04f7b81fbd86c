"""The guard before an index, step by step: on a clock and with threads that the test runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.errors import IndexBreakerOpenError, IndexDeadlineError, IndexUnavailableError
from kvstore.index.base import KeyRecord
from kvstore.index.memory import MemoryIndex
from kvstore.index.outage import GuardedIndex
from kvstore.machine import Machine

KEY = b"k" * 32


def is_open(guard: GuardedIndex) -> bool:
    """Whether what reads is refused without a question."""
    try:
        guard.match([KEY])
    except IndexBreakerOpenError:
        return True
    return False


class Closing:
    """An event whose waits take their time on the test's clock."""

    def __init__(self, machine: Steps) -> None:
        self._machine = machine
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self._machine.now += timeout
        self._machine.waited(timeout)
        return self._is_set


class Steps(Machine):
    def __init__(self) -> None:
        self.now = 100.0
        self.threads: list[Callable[[], None]] = []
        self.monotonic = lambda: self.now
        self.waited: Callable[[float], object] = lambda _: None
        self.locks: list[Any] = []

    def lock(self) -> Any:
        self.locks.append(super().lock())
        return self.locks[-1]

    def event(self) -> Closing:
        return Closing(self)

    def start_thread(self, target: Callable[[], None], name: str) -> None:
        self.threads.append(target)


class Away(MemoryIndex):
    """Fails with `error` while there is one; notes when it was pinged, and what else was done."""

    def __init__(self, machine: Steps) -> None:
        super().__init__()
        self.machine = machine
        self.error: Exception | None = None
        self.silent_pings = 0
        self.pings: list[float] = []
        self.done: list[str] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def match(self, keys):
        self.meanwhile()
        if self.error is not None:
            raise self.error
        return super().match(keys)

    def ping(self):
        self.pings.append(round(self.machine.now - 100.0, 6))
        self.meanwhile()
        if len(self.pings) <= self.silent_pings:
            raise IndexUnavailableError(f"ping {len(self.pings)}")

    def withdraw(self, node_id):
        self.done.append(f"withdraw {node_id}")

    def close(self):
        self.done.append("close")


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def index(steps: Steps) -> Away:
    return Away(steps)


def guarded(index: Away, failures_max: int = 2) -> GuardedIndex:
    return GuardedIndex(index, failures_max=failures_max, retry_after_s=0.1, machine=index.machine)


def fail(guard: GuardedIndex, index: Away, error: Exception | None = None) -> None:
    index.error = error or IndexUnavailableError("away")
    with pytest.raises(IndexUnavailableError):
        guard.match([KEY])
    index.error = None


def test_what_has_no_breaker_is_handed_on(index: Away) -> None:
    guard = guarded(index)
    guard.withdraw(7)
    guard.ping()
    guard.close()
    assert (index.done, index.pings) == (["withdraw 7", "close"], [0.0])


def test_only_failures_in_a_row_open_it(index: Away) -> None:
    guard = guarded(index)
    for _ in range(3):
        fail(guard, index)
        assert guard.match([KEY]) == []
    fail(guard, index)
    fail(guard, index)
    assert is_open(guard)


@pytest.mark.parametrize("error", [KeyError("k"), IndexUnavailableError("refused")])
def test_what_failed_at_once_is_one_of_several_and_what_hung_is_enough(
    index: Away, error: Exception
) -> None:
    guard = guarded(index)
    fail(guard, index, error)
    assert not is_open(guard)
    hung = guarded(index)
    fail(hung, index, IndexDeadlineError("late"))
    assert is_open(hung)


def test_a_failure_that_comes_late_opens_nothing_twice_and_a_success_closes_nothing(
    index: Away, steps: Steps
) -> None:
    guard = guarded(index, failures_max=1)

    def others() -> None:
        index.meanwhile = lambda: None
        fail(guard, index)
        steps.now += 1.0

    index.meanwhile = others
    assert guard.match([KEY]) == [], "it had begun before"
    assert is_open(guard)
    late = guarded(index, failures_max=1)

    def others_again() -> None:
        index.meanwhile = lambda: None
        fail(late, index)
        index.error = IndexUnavailableError("late")

    index.meanwhile = others_again
    with pytest.raises(IndexUnavailableError, match="late"):
        late.match([KEY])
    assert len(steps.threads) == 2 + 1, "one for each guard, and one for who asked since"
    assert is_open(late)


def test_it_is_pinged_with_growing_pauses_until_it_answers(index: Away, steps: Steps) -> None:
    guard = guarded(index, failures_max=1)
    fail(guard, index)
    index.silent_pings = 3
    (thread,) = steps.threads
    said: list[str] = []

    def asks() -> None:
        with pytest.raises(IndexUnavailableError) as refused:
            guard.match([KEY])
        said.append(str(refused.value).rpartition(": ")[2])

    index.meanwhile = asks
    thread()
    index.meanwhile = lambda: None
    assert index.pings == [0.1, 0.3, 0.7, 1.5]
    assert said == ["away", "ping 1", "ping 2", "ping 3"]
    assert len(steps.threads) == 1, "who asks meanwhile starts no other"
    assert guard.match([KEY]) == []
    fail(guard, index)
    assert len(steps.threads) == 2, "the next outage has a thread of its own"
    steps.threads[1]()
    assert (len(index.pings), is_open(guard)) == (5, False)


def test_of_two_that_were_started_one_goes_on(index: Away, steps: Steps) -> None:
    guard = guarded(index, failures_max=1)
    fail(guard, index)
    with pytest.raises(IndexUnavailableError):
        guard.match([KEY])
    first, second = steps.threads
    index.meanwhile = second
    first()
    assert index.pings == [0.1]


def test_a_side_that_is_not_due_waits_while_the_other_is_asked_for(
    index: Away, steps: Steps
) -> None:
    guard = guarded(index, failures_max=1)
    fail(guard, index)
    steps.now += 0.05
    index.publish = index.match  # type: ignore[method-assign]
    index.error = IndexUnavailableError("away")
    with pytest.raises(IndexUnavailableError):
        guard.publish([KeyRecord(KEY, b"r")])
    index.silent_pings = 1
    steps.threads[0]()
    assert index.pings == [0.1, 0.15, 0.3], "each when it is due"
    index.error = None
    del index.publish
    assert not is_open(guard)
    assert guard.publish([KeyRecord(KEY, b"r")]) == []


def test_once_closed_nobody_pings_and_no_thread_is_started(index: Away, steps: Steps) -> None:
    guard = guarded(index, failures_max=1)
    fail(guard, index)
    steps.waited = lambda _: guard.close()
    steps.threads[0]()
    assert index.pings == []
    fail(guard, index)
    assert len(steps.threads) == 1
    other = guarded(index, failures_max=1)
    other.close()
    fail(other, index)
    assert len(steps.threads) == 1, "also when there was none before"


class NotThereError(BaseException):
    """A thread does not come along into a forked child."""


def test_a_forked_child_forgets_what_was_open_and_pings_anew(index: Away, steps: Steps) -> None:
    guard = guarded(index, failures_max=1)
    fail(guard, index)

    def fork() -> None:
        raise NotThereError

    index.meanwhile = fork
    with pytest.raises(NotThereError):
        steps.threads[0]()
    index.meanwhile = lambda: None
    locks = len(steps.locks)
    guard.after_fork_in_child()
    assert len(steps.locks) == locks + 1, "a thread that is not there may have the one before"
    assert guard.match([KEY]) == []
    fail(guard, index)
    steps.threads[-1]()
    assert (len(steps.threads), len(index.pings)) == (2, 2)
    assert guard.match([KEY]) == []


def test_a_forked_child_keeps_count_of_what_failed_in_a_row(index: Away) -> None:
    guard = guarded(index)
    fail(guard, index)
    guard.after_fork_in_child()
    fail(guard, index)
    assert is_open(guard)
