"""Large reads of one node come by several connections, where there are cores for them."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from remote_parts import remote_nodes
from stores import NodeProcess, announcement
from two_hosts import client_of, listening_node

from kvstore import Client
from kvstore.client.nodes.shares import CORES_PER_CONNECTION, in_shares
from kvstore.errors import NodeUnavailableError
from kvstore.index.memory import MemoryIndex
from kvstore.limits import (
    STREAM_CONNECTIONS_PER_NODE,
    STREAM_CONNECTIONS_PER_READ,
    STREAM_SHARE_BYTES,
    STREAM_SLOW_BYTES_PER_S,
)
from kvstore.nodedir import Announcement
from kvstore.transport.base import Outcome, Read, Wanted
from kvstore.transport.stream.address import Address
from kvstore.transport.stream.channel import Channel
from kvstore.transport.stream.transport import NAME as STREAM
from kvstore.transport.stream.transport import StreamTransport
from kvstore.types import Location

if TYPE_CHECKING:
    from redis_servers import RedisServer

MIB = 1 << 20


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = set(range(CORES_PER_CONNECTION * STREAM_CONNECTIONS_PER_READ))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)


def test_shares_are_the_blocks_in_their_order_and_none_is_much_larger() -> None:
    for seed in range(40):
        drawn = random.Random(seed)
        sizes = [drawn.choice((1, 64 << 10, MIB, 3 * MIB, 40 * MIB)) for _ in range(200)]
        which = sorted(drawn.sample(range(200), drawn.randint(1, 200)))
        count_max = drawn.randint(1, 5)
        shares = in_shares(which, sizes, count_max)
        assert [i for share in shares for i in share] == which, seed
        assert 1 <= len(shares) <= count_max, seed
        each = [sum(sizes[i] for i in share) for share in shares]
        if len(shares) > 1:
            assert min(each) >= STREAM_SHARE_BYTES, seed
            assert max(each) <= sum(each) / len(each) + max(sizes), seed


def test_what_is_little_is_one_share() -> None:
    sizes = [STREAM_SHARE_BYTES // 8] * 15
    assert in_shares(range(15), sizes, 4) == [list(range(15))]
    assert len(in_shares(range(16), [*sizes, sizes[0]], 4)) == 2
    large = 2 * STREAM_SHARE_BYTES - 1
    assert in_shares(range(2), [large, 1], 4) == [[0, 1]], "nor is what is left"


@pytest.fixture
def far(redis_server: RedisServer, tmp_path: Path) -> Iterator[tuple[NodeProcess, Client]]:
    with (
        listening_node(redis_server, "--size", "128MiB") as node,
        client_of(node, tmp_path) as client,
    ):
        yield node, client


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(MIB)


def save(node: NodeProcess) -> dict[str, bytes]:
    """Save 30 MiB on the node's own host."""
    values = {str(number): payload(number) for number in range(30)}
    with client_of(node) as beside:
        assert all(beside.put_many(values))
    return values


def read_together(monkeypatch: pytest.MonkeyPatch, together: int) -> list[int]:
    """Have each read wait until `together` of them run; returns the blocks of each."""
    met, blocks = threading.Barrier(together), list[int]()
    read = StreamTransport.read

    def meets(
        self: StreamTransport, node: Announcement, wanted: Sequence[Wanted], deadline: float
    ) -> Sequence[Outcome]:
        blocks.append(len(wanted))
        met.wait(10.0)
        return read(self, node, wanted, deadline)

    monkeypatch.setattr(StreamTransport, "read", meets)
    return blocks


