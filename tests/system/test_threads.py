"""Calls on threads that no process waits for."""

import threading
import time
from concurrent.futures import CancelledError, wait

import pytest
from redis_servers import wait_until

from kvstore.errors import PeerError
from kvstore.system.threads import DaemonThreads


def refusing(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError(why)

    monkeypatch.setattr(threading.Thread, "start", refuse)


def named(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_a_thread_starts_only_when_no_other_is_free_and_never_one_too_many() -> None:
    threads, release = DaemonThreads(2, "few"), threading.Event()
    assert threads.submit(int).result(20) == 0
    wait_until(lambda: threads._free.qsize() == 1, "the first is free again")
    assert threads.submit(int).result(20) == 0
    assert named("few") == 1
    calls = [threads.submit(lambda: release.wait(20)) for _ in range(5)]
    wait_until(lambda: named("few") == 2, "the second has begun")
    release.set()
    assert [call.result(20) for call in calls] == [True] * 5
    assert named("few") == 2
    threads.close()
    wait_until(lambda: not named("few"), "they end")


def test_threads_end_when_nobody_has_them_any_more_and_their_calls_are_done() -> None:
    done = DaemonThreads(1, "dropped").submit(lambda: time.sleep(0.01) or 7)
    assert done.result(20) == 7
    wait_until(lambda: not named("dropped"), "the thread ends")


def test_what_a_call_raises_is_raised_to_who_waits() -> None:
    with pytest.raises(ZeroDivisionError):
        DaemonThreads(1, "t").submit(lambda: 1 // 0).result(20)


def test_a_call_that_was_cancelled_before_its_turn_never_runs() -> None:
    threads, release, ran = DaemonThreads(1, "t"), threading.Event(), []
    first = threads.submit(lambda: release.wait(20))
    second = threads.submit(lambda: ran.append(2))
    assert second.cancel()
    release.set()
    third = threads.submit(lambda: ran.append(3))
    wait([first, third], 20)
    assert ran == [3]
    with pytest.raises(CancelledError):
        second.result(0)
    threads.close()


@pytest.mark.parametrize(
    "why",
    [
        "can't create new thread at interpreter shutdown",
        "cannot schedule new futures after interpreter shutdown",
    ],
)
def test_the_first_call_runs_in_the_callers_thread_when_the_interpreter_ends(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    threads = DaemonThreads(1, "t")
    refusing(monkeypatch, why)
    done = threads.submit(threading.get_ident)
    assert done.done()
    assert done.result() == threading.get_ident()


def test_a_host_that_gives_no_thread_is_said_to_and_the_call_never_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, ran = DaemonThreads(1, "t"), []
    with monkeypatch.context() as patched:
        refusing(patched, "can't start new thread")
        with pytest.raises(PeerError, match="ulimit -u"):
            threads.submit(lambda: ran.append(1))
    threads.submit(lambda: ran.append(2)).result(20)
    assert ran == [2]
    threads.close()
    with pytest.raises(PeerError, match="close"):
        threads.submit(int)


@pytest.mark.parametrize("why", ["can't start new thread", "at interpreter shutdown"])
def test_calls_wait_for_the_threads_that_there_are(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    threads = DaemonThreads(8, "t")
    here = threads.submit(threading.get_ident).result(20)
    refusing(monkeypatch, why)
    calls = [threads.submit(threading.get_ident) for _ in range(5)]
    assert [call.result(20) for call in calls] == [here] * 5
    threads.close()
