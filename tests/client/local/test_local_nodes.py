"""Which segments of this host a client maps, whose it takes them for, and when it lets them go.

Longer than other files: one class is under test, and all of it needs the nodes at its head."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from stores import announcement

from kvstore.client.local import nodes as nodes_module
from kvstore.client.local.nodes import ABSENT_S, ALIVE_CHECK_S, LocalNodes
from kvstore.errors import IndexUnavailableError
from kvstore.index.memory import MemoryIndex
from kvstore.machine import REAL
from kvstore.nodedir import Announcement, NodeDir
from kvstore.segment.header import Superblock
from kvstore.segment.shm import OwnedShm
from kvstore.system.filelock import FileLock, try_lock
from kvstore.transport.cuda_memory import NAME as CUDA_IPC

OURS = "redis://ours"


class Index(MemoryIndex):
    away = False

    def identity(self) -> str:
        return OURS

    def node(self, node_id: int) -> bytes | None:
        if self.away:
            raise IndexUnavailableError("away")
        return super().node(node_id)


class Spied:
    """The machine; sweeps are counted, and locks and directories may be others."""

    def __init__(self) -> None:
        self.sweeps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(REAL, name)

    def sweep(self, run_dir: Path) -> list[str]:
        self.sweeps += 1
        return []


class Node:
    """The directory, the segment and the lock of a node."""

    def __init__(self, run_dir: Path, node_id: int, **changes: Any) -> None:
        self.directory = NodeDir(run_dir, f"n{node_id}")
        self.directory.path.mkdir(parents=True)
        self._lock: FileLock | None = try_lock(self.directory.lock)
        self.segment = OwnedShm(run_dir / f"s{node_id}", Superblock(node_id, 1, 0, 128 << 10))
        self.say(
            node_id=node_id,
            data_path=str(self.segment.data_path),
            head_path=str(self.segment.head_path),
            **changes,
        )

    def say(self, **changes: Any) -> None:
        self.word: Announcement = announcement(name=self.directory.name, **changes)
        self.directory.announce(self.word)

    def restart(self) -> None:
        self.word = dataclasses.replace(self.word, epoch=self.word.epoch + 1)
        self.directory.announce(self.word)

    def die(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def close(self) -> None:
        self.die()
        self.segment.close()


NodeOf = Callable[..., Node]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeOf]:
    made: list[Node] = []

    def make(node_id: int, **changes: Any) -> Node:
        made.append(Node(tmp_path, node_id, **changes))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def machine() -> Spied:
    return Spied()


@pytest.fixture
def nodes(tmp_path: Path, machine: Spied) -> Iterator[LocalNodes]:
    made = LocalNodes(tmp_path, Index(), "kv:t", machine=machine)  # type: ignore[arg-type]
    yield made
    made.close()


def ids(attached: Any) -> list[int]:
    return [one.announcement.node_id for one in attached]


# --- by a record ------------------------------------------------------------


def test_a_start_of_a_node_is_mapped_once_and_is_of_the_own_index(
    nodes: LocalNodes, node: NodeOf, machine: Spied
) -> None:
    node(1)
    node(2)
    assert nodes.mapped == ()
    first = nodes.segment(2, 1, 0.0)
    assert first is not None
    assert (first.announcement.node_id, first.ours, first.gone) == (2, True, False)
    assert nodes.segment(2, 1, 1.0) is first
    second = nodes.segment(1, 1, 1.0)
    assert nodes.mapped == (second, first)
    assert nodes.segment(1, 2, 1.0) is None
    assert (machine.sweeps, nodes.gone) == (0, 0)


def test_what_a_record_names_is_of_the_own_index_from_then_on(
    nodes: LocalNodes, node: NodeOf
) -> None:
    node(1, index="redis://another")
    assert ids(nodes.every(0.0)) == [1]
    assert nodes.ours(0.0, find=True) == []
    assert nodes.segment(1, 1, 0.0) is not None
    assert ids(nodes.ours(0.0, find=False)) == [1]


def test_no_such_node_is_believed_for_a_while(nodes: LocalNodes, node: NodeOf) -> None:
    assert nodes.segment(1, 1, 8.0) is None
    node(1)
    assert nodes.segment(1, 1, 8.0 + ABSENT_S / 2) is None
    assert nodes._attach(1, 1, 8.0 + ABSENT_S / 2) is None, "another thread has just looked"
    assert nodes.segment(1, 1, 8.0 + ABSENT_S) is not None


def test_no_more_absent_nodes_are_remembered_than_may_be(
    nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes_module, "ABSENT_MAX", 2)
    for node_id in (1, 2, 3):
        assert nodes.segment(node_id, 1, 1.0) is None
        assert len(nodes._absent) == (node_id - 1) % 2 + 1


def test_a_dead_node_is_not_mapped_but_swept(
    nodes: LocalNodes, node: NodeOf, machine: Spied
) -> None:
    node(1).die()
    assert nodes.segment(1, 1, 0.0) is None
    assert machine.sweeps == 1
    assert nodes.every(0.0) == ()


def test_a_segment_that_cannot_be_mapped_is_none_and_a_directory_without_a_word_is_passed_over(
    nodes: LocalNodes, node: NodeOf, tmp_path: Path
) -> None:
    (tmp_path / "nodes" / "a").mkdir(parents=True)
    broken = node(1)
    broken.segment.head_path.rename(tmp_path / "elsewhere")
    node(2)
    assert nodes.segment(1, 1, 0.0) is None
    assert (1, 1) in nodes._absent
    assert nodes.segment(2, 1, 0.0) is not None
    assert ids(nodes.every(0.0)) == [2]
    assert ids(nodes.ours(0.0, find=True)) == [2]
    assert nodes.writables() == []


@pytest.mark.parametrize("changes", [{"epoch": 2}, {"node_id": 2}])
def test_a_segment_whose_superblock_names_another_start_is_not_mapped(
    nodes: LocalNodes, node: NodeOf, changes: dict[str, int]
) -> None:
    """The word may be older or newer than the file: what lies there is not what it promises."""
    there = node(1)
    word = dataclasses.replace(there.word, **changes)
    there.directory.announce(word)
    assert nodes.segment(word.node_id, word.epoch, 1.0) is None
    assert not nodes.map_all(1.0)
    assert nodes.mapped == ()


def test_who_waited_while_another_thread_mapped_it_has_the_same_segment(
    nodes: LocalNodes, node: NodeOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    node(1)

    @contextmanager
    def lock() -> Iterator[None]:
        nodes._attach(1, 1, 0.0)
        yield

    with monkeypatch.context() as patched:
        patched.setattr(nodes, "_lock", lock())
        found = nodes.segment(1, 1, 0.0)
    assert nodes.mapped == (found,)


def test_what_a_handler_of_signals_raises_while_a_segment_is_mapped_is_not_lost(
    nodes: LocalNodes, node: NodeOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handle(*_: object) -> None:
        raise TimeoutError

    node(1)
    signalled = "kvstore.client.local.nodes.files_of"
    monkeypatch.setattr(signalled, lambda *_: signal.raise_signal(signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(TimeoutError):
            nodes.segment(1, 1, 0.0)
    finally:
        signal.signal(signal.SIGUSR1, before)


def free_for_others(nodes: LocalNodes) -> bool:
    """Whether another thread can have the lock."""

    def taken() -> bool:
        got = nodes._lock.acquire(blocking=False)
        if got:
            nodes._lock.release()
        return got

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(taken).result()


# --- without a record -------------------------------------------------------


def test_every_living_node_of_the_same_keys_is_mapped_when_nobody_can_be_asked(
    nodes: LocalNodes, node: NodeOf
) -> None:
    node(1, index="redis://another")
    node(2, key_prefix="kv:another", index=OURS)
    node(3, index=OURS)
    node(4, index=OURS).die()
    assert nodes.map_all(8.0)
    assert sorted(ids(nodes.mapped)) == [1, 3]
    assert not nodes.map_all(8.0 + ABSENT_S), "nothing new"
    node(5)
    assert not nodes.map_all(8.0 + ABSENT_S * 1.5), "it has just looked"
    assert nodes.map_all(8.0 + ABSENT_S * 2)
    assert sorted(ids(nodes.every(8.0 + ABSENT_S * 2))) == [1, 3, 5]
    assert nodes.ours(8.0 + ABSENT_S * 2, find=False) == []


def test_of_the_own_index_without_a_question_are_those_that_name_it_or_were_known_to_it(
    nodes: LocalNodes, node: NodeOf
) -> None:
    node(1, index="redis://another")
    node(2, index="redis://alias")
    node(3, index=OURS)
    node(4, index="")
    nodes._index.announce(2, b"{}", 60.0)
    assert ids(nodes.ours(8.0, find=False)) == []
    assert ids(nodes.ours(8.0, find=True)) == [3]
    assert ids(nodes.mapped) == [3]
    assert sorted(found.node_id for found, _ in nodes.writables()) == [2, 3]
    assert ids(nodes.ours(8.0 + ABSENT_S / 2, find=True)) == [3], "it has just looked"
    assert sorted(ids(nodes.ours(8.0 + ABSENT_S, find=True))) == [2, 3]


def test_a_segment_that_was_mapped_for_want_of_an_index_is_taken_for_ours_when_it_is(
    nodes: LocalNodes, node: NodeOf
) -> None:
    node(1, index=OURS)
    node(2, index="redis://another")
    assert nodes.map_all(8.0)
    assert ids(nodes.ours(8.0, find=True)) == [1]
    assert nodes.map_all(9.0) is False
    assert ids(nodes.ours(9.0, find=True)) == [1]
    assert len(nodes.mapped) == 2


def test_who_must_not_wait_does_not_wait_for_who_looks_around(
    nodes: LocalNodes, node: NodeOf
) -> None:
    node(1, index=OURS)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with nodes._lock:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(20)
    freed = threading.Timer(5, done.set)
    freed.start()
    assert nodes.ours(8.0, find=True) == []
    assert not done.is_set()
    done.set()
    thread.join()
    freed.cancel()
    assert ids(nodes.ours(8.0, find=True)) == [1], "it was no look"
    assert free_for_others(nodes)


# --- the dead ---------------------------------------------------------------


def test_a_node_that_dies_or_starts_anew_is_let_go_at_the_next_look(
    nodes: LocalNodes, node: NodeOf, machine: Spied
) -> None:
    dies, restarts = node(1), node(2)
    node(3)
    nodes.check(8.0)
    assert len(nodes.every(8.0)) == 3
    one, two, three = (nodes.segment(node_id, 1, 8.0) for node_id in (1, 2, 3))
    dies.die()
    restarts.restart()
    nodes.check(8.0 + ALIVE_CHECK_S / 2)
    assert len(nodes.mapped) == 3
    nodes.check(8.0 + ALIVE_CHECK_S)
    assert nodes.mapped == (three,)
    assert one is not None
    assert two is not None
    assert one.gone
    assert two.gone
    assert (nodes.gone, machine.sweeps) == (2, 1)
    nodes.check(8.0 + 2 * ALIVE_CHECK_S)
    assert (nodes.gone, machine.sweeps) == (2, 1)
    assert nodes.segment(1, 1, 9.0) is None


@pytest.mark.parametrize("ask", ["ours", "every"])
def test_whoever_asks_for_segments_gets_none_of_the_dead(
    nodes: LocalNodes, node: NodeOf, ask: str
) -> None:
    one = node(1)
    assert nodes.segment(1, 1, 0.0) is not None
    one.die()
    found = nodes.ours(8.0, find=False) if ask == "ours" else nodes.every(8.0)
    assert list(found) == []


def test_a_look_for_the_dead_waits_for_nobody(nodes: LocalNodes, node: NodeOf) -> None:
    one = node(1)
    assert nodes.segment(1, 1, 0.0) is not None
    one.die()
    taken = threading.Event()
    done = threading.Event()

    def hold() -> None:
        with nodes._lock:
            taken.set()
            done.wait(5)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(20)
    nodes.check(8.0)
    assert not done.is_set()
    assert len(nodes.mapped) == 1
    done.set()
    thread.join()
    nodes.check(8.0)
    assert nodes.mapped == ()
    assert free_for_others(nodes)


# --- writing ----------------------------------------------------------------


def test_those_to_write_to_live_serve_the_same_keys_and_are_of_the_same_index(
    nodes: LocalNodes, node: NodeOf, machine: Spied
) -> None:
    node(1, index=OURS)
    node(2, index=OURS, key_prefix="kv:another")
    node(3, index=OURS, transports={CUDA_IPC: "there"})
    node(4, index=OURS).die()
    node(5, index="redis://another")
    node(6, index="redis://alias")
    nodes._index.announce(6, b"{}", 60.0)
    assert [directory.name for _, directory in nodes.writables()] == ["n1", "n6"]
    assert machine.sweeps == 1
    for name, found in ((None, "n1"), ("n1", "n1"), ("n6", "n6")):
        chosen = nodes.writable(name)
        assert chosen is not None
        assert chosen[1].name == found
    assert nodes.writable("n5") is None


@pytest.fixture
def asked(nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The nodes that the index is asked about."""
    seen: list[int] = []
    known = nodes._index.node

    def node_of(node_id: int) -> bytes | None:
        seen.append(node_id)
        return known(node_id)

    monkeypatch.setattr(nodes._index, "node", node_of)
    return seen


