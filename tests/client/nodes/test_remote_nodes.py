"""Who is there on other hosts, by a clock of its own."""

import threading
import time

import pytest
from remote_parts import remote_nodes
from stores import announcement

from kvstore.client.nodes.known import HURRIED_MAX
from kvstore.errors import IndexUnavailableError
from kvstore.index.memory import MemoryIndex
from kvstore.limits import NODE_BELIEVED_S, NODE_TTL_S
from kvstore.node.publishing.heartbeat import ANNOUNCEMENT_TTL_S, HEARTBEAT_S, JITTER
from kvstore.transport.base import Outcome, Read, Wanted
from kvstore.transport.stream.transport import NAME as STREAM
from kvstore.types import Location

WORD = announcement(node_id=7, transports={STREAM: "tcp://there:7400"})
MOMENT_S = 0.01


class Index(MemoryIndex):
    away = False
    now = 0.0

    def __init__(self):
        super().__init__(now=lambda: self.now)

    def node(self, node_id):
        if self.away:
            raise IndexUnavailableError("switched off")
        return super().node(node_id)


@pytest.fixture
def index():
    index = Index()
    index.announce(WORD.node_id, WORD.pack(), ANNOUNCEMENT_TTL_S)  # its last heartbeat
    return index


@pytest.fixture
def there(index):
    """Whether a client that asks now takes the node for alive."""
    nodes = remote_nodes(index, 1.0)

    def there(now):
        index.now = now
        return nodes.node(WORD.node_id, WORD.epoch, now) is not None

    yield there
    nodes.close()


@pytest.mark.parametrize("looked_at", [0.0, 0.5, 2.0, ANNOUNCEMENT_TTL_S - MOMENT_S])
def test_a_dead_node_is_gone_within_its_time_to_live_whenever_it_was_last_looked_for(
    there, looked_at
):
    assert there(looked_at)
    assert not there(NODE_TTL_S)


def test_while_the_index_is_away_a_node_is_believed_for_its_time_to_live(there, index):
    assert there(0.0)
    index.away = True
    steps = [i * NODE_BELIEVED_S for i in range(1, 20)]
    believed = [now for now in steps if there(now)]
    assert believed == [now for now in steps if now < NODE_TTL_S - NODE_BELIEVED_S]


def test_who_looks_for_a_node_while_another_thread_asks_for_it_first_asks_too(index, monkeypatch):
    """What nobody has answered yet is no answer."""
    nodes = remote_nodes(index, 1.0)
    asked, answer, answers = threading.Event(), threading.Event(), []
    known = index.node

    def slow(node_id):
        asked.set()
        assert answer.wait(60)
        return known(node_id)

    def look():
        answers.append(nodes.node(WORD.node_id, WORD.epoch, 0.0))

    monkeypatch.setattr(index, "node", slow)
    first = threading.Thread(target=look)
    first.start()
    assert asked.wait(60)
    monkeypatch.setattr(index, "node", known)
    look()
    answer.set()
    first.join(60)
    nodes.close()
    assert answers == [WORD, WORD]


def test_a_living_node_may_miss_two_heartbeats_in_a_row():
    assert 3 * HEARTBEAT_S * (1 + JITTER) < ANNOUNCEMENT_TTL_S


def failed(word, wanted, until):
    """A read that fails when its time is over, or before."""
    time.sleep(max(until - time.monotonic(), 0))
    return [Outcome(Read.FAILED, "too late")] * len(wanted)


@pytest.fixture
def failing(index):
    """Reads that fail: `failing(timeout_s)`; then whether the node is taken for alive."""
    nodes = remote_nodes(index, 1.0)
    nodes.stream.read = failed
    wanted = [Wanted(bytes(32), Location(7, WORD.epoch, 0, 0, 1, 0, 100, 1), (memoryview(b""),))]

    def failing(timeout_s):
        (outcome,) = nodes.read(wanted, time.monotonic() + timeout_s)
        assert outcome.read is Read.FAILED
        return nodes.node(WORD.node_id, WORD.epoch, time.monotonic()) is not None

    yield failing
    nodes.close()


def test_a_read_whose_time_was_over_before_it_began_says_nothing_about_the_node(failing):
    assert all(failing(0.0) for _ in range(10))


def test_reads_that_were_cut_short_leave_a_node_alone_only_when_there_are_several(failing):
    assert [failing(0.01) for _ in range(HURRIED_MAX)] == [True] * (HURRIED_MAX - 1) + [False]


def test_one_read_that_had_its_time_and_failed_leaves_the_node_alone(failing):
    assert not failing(2.0)


def test_after_a_read_that_was_interrupted_nobody_writes_into_the_callers_memory(index):
    """Several nodes are read at the same time, by threads of their own."""
    other = announcement(node_id=8, transports={STREAM: "tcp://elsewhere:7400"})
    index.announce(other.node_id, other.pack(), ANNOUNCEMENT_TTL_S)
    nodes = remote_nodes(index, 1.0)
    under_way, written = threading.Event(), []

    def read(word, wanted, until):
        if word.node_id == other.node_id:
            under_way.set()
            time.sleep(0.1)
            written.append(True)
            return [Outcome(Read.HIT)]
        assert under_way.wait(20)
        raise KeyboardInterrupt

    nodes.stream.read = read
    wanted = [
        Wanted(bytes(32), Location(node_id, WORD.epoch, 0, 0, 1, 0, 0, 1), (memoryview(b""),))
        for node_id in (WORD.node_id, other.node_id)
    ]
    with pytest.raises(KeyboardInterrupt):
        nodes.read(wanted)
    assert written
    nodes.close()


def test_a_host_without_threads_to_give_reads_from_one_node_and_no_exception(index, monkeypatch):
    """What was put off for want of a thread is not read when one is free later: the caller has
    its memory back by then."""
    other = announcement(node_id=8, transports={STREAM: "tcp://elsewhere:7400"})
    index.announce(other.node_id, other.pack(), ANNOUNCEMENT_TTL_S)
    nodes = remote_nodes(index, 1.0)
    read_from = []

    def read(word, wanted, until):
        read_from.append(word.node_id)
        return [Outcome(Read.HIT)]

    nodes.stream.read = read
    wanted = [
        Wanted(bytes(32), Location(node_id, WORD.epoch, 0, 0, 1, 0, 0, 1), (memoryview(b""),))
        for node_id in (WORD.node_id, other.node_id)
    ]

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        outcomes = nodes.read(wanted)
    assert [outcome.read for outcome in outcomes] == [Read.HIT, Read.FAILED]
    del read_from[:]
    assert [outcome.read for outcome in nodes.read(wanted)] == [Read.HIT] * 2
    nodes.close()
    assert sorted(read_from) == [WORD.node_id, other.node_id]


def test_another_start_of_a_node_is_another_node(index):
    nodes = remote_nodes(index, 1.0)
    assert nodes.node(WORD.node_id, WORD.epoch, 0.0) is not None
    for epoch in (WORD.epoch - 1, WORD.epoch + 1):
        assert nodes.node(WORD.node_id, epoch, 0.0) is None
    nodes.close()


def test_what_another_node_announces_under_an_id_is_not_believed(index):
    index.announce(8, WORD.pack(), ANNOUNCEMENT_TTL_S)
    nodes = remote_nodes(index, 1.0)
    assert nodes.node(8, WORD.epoch, 0.0) is None
    nodes.close()
