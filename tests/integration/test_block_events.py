"""Routers know which blocks are on which nodes: real nodes, real ZeroMQ."""

import signal
import time
from pathlib import Path

import pytest
import zmq
from redis_servers import wait_until
from stores import MIB, NodeProcess

from kvstore import Client, Namespace
from kvstore.errors import UsageError
from kvstore.nodedir import NodeDir
from kvstore.protocol.block_events import END, sequence_bytes, sequence_of, unpack_changes
from kvstore.spi import Residency
from kvstore.testing.ports import held_ports

SOON_S = 20.0
VALUE = b"v" * (64 << 10)


def key(name):
    return Namespace.named("default").value_key(name)


def put(client, names):
    for name in names:
        assert client.put(name, VALUE)


def knows(residency, names):
    return all(len(residency.leading([key(name)])) == 1 for name in names)


def there(client, names):
    """Which are there, by the node's own headers."""
    return {name for name in names if client.exists(name)}


def exact(residency, client, names):
    return all((len(residency.leading([key(n)])) == 1) == client.exists(n) for n in names)


@pytest.fixture
def place(tmp_path):
    return f"ipc://{tmp_path}/events"


@pytest.fixture
def node(redis_server, place):
    with NodeProcess(redis_server, size=8 * MIB, options=("--events", place)) as node:
        yield node


@pytest.fixture
def client(node):
    with Client(**node.client_options) as client:
        yield client


@pytest.fixture
def residency(node, place):
    with Residency([place]) as residency:
        wait_until(lambda: residency.in_sync, "the listener is in sync", SOON_S)
        yield residency


def test_a_router_hears_of_what_is_stored_evicted_deleted_and_cleared(node, client, residency):
    names = [f"n{i}" for i in range(400)]
    put(client, names[:10])
    wait_until(lambda: knows(residency, names[:10]), "ten are known", SOON_S)
    holder = residency.leading([key("n0")])[0]
    assert holder.name == "node"
    client.delete("n3")
    wait_until(lambda: exact(residency, client, names[:10]), "one is known to be gone", SOON_S)
    put(client, names[10:])
    assert not client.exists("n0"), "400 values of 64 KiB do not fit into 8 MiB"
    wait_until(lambda: exact(residency, client, names), "evictions are known", SOON_S)
    client.clear()
    wait_until(lambda: residency.blocks() == 0, "that all is gone is known", SOON_S)
    assert residency.counts() == {"gaps": 0, "snapshots": 1}


def test_a_router_that_starts_later_is_told_what_is_there(node, client, place):
    names = [f"n{i}" for i in range(400)]
    put(client, names)
    with Residency([place]) as residency:
        wait_until(lambda: residency.in_sync, "the listener is in sync", SOON_S)
        assert exact(residency, client, names)
        assert residency.blocks() == len(there(client, names))


def test_a_node_that_is_killed_and_starts_again_is_known_by_its_new_epoch(
    node, client, residency, place
):
    names = [f"n{i}" for i in range(60)]
    put(client, names)
    wait_until(lambda: knows(residency, names), "all are known", SOON_S)
    node.kill()
    node.start()
    with Client(**node.client_options) as again:
        again.delete("n1")
        put(again, ["other"])
        wait_until(
            lambda: residency.counts()["snapshots"] == 2 and residency.in_sync,
            "the new start is known",
            SOON_S,
        )
        assert len(there(again, names)) == 59, "a warm restart"
        wait_until(lambda: exact(residency, again, [*names, "other"]), "all is exact", SOON_S)
        assert residency.blocks() == 60


def test_a_node_that_is_killed_for_good_holds_nothing_soon(node, client, residency):
    put(client, ["a"])
    wait_until(lambda: knows(residency, ["a"]), "it is known", SOON_S)
    node.kill()
    wait_until(lambda: not knows(residency, ["a"]), "the node is known to be gone", SOON_S)
    assert not residency.in_sync
    assert residency.blocks() == 0