@pytest.mark.usefixtures("many_cores")
def test_a_large_read_comes_by_three_connections_and_is_what_was_saved(
    far: tuple[NodeProcess, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    node, client = far
    values = save(node)
    blocks = read_together(monkeypatch, 3)
    assert client.get_many(list(values)) == list(values.values())
    assert sorted(blocks) == [10, 10, 10]


@pytest.mark.usefixtures("many_cores")
def test_connections_that_cannot_be_had_are_done_without(
    far: tuple[NodeProcess, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By two where the third is refused, by one where others are being used."""
    node, client = far
    values = save(node)
    connect, opened = StreamTransport._connect, list[int]()

    def refuses_the_third(
        self: StreamTransport, node: Announcement, address: Address, deadline: float
    ) -> Channel:
        opened.append(1)
        if len(opened) == 4:  # the first one only looks whether the node is there
            raise NodeUnavailableError("this node has no room for one more connection")
        return connect(self, node, address, deadline)

    monkeypatch.setattr(StreamTransport, "_connect", refuses_the_third)
    with monkeypatch.context() as patch:
        blocks = read_together(patch, 2)
        assert client.get_many(list(values)) == list(values.values())
    assert sorted(blocks) == [15, 15]
    assert client.stats()["transports"]["stream_failed"] == 0
    remote = client.session.remote
    assert remote is not None
    (pool,) = remote.stream._pools.values()
    deadline = time.monotonic() + 5.0
    others = [pool.take(deadline) for _ in range(STREAM_CONNECTIONS_PER_NODE - 1)]
    blocks = read_together(monkeypatch, 1)
    assert client.get_many(list(values)) == list(values.values())
    assert blocks == [30]
    for channel in others:
        pool.give(channel, True)


def test_where_there_are_two_cores_it_comes_by_one(
    far: tuple[NodeProcess, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    node, client = far
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    values = save(node)
    blocks = read_together(monkeypatch, 1)
    assert client.get_many(list(values)) == list(values.values())
    assert blocks == [30]


@pytest.mark.usefixtures("many_cores")
def test_a_share_has_the_time_of_all_that_use_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    index = MemoryIndex()
    word = announcement(node_id=7, transports={STREAM: "tcp://there:7400"})
    index.announce(7, word.pack(), 600.0)
    nodes = remote_nodes(index, 1.0)
    granted = list[tuple[int, float]]()

    def read(node: Announcement, wanted: Sequence[Wanted], deadline: float) -> list[Outcome]:
        size_bytes = sum(one.location.length for one in wanted)
        granted.append((size_bytes, deadline - time.monotonic()))
        return [Outcome(Read.HIT)] * len(wanted)

    monkeypatch.setattr(nodes.stream, "read", read)
    monkeypatch.setattr(nodes.stream, "keep_ready", lambda node, count, deadline: count)
    # Longer than what one may have in a request: each share goes in two, one after the other.
    room = memoryview(bytearray(32 * MIB))
    wanted = [
        Wanted(bytes([i]) * 32, Location(7, 1, 0, 0, 1, 0, 32 * MIB, 1), (room,)) for i in range(9)
    ]
    assert [outcome.read for outcome in nodes.read(wanted)] == [Read.HIT] * 9
    nodes.close()
    assert len(granted) == 6
    for size_bytes, left_s in granted:
        assert left_s == pytest.approx(1.0 + 3 * size_bytes / STREAM_SLOW_BYTES_PER_S, abs=0.3)


def test_connections_are_opened_by_one_deadline_and_where_there_is_much_to_read_alone(
    many_cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node is asked after the other: those that are silent must not use up the time of all."""
    index = MemoryIndex()
    for number in range(1, 6):
        word = announcement(node_id=number, transports={STREAM: f"tcp://there:740{number}"})
        index.announce(number, word.pack(), 600.0)
    nodes = remote_nodes(index, 1.0)
    asked = list[tuple[int, float]]()

    def silent(node: Announcement, count: int, deadline: float) -> int:
        asked.append((node.node_id, deadline))
        time.sleep(0.001)
        return 0

    def read(node: Announcement, wanted: Sequence[Wanted], deadline: float) -> list[Outcome]:
        return [Outcome(Read.HIT)] * len(wanted)

    monkeypatch.setattr(nodes.stream, "keep_ready", silent)
    monkeypatch.setattr(nodes.stream, "read", read)
    room = memoryview(bytearray(2 * STREAM_SHARE_BYTES))
    sizes = {1: 2, 2: 2, 3: 2, 4: 1, 5: 1}  # in shares
    wanted = [
        Wanted(
            bytes([number]) * 32,
            Location(number, 1, 0, 0, 1, 0, shares * STREAM_SHARE_BYTES, 1),
            (room[: shares * STREAM_SHARE_BYTES],),
        )
        for number, shares in sizes.items()
    ]
    assert [outcome.read for outcome in nodes.read(wanted)] == [Read.HIT] * 5
    nodes.close()
    assert [number for number, _ in asked] == [1, 2, 3]
    assert len({deadline for _, deadline in asked}) == 1
