"""When a client asks the index about nodes of other hosts, and how long it believes the answer."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from stores import announcement

from kvstore.client.nodes import directory as node_directory
from kvstore.client.nodes.directory import (
    LISTED_EVERY_S,
    NODE_BELIEVED_S,
    NODE_TTL_S,
    NodeDirectory,
)
from kvstore.errors import IndexUnavailableError
from kvstore.index.memory import MemoryIndex
from kvstore.machine import Machine

START = 1000.0


class Stopped(Machine):
    """Time passes as the test says; locks note for how long somebody would wait."""

    def __init__(self):
        self.now = START
        self.monotonic = lambda: self.now


class Away(MemoryIndex):
    def __init__(self):
        super().__init__()
        self.asked = []
        self.away = False
        self.meanwhile = lambda: None

    def node(self, node_id):
        self.asked.append(node_id)
        self.meanwhile()
        if self.away:
            raise IndexUnavailableError("away")
        return super().node(node_id)

    def nodes(self):
        self.asked.append("all")
        self.meanwhile()
        if self.away:
            raise IndexUnavailableError("away")
        return super().nodes()


@pytest.fixture
def index():
    return Away()


@pytest.fixture
def machine():
    return Stopped()


@pytest.fixture
def directory(index, machine):
    return NodeDirectory(Path("/nonexistent"), index, "kv:t", machine=machine)


def announce(index, node_id, **changes):
    index.announce(node_id, announcement(node_id=node_id, **changes).pack(), 600.0)


def test_what_was_heard_is_believed_so_long_and_then_asked_for_anew(index, directory):
    announce(index, 1)
    known = directory.node(1, START)
    assert (known.sent_bytes, known.heard_at) == (0, START)
    directory.node(1, START + NODE_BELIEVED_S * 0.99)
    assert index.asked == [1]
    directory.node(1, START + NODE_BELIEVED_S)
    assert index.asked == [1, 1]
    assert known.heard_at == START, "it said the same"


def test_who_comes_while_the_index_is_asked_goes_on_with_what_was_heard(index, directory):
    announce(index, 1)
    directory.node(1, START)
    later = START + NODE_BELIEVED_S
    seen = []

    def others():
        index.meanwhile = lambda: None
        seen.append(directory.node(1, later).announcement is not None)
        seen.append(directory.node(1, later + NODE_BELIEVED_S * 0.99).announcement is not None)

    index.meanwhile = others
    directory.node(1, later)
    assert (seen, index.asked) == ([True, True], [1, 1])


def test_what_another_thread_has_heard_meanwhile_is_not_asked_for_again(index, directory):
    announce(index, 1)
    lock = directory._lock

    class Taken:
        """Another thread had it, and has asked."""

        def __enter__(self):
            directory._lock = lock
            directory.node(1, START)
            return lock.__enter__()

        def __exit__(self, *error):
            return lock.__exit__(*error)

    directory._lock = Taken()
    assert directory.node(1, START).announcement is not None
    assert index.asked == [1]


def test_of_a_node_that_was_never_heard_of_each_asks(index, directory):
    """There is nothing to go on with."""

    def others():
        index.meanwhile = lambda: None
        directory.node(1, START)

    index.meanwhile = others
    directory.node(1, START)
    assert index.asked == [1, 1]


def test_while_the_index_is_away_a_node_is_there_as_long_as_its_word_would_be(index, directory):
    announce(index, 1)
    directory.node(1, START)
    index.away = True
    last = NODE_TTL_S - NODE_BELIEVED_S
    for passed_s, is_there in ((last - 0.01, True), (last + NODE_BELIEVED_S, False)):
        known = directory.node(1, START + passed_s)
        assert (known.announcement is not None) == is_there


def test_it_is_gone_at_that_moment_and_not_after_it(index, directory):
    announce(index, 1)
    directory.node(1, START)
    index.away = True
    assert directory.node(1, START + NODE_TTL_S - NODE_BELIEVED_S).announcement is None


def test_all_are_asked_for_every_so_often(index, directory, machine):
    announce(index, 1)
    for passed_s, asked in ((0.0, 1), (LISTED_EVERY_S * 0.99, 1), (LISTED_EVERY_S, 2)):
        machine.now = START + passed_s
        directory.look_around(machine.now, machine.now)
        assert index.asked == ["all"] * asked


def test_an_index_that_is_away_is_asked_no_more_often_and_forgets_nobody(index, directory, machine):
    announce(index, 1)
    directory.look_around(START, START)
    index.away = True
    machine.now = START + LISTED_EVERY_S
    for _ in range(2):
        directory.look_around(machine.now, machine.now)
    assert index.asked == ["all"] * 2
    assert len(directory.all()) == 1


class Lock:
    """Notes how long somebody waits for it; held by another, who lets go at the end of a wait."""

    def __init__(self, got, meanwhile=lambda: None):
        self.waits = []
        self.released = 0
        self._got, self._meanwhile = got, meanwhile

    def acquire(self, timeout):
        self.waits.append(timeout)
        self._meanwhile()
        return self._got

    def release(self):
        self.released += 1
        if not self._got:
            raise RuntimeError("it was never got")


@pytest.mark.parametrize(("known", "waits_s"), [(False, 2.0), (True, 0.0)])
def test_who_knows_nobody_waits_for_the_first_one_until_its_deadline(
    index, directory, machine, known, waits_s
):
    announce(index, 1)
    if known:
        directory.node(1, START)
    index.asked.clear()
    directory._looking = lock = Lock(got=False)
    directory.look_around(START, START + 2.0)
    assert (lock.waits, lock.released, index.asked) == ([waits_s], 1, [])
    directory.look_around(START, START - 1.0)
    assert lock.waits == [waits_s, 0.0]


def test_what_the_first_one_has_found_is_not_asked_for_again(index, directory):
    directory._looking = lock = Lock(got=True, meanwhile=directory._ask_all)
    directory.look_around(START, START)
    assert (index.asked, lock.released) == (["all"], 1)


def test_the_lock_is_free_afterwards(index, directory):
    directory.look_around(START, START)
    free = []
    thread = threading.Thread(target=lambda: free.append(directory._looking.acquire(timeout=5.0)))
    thread.start()
    thread.join()
    assert free == [True]


def test_a_forked_child_has_locks_of_its_own(index, directory):
    before = directory._lock, directory._looking
    directory.after_fork_in_child()
    assert directory._lock is not before[0]
    assert directory._looking is not before[1]


def test_one_that_is_known_takes_nobodys_place(index, directory, monkeypatch):
    monkeypatch.setattr(node_directory, "NODES_KNOWN_MAX", 2)
    for node_id in (1, 2):
        announce(index, node_id)
        directory.node(node_id, START)
    announce(index, 2, epoch=5)
    assert directory.node(2, START + NODE_BELIEVED_S).epoch == 5
    assert sorted(node.node_id for _, node in directory.all()) == [1, 2]