def test_a_router_that_slept_through_more_than_is_kept_for_it_is_exact_again(
    node, client, residency, monkeypatch
):
    """Its own socket holds so many messages, and the node what it was given: the rest is lost."""
    names = [f"n{i}" for i in range(3000)]
    put(client, names[:50])
    wait_until(lambda: knows(residency, names[:50]), "all are known", SOON_S)
    held = residency._nodes[0]
    reading = held.read_events
    held.read_events = lambda poller: time.sleep(0.01)
    small = b"s" * 100
    for name in names:
        assert client.put(name, small, replace=True)
    for name in names[::2]:
        client.delete(name)
    held.read_events = reading
    wait_until(
        lambda: residency.in_sync and exact(residency, client, names[::97]), "it catches up", SOON_S
    )
    assert exact(residency, client, names)
    assert residency.counts()["gaps"] >= 1, "nothing was lost: the test is too small"


def test_vllms_way_to_ask_for_what_was_missed_is_answered(node, client, place):
    """By a REQ-like exchange as vLLM's own subscribers have it."""
    put(client, ["a"])
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.linger, asking.rcvtimeo = 0, int(SOON_S * 1000)
        asking.connect(f"{place}.replay")

        def ask(start):
            """Once: a question waits where the node does not know yet that two answers were taken
            (event_answers.py)."""
            asking.send_multipart([b"", sequence_bytes(start)])
            found = []
            while True:
                empty, _topic, number, payload = asking.recv_multipart()
                assert empty == b""
                if number == END:
                    return found
                found.append((sequence_of(number), unpack_changes(payload)))

        def stored(messages):
            return [k for _, parts in messages for change in parts for k in change.stored]

        wait_until(lambda: stored(ask(0)), "a", SOON_S)
        everything = ask(0)
        last = everything[-1][0]
        assert everything[0][1][0].cleared
        assert stored(everything) == [key("a")]
        put(client, ["b"])
        since = []
        # A put is answered while the event is on its way.
        wait_until(lambda: since.extend(ask(last + 1 + len(since))) or stored(since), "b", SOON_S)
        assert [number for number, _ in since] == list(range(last + 1, last + 1 + len(since)))
        assert stored(since) == [key("b")]
        future = ask(last + 10_000)
        assert future[0][1][0].cleared, "a number of another start has everything as its answer"
        asking.send_multipart([b"", b"no number"])
        asking.send_multipart([b""])
        assert ask(0)


def test_a_node_that_stops_says_that_its_blocks_are_gone(node, client, residency):
    put(client, ["a"])
    wait_until(lambda: knows(residency, ["a"]), "it is known", SOON_S)
    view = residency._nodes[0].view
    node.signal(signal.SIGTERM)
    wait_until(lambda: not view.keys, "it said so", SOON_S)


def test_a_place_that_is_taken_keeps_the_node_from_starting(redis_server, tmp_path):
    with held_ports(1) as (port,):
        from kvstore.index.memory import MemoryIndex
        from kvstore.node import Node, NodeConfig

        with zmq.Context() as context, context.socket(zmq.PUB) as other:
            other.bind(f"tcp://127.0.0.1:{port}")
            config = NodeConfig(run_dir=tmp_path, size_bytes=4 * MIB, events=str(port))
            with pytest.raises(UsageError, match=f"events='{port}'.*cannot be bound"):
                Node(config, MemoryIndex()).start()
        assert not NodeDir(tmp_path, "node").announcement_path.exists()


def test_a_listener_needs_a_node_to_listen_to():
    with pytest.raises(UsageError, match="events=0"):
        Residency([])
    with pytest.raises(UsageError, match="events='x'"):
        Residency(["x"])


def test_a_listener_that_ends_leaves_no_descriptor_behind(place, node):
    with Residency([place]):
        pass
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with Residency([place]) as residency:
            wait_until(lambda: residency.in_sync, "in sync", SOON_S)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
