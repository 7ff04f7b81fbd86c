"""Nodes on other hosts that take connections and say nothing, beside those that answer."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from redis_servers import RedisServer  # noqa: TC002
from remote_parts import remote_nodes
from stores import MIB, NodeProcess, announcement
from threads_at_once import at_once
from two_hosts import client_of

from kvstore import Client, Limits, PutStatus
from kvstore.client.nodes import remote as remote_module
from kvstore.client.nodes.known import RETRY_AFTER_S
from kvstore.client.nodes.remote import RemoteNodes
from kvstore.errors import NodeUnavailableError
from kvstore.index.memory import MemoryIndex
from kvstore.index.redis.index import open_index
from kvstore.limits import STREAM_BATCH_BYTES_MAX, STREAM_NODES_AT_ONCE
from kvstore.transport.base import Outcome, Read, Wanted
from kvstore.transport.stream.transport import NAME as STREAM
from kvstore.types import Location

IMPATIENT = Limits(redis_timeout_s=5.0, request_timeout_s=10.0, stream_timeout_s=2.0)


class Silent:
    """A server whose connections are never answered."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                self.connections.append(self._listener.accept()[0])

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self.connections:
            connection.close()


@pytest.fixture
def silent() -> Iterator[list[Silent]]:
    nodes = [Silent() for _ in range(5)]
    yield nodes
    for node in nodes:
        node.close()


@pytest.fixture
def saver(
    far: NodeProcess, redis_server: RedisServer, elsewhere: Path, silent: list[Silent]
) -> Iterator[Client]:
    """A client without a node on its host; the silent nodes say that they have most room."""
    word = far.directory.announcement()
    assert word is not None
    index = open_index(redis_server.url, key_prefix=far.key_prefix)
    for i, node in enumerate(silent):
        lie = dataclasses.replace(
            word, node_id=i + 1, free_bytes=1 << 40, transports={STREAM: node.address}
        )
        index.announce(lie.node_id, lie.pack(), 120.0)
    index.close()
    with client_of(far, elsewhere, limits=IMPATIENT) as client:
        yield client


def test_the_one_that_answers_gets_the_first_save_already(saver: Client) -> None:
    assert saver.put("k", os.urandom(MIB)).status is PutStatus.STORED


def test_the_silent_are_left_alone_by_the_saves_that_follow(
    saver: Client, silent: list[Silent]
) -> None:
    began = time.monotonic()
    assert all(saver.put(f"k{i}", os.urandom(1000)) for i in range(200))
    probes_max = 2 + (time.monotonic() - began) / RETRY_AFTER_S
    assert any(node.connections for node in silent), "one of them was the first choice"
    for node in silent:
        assert len(node.connections) <= probes_max, "now and then, beside the saves"


def test_many_saves_at_once_all_find_the_one_that_answers(saver: Client) -> None:
    results = []
    at_once([lambda i=i: results.append(saver.put(f"k{i}", os.urandom(1000))) for i in range(8)])
    assert [str(result) for result in results if result.status is not PutStatus.STORED] == []


# --- reading ---------------------------------------------------------------------


ANSWERING = STREAM_NODES_AT_ONCE // 2


@pytest.fixture
def many() -> Iterator[tuple[RemoteNodes, list[float]]]:
    """As many nodes as are read from at once, and how long each was to be waited for; only one in
    the middle answers."""
    index = MemoryIndex()
    for node_id in range(STREAM_NODES_AT_ONCE):
        word = announcement(node_id=node_id, transports={STREAM: "tcp://there:7400"})
        index.announce(node_id, word.pack(), 600.0)
    nodes = remote_nodes(index, 0.5)
    untils: list[float] = []

    def read(word, wanted, until):  # type: ignore[no-untyped-def]
        untils.append(until)
        if word.node_id == ANSWERING:
            return [Outcome(Read.HIT)] * len(wanted)
        time.sleep(max(until - time.monotonic(), 0))
        return [Outcome(Read.FAILED, "too late")] * len(wanted)

    nodes.stream.read = read  # type: ignore[method-assign]
    yield nodes, untils
    nodes.close()


