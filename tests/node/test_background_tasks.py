"""A bug in what a node does in the background is told, and keeps nothing from going on."""

import time

import pytest
from redis_servers import wait_until
from stores import in_loop

from kvstore.errors import NodeUnavailableError
from kvstore.index.memory import MemoryIndex
from kvstore.node import Node, NodeConfig, background_tasks
from kvstore.node.publishing.heartbeat import Heartbeat
from kvstore.node.publishing.publisher import Publisher
from kvstore.node.publishing.scrubber import Scrubber

MIB = 1 << 20


@pytest.fixture
def index():
    return MemoryIndex()


@pytest.fixture
def node(tmp_path, index, monkeypatch):
    monkeypatch.setattr(background_tasks, "RESTART_AFTER_S", 0.01)
    node = Node(NodeConfig(run_dir=tmp_path, size_bytes=4 * MIB), index).start()
    yield node
    node.stop()


def fails_once(monkeypatch, owner, name, error):
    real = getattr(owner, name)
    calls = []

    def broken(*args):
        calls.append(time.monotonic())
        if len(calls) == 1:
            raise error
        return real(*args)

    monkeypatch.setattr(owner, name, broken)
    return calls


@pytest.mark.parametrize("error", [TypeError("our bug"), OSError(28, "No space left on device")])
@pytest.mark.parametrize(
    ("owner", "name"), [(Heartbeat, "beat"), (Scrubber, "step"), (Node, "_end_former")]
)
def test_a_task_that_fails_is_told_counted_and_goes_on(
    node, monkeypatch, caplog, owner, name, error
):
    calls = fails_once(monkeypatch, owner, name, error)
    wait_until(lambda: len(calls) > 2, "it goes on")
    assert node.stats()["tasks_failed"] == 1
    (told,) = [record for record in caplog.records if "starts anew" in record.message]
    assert told.exc_info[1] is error


def has_ended(node):
    return not node._thread.is_alive()


def test_a_node_ends_when_nobody_would_publish_any_more(node, index, monkeypatch, caplog):
    fails_once(monkeypatch, Publisher, "_flush", TypeError("our bug"))
    in_loop(node, node.publisher._flush)
    wait_until(lambda: has_ended(node), "it ends")
    with pytest.raises(NodeUnavailableError, match="our bug"):
        node.stats()
    assert index.nodes() == {}


def test_a_node_ends_whatever_its_core_raises(node, monkeypatch):
    fails_once(monkeypatch, type(node.core), "handle", IndexError("our bug"))
    in_loop(node, node.act, None)
    wait_until(lambda: has_ended(node), "it ends")
    with pytest.raises(NodeUnavailableError, match="our bug"):
        node.stats()
