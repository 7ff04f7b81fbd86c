"""What a client knows of the nodes of other hosts, over a model of the index."""

import time
from pathlib import Path

import pytest
from stores import announcement

from kvstore.circuit_breaker import BreakerState
from kvstore.client.nodes import directory as node_directory
from kvstore.client.nodes.directory import NodeDirectory
from kvstore.index.memory import MemoryIndex
from kvstore.transport.stream.security import StreamSecurity
from kvstore.transport.stream.transport import StreamTransport


class CountingIndex(MemoryIndex):
    def __init__(self):
        super().__init__()
        self.asked = []

    def node(self, node_id):
        self.asked.append(node_id)
        return super().node(node_id)

    def nodes(self):
        self.asked.append("all")
        return super().nodes()


@pytest.fixture
def index():
    return CountingIndex()


@pytest.fixture
def directory(index):
    stream = [StreamTransport(StreamSecurity())]
    return NodeDirectory(
        Path("/nonexistent"),
        index,
        "kv:t",
        offered=lambda node: [] if node.name == "unreachable" else stream,
    )


def announce(index, node_id, **changes):
    index.announce(node_id, announcement(node_id=node_id, **changes).pack(), 600.0)


def far():
    return time.monotonic() + 60.0


def test_one_question_tells_of_all_nodes(index, directory):
    for node_id in (1, 2, 3):
        announce(index, node_id)
    announce(index, 4, name="unreachable")
    now = time.monotonic()
    directory.look_around(now, far())
    directory.look_around(now, far())
    assert sorted(node.node_id for _, node in directory.all()) == [1, 2, 3]
    assert [directory.node(node_id, now).epoch for node_id in (1, 2, 3)] == [1, 1, 1]
    assert index.asked == ["all"]


def test_a_node_that_announces_itself_no_more_is_absent(index, directory, monkeypatch):
    announce(index, 1)
    directory.look_around(time.monotonic(), far())
    index.withdraw(1)
    monkeypatch.setattr(directory, "looked_at", float("-inf"))
    directory.look_around(time.monotonic(), far())
    assert directory.all() == []
    assert directory.node(1, time.monotonic()).announcement is None


def test_the_next_start_of_a_node_begins_anew(index, directory, monkeypatch):
    monkeypatch.setattr(node_directory, "NODE_BELIEVED_S", 0.0)
    announce(index, 1, epoch=1)
    former = directory.node(1, time.monotonic())
    former.breaker.failed(time.monotonic(), hung=True)
    former.sent_bytes = 1000
    assert directory.node(1, time.monotonic()) is former
    announce(index, 1, epoch=2)
    known = directory.node(1, time.monotonic())
    assert (known.epoch, known.sent_bytes, known.breaker.state) == (2, 0, BreakerState.CLOSED)
    assert former.breaker.state is BreakerState.OPEN


def test_what_was_sent_counts_until_the_node_says_anew_how_much_room_it_has(
    index, directory, monkeypatch
):
    monkeypatch.setattr(node_directory, "NODE_BELIEVED_S", 0.0)
    announce(index, 1, free_bytes=1000)
    known = directory.node(1, time.monotonic())
    known.sent_bytes = 400
    assert directory.node(1, time.monotonic()).sent_bytes == 400
    announce(index, 1, free_bytes=700)
    assert directory.node(1, time.monotonic()).sent_bytes == 0


def test_no_more_nodes_are_kept_than_may_be(index, directory, monkeypatch):
    monkeypatch.setattr(node_directory, "NODES_KNOWN_MAX", 2)
    for node_id in (1, 2, 3):
        announce(index, node_id)
        directory.node(node_id, time.monotonic())
    assert sorted(node.node_id for _, node in directory.all()) == [2, 3]