def test_the_index_is_asked_once_about_each_start(
    nodes: LocalNodes, node: NodeOf, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes_module, "ABSENT_MAX", 2)
    for node_id in (1, 2, 3):
        node(node_id, index="redis://alias")
        nodes._index.announce(node_id, b"{}", 60.0)
        for _ in range(2):
            assert len(nodes.writables()) == node_id
        if node_id < 3:
            assert asked == list(range(1, node_id + 1))
    assert len(nodes._ours) <= 2


def test_an_index_that_is_away_is_said_when_no_node_names_it(
    nodes: LocalNodes, node: NodeOf
) -> None:
    assert isinstance(nodes._index, Index)
    nodes._index.away = True
    assert nodes.writables() == []
    node(2, index="redis://alias")
    with pytest.raises(IndexUnavailableError):
        nodes.writables()
    node(1, index=OURS)
    assert [word.node_id for word, _ in nodes.writables()] == [1]
    nodes._index.away = False
    assert [word.node_id for word, _ in nodes.writables()] == [1]


# --- the end, and none at all -----------------------------------------------


def test_after_a_close_there_are_none(nodes: LocalNodes, node: NodeOf, machine: Spied) -> None:
    node(1, index=OURS)
    attached = nodes.segment(1, 1, 0.0)
    assert attached is not None
    nodes.close()
    assert attached.gone
    assert machine.sweeps == 1
    assert nodes.mapped == ()
    assert nodes.segment(1, 1, 8.0) is None
    assert nodes.every(8.0) == ()
    assert nodes.ours(8.0, find=True) == []
    assert nodes.writables() == []
    assert nodes._attached == {}


