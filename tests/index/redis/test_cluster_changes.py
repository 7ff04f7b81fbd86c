"""A cluster that changes, or refuses, while it is being asked: still one kind of error."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import pytest
from own_python import holds_in_child
from redis.crc import key_slot
from threads_at_once import at_once

from kvstore.circuit_breaker import Breaker
from kvstore.errors import IndexUnavailableError
from kvstore.index.base import KeyRecord
from kvstore.index.redis.cluster import ClusterRoute
from kvstore.index.redis.index import RedisIndex, open_index
from kvstore.index.redis.key_space import KeySpace, command
from kvstore.index.redis.route import Shard

if TYPE_CHECKING:
    from redis_servers import RedisCluster

KEYS = [os.urandom(32) for _ in range(30)]
RECORDS = [KeyRecord(key, b"record") for key in KEYS]
SLOTS_MAX = 16383
IDS = range(1, 100)


SPACE = KeySpace("kv:default")
"""What is in Redis under the prefix that an index has by default."""


def route_of(index: RedisIndex) -> ClusterRoute:
    """By which it looks up."""
    route = index._read
    assert isinstance(route, ClusterRoute)
    return route


def has_map(route: ClusterRoute, ranges: list[tuple[int, int, tuple[str, int]]]) -> None:
    """As if the cluster had told it that."""
    route._owner = route._use(ranges)


def test_a_shard_that_refuses_the_password_is_away_like_any_other(
    redis_cluster: RedisCluster,
) -> None:
    user = ("+@all", "~*", "on")
    for node in redis_cluster.nodes:
        node.admin().execute_command("ACL", "SETUSER", "kv", "reset", *user, ">right")
    url = redis_cluster.url.replace("://", "://kv:right@")
    with closing(open_index(url, timeout_s=5, publish_timeout_s=5)) as index:
        assert index.publish(RECORDS) == []
        assert index.lookup(KEYS) == [record for _, record in RECORDS]
        first = redis_cluster.nodes[0].admin()
        first.execute_command("ACL", "SETUSER", "kv", "resetpass", ">other")
        first.execute_command("CLIENT", "KILL", "USER", "kv")
        there = index.lookup(KEYS)
        assert {None, b"record"} == set(there)
        assert [key for key, _ in index.publish(RECORDS)] == [
            key for key, record in zip(KEYS, there, strict=True) if record is None
        ]
        index.incarnation()


@pytest.fixture
def says() -> Iterator[tuple[int, list[bytes]]]:
    """A port, and what is answered there to all that is not about slots."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    said = [b""]
    slots = b"*1\r\n*3\r\n:0\r\n:%d\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % (SLOTS_MAX, port)

    def serve(peer: socket.socket) -> None:
        with peer, suppress(OSError):
            while asked := peer.recv(1 << 16):
                peer.sendall(slots if asked == command(b"CLUSTER", b"SLOTS") else said[0])

    def accept() -> None:
        with suppress(OSError):
            while True:
                peer, _ = listener.accept()
                threading.Thread(target=serve, args=(peer,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    with listener:
        yield port, said


@pytest.mark.parametrize("word", [b"ASK ", b"ASK 1", b"ASK 1 there", b"ASK 1 there:x", b"MOVED 1"])
def test_a_redirection_that_names_no_shard_is_an_unavailable_index(
    says: tuple[int, list[bytes]], word: bytes
) -> None:
    port, said = says
    said[0] = b"-%s\r\n" % word
    with (
        closing(open_index(f"redis+cluster://127.0.0.1:{port}", timeout_s=5)) as index,
        pytest.raises(IndexUnavailableError),
    ):
        index.lookup(KEYS[:1])


def test_a_shard_that_leaves_the_map_while_another_thread_asks_it_is_away(
    redis_cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_index(redis_cluster.url, timeout_s=5)) as index:
        route = route_of(index)
        assert index.lookup(KEYS)
        ask = ClusterRoute._ask

        def leaves(route, *args, **options):
            left = [("127.0.0.1", node.port) for node in redis_cluster.nodes[1:]]
            route._use([(0, 8000, left[0]), (8001, SLOTS_MAX, left[1])])
            return ask(route, *args, **options)

        monkeypatch.setattr(ClusterRoute, "_ask", leaves)
        with suppress(IndexUnavailableError):
            index.lookup(KEYS)
        monkeypatch.undo()
        route.mistaken()
        assert len(index.lookup(KEYS)) == len(KEYS)


def test_a_shard_that_comes_between_two_looks_at_the_map_is_in_the_incarnation(
    redis_cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_index(redis_cluster.url, timeout_s=5, publish_timeout_s=5)) as index:
        route = index._write
        assert isinstance(route, ClusterRoute)
        whole = index.incarnation()
        ports = [("127.0.0.1", node.port) for node in redis_cluster.nodes]
        maps = iter([[(0, SLOTS_MAX, ports[0])]])
        shards = ClusterRoute.shards

        def changing(route: ClusterRoute) -> list[Shard]:
            ranges = next(maps, None)
            if ranges is None:
                route.mistaken()
            else:
                has_map(route, ranges)
            return shards(route)

        monkeypatch.setattr(ClusterRoute, "shards", changing)
        for _ in range(2):
            told = index.incarnation()
        assert told == whole


class Unlocked(Breaker):
    """One whose state two threads must never be at, at the same time."""

    __slots__ = ("at_once", "inside", "most")

    def __init__(self) -> None:
        super().__init__(failures_max=1)
        self.inside = self.most = 0

    def enter(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.02)
        self.inside -= 1

    def allows(self, now: float) -> bool:
        self.enter()
        return super().allows(now)

    def failed(self, now: float, *, hung: bool = False) -> None:
        self.enter()
        super().failed(now, hung=hung)


def test_threads_that_ask_one_shard_judge_it_one_after_the_other() -> None:
    """Else two are its one probe, or two probes' failures double its delay twice."""
    with closing(socket.create_server(("127.0.0.1", 0))) as nobody:
        port = nobody.getsockname()[1]
    with closing(open_index(f"redis+cluster://127.0.0.1:{port}", timeout_s=5)) as index:
        route = route_of(index)
        has_map(route, [(0, SLOTS_MAX, ("127.0.0.1", port))])
        owner, breaker = route._owner, Unlocked()
        route._away = dict.fromkeys(route._away, breaker)

        def ask() -> None:
            for _ in range(3):
                route._owner = owner
                with suppress(IndexUnavailableError):
                    index.lookup(KEYS[:1])

        at_once([ask] * 4)
        assert breaker.most == 1


def test_a_child_that_is_forked_while_the_map_is_fetched_can_fetch_one(
    says: tuple[int, list[bytes]],
) -> None:
    """The thread that had the lock has not come along."""
    port, said = says
    said[0] = b"*1\r\n$-1\r\n"
    held, done = threading.Event(), threading.Event()

    def hold(route: ClusterRoute) -> None:
        with route._lock:
            held.set()
            done.wait(10)

    with closing(open_index(f"redis+cluster://127.0.0.1:{port}", timeout_s=5)) as index:
        thread = threading.Thread(target=hold, args=(route_of(index),))
        thread.start()
        assert held.wait(10)
        answered = holds_in_child(lambda: index.lookup(KEYS[:1]) == [None])
        done.set()
        thread.join()
        assert answered


def test_a_shard_that_a_slot_is_on_its_way_to_is_away_like_any_other(
    says: tuple[int, list[bytes]],
) -> None:
    port, said = says
    with closing(open_index(f"redis+cluster://127.0.0.1:{port}", timeout_s=5)) as index:
        route = route_of(index)
        with closing(socket.create_server(("127.0.0.1", 0))) as other:
            nobody = other.getsockname()[1]
        slots = [(0, 8000, ("127.0.0.1", port)), (8001, SLOTS_MAX, ("127.0.0.1", nobody))]
        has_map(route, slots)
        here = [key for key in KEYS if SPACE.slot(key) <= 8000]
        said[0] = b"-ASK 1 127.0.0.1:%d\r\n" % nobody
        assert index.lookup(here[:1]) == [None]


def test_a_node_whose_shard_is_away_stays_among_the_nodes(redis_cluster: RedisCluster) -> None:
    """Whoever announces takes out the dead: that a shard says nothing proves no death."""
    with (
        closing(open_index(redis_cluster.url, timeout_s=5, publish_timeout_s=5)) as index,
        closing(open_index(redis_cluster.url, timeout_s=5, publish_timeout_s=0.5)) as other,
    ):
        owners = [shard_of(SPACE.nodes_key), *map(shard_of, map(SPACE.node_key, IDS))]
        away = next(shard for shard in owners if shard != owners[0])
        there = IDS[owners.index(away, 1) - 1]
        index.announce(there, b"announcement", 60.0)
        server = redis_cluster.nodes[away]
        server.signal(signal.SIGSTOP)
        try:
            here = IDS[owners.index(owners[0], 1) - 1]
            other.announce(here, b"announcement", 60.0)  # its first one, which looks for the dead
        finally:
            server.signal(signal.SIGCONT)
        assert {here, there} <= set(index.nodes())


def shard_of(redis_key: bytes) -> int:
    return key_slot(redis_key) // -(-(SLOTS_MAX + 1) // 3)
