"""Locks over a store's pins, and the thread that does an engine's tasks."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from connector_parts import PATIENCE_S, Clock, wait_for

from connector.limits import RESULTS_MAX, TASKS_MAX
from connector.pages.locks import Locks
from connector.worker.tasks import Results, TaskThreads
from kvstore.spi import Key, Reservation
from kvstore.testing.blockstore import MemoryBlockStore, timed_out

TIMEOUT_S = 10.0


def saved(store: MemoryBlockStore, count: int) -> list[Key]:
    keys = [os.urandom(32) for _ in range(count)]
    reserved = store.reserve(keys, 8, 1)
    store.commit([r for r in reserved if isinstance(r, Reservation)])
    return keys


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def locks(store: MemoryBlockStore, clock: Clock) -> Locks:
    return Locks(store, most=4, timeout_s=TIMEOUT_S, clock=clock)


def test_what_is_locked_is_not_evicted_until_it_is_unlocked(
    store: MemoryBlockStore, locks: Locks
) -> None:
    a, b = saved(store, 2)
    assert locks.lock([a, os.urandom(32), b]) == [True, False, True]
    assert not store.evict(a)
    locks.unlock([a])
    assert store.evict(a)
    assert not store.evict(b)


def test_a_key_that_is_locked_twice_is_unlocked_twice(
    store: MemoryBlockStore, locks: Locks
) -> None:
    (a,) = saved(store, 1)
    assert locks.lock([a, a]) == [True, True]
    locks.unlock([a])
    assert not store.evict(a)
    locks.unlock([a])
    assert store.pins() == 0
    locks.unlock([a])
    assert len(locks) == 0


def test_what_could_not_be_read_is_looked_for_anew_although_it_is_locked(
    store: MemoryBlockStore, locks: Locks
) -> None:
    (a,) = saved(store, 1)
    assert locks.lock([a]) == [True]
    store.clear(1)
    locks.lost(a)
    locks.lost(a)
    assert store.pins() == 0
    assert locks.lock([a]) == [False]


def test_beyond_the_most_locks_nothing_is_found(store: MemoryBlockStore, locks: Locks) -> None:
    keys = saved(store, 6)
    assert locks.lock(keys) == [True] * 4 + [False] * 2
    assert locks.lock(keys[:1]) == [True], "what is locked can be locked again"
    locks.unlock(keys[1:2])
    assert locks.lock(keys[5:]) == [True]


def test_a_lock_that_is_not_given_back_ends_by_itself(
    store: MemoryBlockStore, locks: Locks, clock: Clock
) -> None:
    a, b = saved(store, 2)
    locks.lock([a, b])
    clock.now += TIMEOUT_S / 2
    locks.lock([a])
    clock.now += TIMEOUT_S / 2
    locks.expire()
    assert store.pins() == 1, "the later lookup of the first has extended it"
    assert not store.evict(a)
    clock.now += TIMEOUT_S / 2
    locks.expire()
    assert store.pins() == 0
    locks.unlock([a, b])
    assert store.pins() == 0


def test_what_is_not_locked_is_pinned_only_while_it_is_read(
    store: MemoryBlockStore, locks: Locks
) -> None:
    a, b = saved(store, 2)
    locks.lock([a])
    where, borrowed = locks.borrow([a, b, os.urandom(32), b])
    assert [found is not None for found in where] == [True, True, False, True]
    assert store.pins() == 2
    locks.give_back(borrowed)
    assert store.pins() == 1


def test_what_this_host_does_not_have_is_locked_where_the_index_says_it_is(
    store: MemoryBlockStore, locks: Locks
) -> None:
    (a,) = saved(store, 1)
    store.on_pin = timed_out  # as with a block that no node of this host has
    assert locks.lock([a, os.urandom(32)]) == [True, False]
    where, borrowed = locks.borrow([a])
    assert where == store.lookup([a])
    assert borrowed == []
    locks.unlock([a])
    store.on_pin = lambda: None
    assert locks.lock([a]) == [True]
    assert store.pins() == 1, "nothing was given back that had not been pinned"


def test_without_node_and_index_there_is_nothing_to_lock(
    store: MemoryBlockStore, locks: Locks
) -> None:
    (a,) = saved(store, 1)
    store.node_down = store.index_down = True
    assert locks.lock([a]) == [False]
    assert locks.borrow([a]) == ([None], [])
    assert len(locks) == 0


def test_a_block_that_two_threads_lock_at_once_is_pinned_once(
    store: MemoryBlockStore, locks: Locks
) -> None:
    (a,) = saved(store, 1)
    store.on_pin = lambda: None if len(locks) else nested()

    def nested() -> None:
        store.on_pin = lambda: None
        assert locks.lock([a]) == [True]

    assert locks.lock([a]) == [True]
    locks.unlock([a])
    assert not store.evict(a)
    locks.unlock([a])
    assert store.evict(a)


def test_closing_ends_all_locks(store: MemoryBlockStore, locks: Locks) -> None:
    locks.lock(saved(store, 3))
    locks.close()
    assert store.pins() == 0


@pytest.fixture
def thread() -> Iterator[TaskThreads]:
    thread = TaskThreads("t", lambda: None)
    yield thread
    assert thread.close()


def test_tasks_are_done_in_their_order(thread: TaskThreads) -> None:
    done: list[int] = []
    for i in range(50):
        thread.submit(lambda i=i: done.append(i), lambda: done.append(-1))
    wait_for(lambda: len(done) == 50, "the tasks")
    assert done == list(range(50))
    assert len({thread.number() for _ in range(5)}) == 5


def test_a_task_that_raises_fails_and_the_next_one_is_done(thread: TaskThreads) -> None:
    ended: list[str] = []
    thread.submit(lambda: 1 // 0, lambda: ended.append("failed"))
    thread.submit(lambda: ended.append("done"), lambda: None)
    wait_for(lambda: ended == ["failed", "done"], "both")
    assert thread.alive


def test_beyond_the_most_tasks_one_fails_at_once_but_giving_back_does_not() -> None:
    thread, running, gate = TaskThreads("t", lambda: None), threading.Event(), threading.Event()
    ended: list[str] = []
    thread.submit(lambda: (running.set(), gate.wait(PATIENCE_S)), lambda: None)
    assert running.wait(PATIENCE_S)
    for _ in range(TASKS_MAX):
        thread.submit(lambda: ended.append("done"), lambda: ended.append("failed"))
    thread.submit(lambda: None, lambda: ended.append("refused"))
    assert ended == ["refused"]
    thread.submit(lambda: ended.append("given back"), lambda: None, urgent=True)
    gate.set()
    wait_for(lambda: len(ended) == TASKS_MAX + 2, "all")
    assert ended[-1] == "given back"
    assert thread.close()


def test_several_threads_do_several_tasks_at_once() -> None:
    threads, together = TaskThreads("t", lambda: None, threads=3), threading.Barrier(3)
    done: list[int] = []
    for _ in range(3):
        threads.submit(lambda: done.append(together.wait(PATIENCE_S)), lambda: done.append(-1))
    wait_for(lambda: len(done) == 3, "the tasks, each of which waits for the others")
    assert sorted(done) == [0, 1, 2]
    assert threads.alive
    assert threads.close()
    assert not threads.alive


def test_what_waits_when_the_thread_is_closed_fails() -> None:
    thread, running, gate = TaskThreads("t", lambda: None), threading.Event(), threading.Event()
    ended: list[str] = []
    thread.submit(lambda: (running.set(), gate.wait(PATIENCE_S)), lambda: None)
    assert running.wait(PATIENCE_S)
    thread.submit(lambda: ended.append("done"), lambda: ended.append("failed"))
    threading.Timer(0.05, gate.set).start()
    assert thread.close()
    thread.submit(lambda: None, lambda: ended.append("too late"))
    assert ended == ["failed", "too late"]


def test_an_idle_thread_cleans_up() -> None:
    ran = threading.Event()
    thread = TaskThreads("t", ran.set)
    assert ran.wait(PATIENCE_S)
    assert thread.close()


def test_a_result_is_given_out_once_and_the_oldest_make_room() -> None:
    signals: list[int] = []
    results: Results[str] = Results(lambda: signals.append(1))
    results.put(1, "a")
    assert (results.pop(1), results.pop(1), len(signals)) == ("a", None, 1)
    for i in range(RESULTS_MAX + 1):
        results.put(i, "b")
    assert results.pop(0) is None
    assert len(results.pop_all()) == RESULTS_MAX
    assert results.pop_all() == {}