def test_what_is_mapped_while_it_closes_is_not_kept(
    tmp_path: Path, node: NodeOf, machine: Spied
) -> None:
    node(1)
    told: list[None] = []
    nodes = LocalNodes(tmp_path, Index(), "kv:t", mapping=lambda: told.append(None))
    real = nodes._map

    def closing(*arguments: Any, **options: Any) -> Any:
        nodes._use = False
        return real(*arguments, **options)

    nodes._map = closing  # type: ignore[method-assign]
    nodes.segment(1, 1, 0.0)
    assert (nodes.mapped, len(told)) == ((), 1)


def test_a_client_that_uses_no_nodes_of_this_host_finds_none(tmp_path: Path, node: NodeOf) -> None:
    node(1, index=OURS)
    told: list[None] = []
    nodes = LocalNodes(tmp_path, Index(), "kv:t", use=False, mapping=lambda: told.append(None))
    assert nodes.segment(1, 1, 0.0) is None
    assert nodes.map_all(0.0) is False
    assert nodes.every(0.0) == ()
    assert nodes.ours(0.0, find=True) == []
    assert nodes.writables() == []
    assert told == []


def test_a_forked_child_waits_for_no_thread_of_its_parent(nodes: LocalNodes, node: NodeOf) -> None:
    node(1)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(nodes._lock.acquire).result()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os._exit(0 if nodes.segment(1, 1, 0.0) is not None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        pool.submit(nodes._lock.release).result()


def test_two_that_cannot_be_named_are_not_the_same_index(
    nodes: LocalNodes, node: NodeOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Index, "identity", lambda self: "")
    node(1, index="")
    assert nodes.ours(8.0, find=True) == []
    assert nodes.writables() == []