def wanted_of_each(length: int = 0) -> list[Wanted]:
    into = (memoryview(bytearray(length)),)
    return [
        Wanted(bytes([n]) * 32, Location(n, 1, 0, 0, 1, 0, length, 1), into)
        for n in range(STREAM_NODES_AT_ONCE)
    ]


def test_a_call_has_one_deadline_however_many_nodes_are_silent(
    many: tuple[RemoteNodes, list[float]],
) -> None:
    nodes, untils = many
    began = time.monotonic()
    outcomes = nodes.read(wanted_of_each())
    assert max(untils) - min(untils) < 0.001
    assert max(untils) - began < 0.5 + 5, "whatever the machine did before the first read"
    assert [n for n, outcome in enumerate(outcomes) if outcome.read is Read.HIT] == [ANSWERING]


def test_batches_of_one_node_share_the_deadline_of_their_call(
    many: tuple[RemoteNodes, list[float]],
) -> None:
    nodes, untils = many
    (one,) = [w for w in wanted_of_each(STREAM_BATCH_BYTES_MAX // 2 + 1) if not w.location.node_id]
    nodes.read([one] * 4)
    assert len(untils) <= 1, "the first took all of it, or opened the breaker"
    assert max(untils) <= time.monotonic() + 0.001


def test_no_node_is_waited_for_beyond_the_deadline_that_a_call_was_given(
    many: tuple[RemoteNodes, list[float]],
) -> None:
    """However much longer a node alone may take."""
    nodes, untils = many
    deadline = time.monotonic() + 0.4
    nodes.read(wanted_of_each()[:2], deadline)
    assert max(untils, default=deadline) <= deadline


def test_as_many_nodes_are_asked_at_once_as_a_large_call_needs() -> None:
    """Forty silent ones took five seconds, eight at a time."""
    assert STREAM_NODES_AT_ONCE > 40


def test_a_node_that_failed_is_tried_again_beside_the_reads(
    many: tuple[RemoteNodes, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it, and it is there again once it has answered."""
    nodes, untils = many
    there = threading.Event()
    asked: list[int] = []

    def look(stream, word, blocks, deadline):  # type: ignore[no-untyped-def]
        asked.append(word.node_id)
        if not there.is_set():
            raise NodeUnavailableError("not yet")
        return [False]

    monkeypatch.setattr(remote_module, "look", look)
    batch = wanted_of_each()[:1]
    nodes.read(batch)
    while len(asked) < 3:
        assert nodes.node(0, 1, time.monotonic()) is None
        assert [outcome.read for outcome in nodes.read(batch)] == [Read.FAILED]
    there.set()
    while nodes.node(0, 1, time.monotonic()) is None:
        time.sleep(0.01)
    assert len(untils) == 1, "no read went there meanwhile"


# --- the breaker -------------------------------------------------------------------


def test_what_fails_while_a_node_is_tried_again_keeps_it_away_for_longer() -> None:
    """Also when it is not a read: failures while the breaker is open say nothing new, so whoever
    asks has to ask it first."""
    index = MemoryIndex()
    word = announcement(node_id=1, transports={STREAM: "tcp://there:7400"})
    index.announce(1, word.pack(), 600.0)
    peers = remote_nodes(index, 1.0)
    assert peers.node(1, 1, time.monotonic()) is not None
    delays = []
    for _ in range(3):
        while not peers.allows(1):
            time.sleep(0.01)
        peers.failed(1)
        assert not peers.allows(1)
        delays.append(peers.directory.get(1).loop.probe_at - time.monotonic())
    assert delays[0] < delays[1] < delays[2]
    assert not peers.healthy(1)
    peers.close()
