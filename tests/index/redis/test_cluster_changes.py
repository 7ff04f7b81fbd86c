"""A cluster that changes, or refuses, while it is being asked: still one kind of error."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import pytest
from own_python import holds_in_child
from redis.crc import key_slot
from threads_at_once import at_once

from kvstore.circuit_breaker import Breaker
from kvstore.errors import IndexUnavailableError
from kvstore.index.base import KeyRecord
from kvstore.index.redis import cluster
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


def slots_of(*ranges: tuple[int, int, int]) -> bytes:
    """Return a map of the cluster: (first, last, port)."""
    rows = b"".join(b"*3\r\n:%d\r\n:%d\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % row for row in ranges)
    return b"*%d\r\n%s" % (len(ranges), rows)


class Says:
    """A server that answers what it is told to."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.slots = slots_of((0, SLOTS_MAX, self.port))
        self.answer = b""
        """To all that is not about slots."""
        self.before_slots: Callable[[], object] = lambda: None
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with suppress(OSError):
            while True:
                peer, _ = self.listener.accept()
                threading.Thread(target=self.serve, args=(peer,), daemon=True).start()

    def serve(self, peer: socket.socket) -> None:
        with peer, suppress(OSError):
            while asked := peer.recv(1 << 16):
                about_slots = asked == command(b"CLUSTER", b"SLOTS")
                if about_slots:
                    self.before_slots()
                peer.sendall(self.slots if about_slots else self.answer)

    def index(self) -> closing[RedisIndex]:
        return closing(open_index(f"redis+cluster://127.0.0.1:{self.port}", timeout_s=5))


@pytest.fixture
def says() -> Iterator[Says]:
    says = Says()
    with says.listener:
        yield says


@pytest.mark.parametrize("word", [b"ASK ", b"ASK 1", b"ASK 1 there", b"ASK 1 there:x", b"MOVED 1"])
def test_a_redirection_that_names_no_shard_is_an_unavailable_index(says: Says, word: bytes) -> None:
    says.answer = b"-%s\r\n" % word
    with says.index() as index, pytest.raises(IndexUnavailableError):
        index.lookup(KEYS[:1])


def test_a_shard_that_leaves_the_map_while_another_thread_asks_it_is_away(
    redis_cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_index(redis_cluster.url, timeout_s=5)) as index:
        assert index.lookup(KEYS)
        ask, routes = ClusterRoute._ask, []

        def leaves(route, *args, **options):
            routes.append(route)
            left = [("127.0.0.1", node.port) for node in redis_cluster.nodes[1:]]
            route._use([(0, 8000, left[0]), (8001, SLOTS_MAX, left[1])])
            return ask(route, *args, **options)

        monkeypatch.setattr(ClusterRoute, "_ask", leaves)
        with suppress(IndexUnavailableError):
            index.lookup(KEYS)
        monkeypatch.undo()
        routes[0].mistaken()
        assert len(index.lookup(KEYS)) == len(KEYS)


def test_a_shard_that_comes_between_two_looks_at_the_map_is_in_the_incarnation(
    redis_cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_index(redis_cluster.url, timeout_s=5, publish_timeout_s=5)) as index:
        whole = index.incarnation()
        ports = [("127.0.0.1", node.port) for node in redis_cluster.nodes]
        maps = iter([[(0, SLOTS_MAX, ports[0])]])
        shards = ClusterRoute.shards

        def changing(route: ClusterRoute) -> list[Shard]:
            ranges = next(maps, None)
            if ranges is None:
                route.mistaken()
            else:
                route._owner = route._use(ranges)
            return shards(route)

        monkeypatch.setattr(ClusterRoute, "shards", changing)
        for _ in range(2):
            told = index.incarnation()
        assert told == whole


class Unlocked(Breaker):
    """One whose state two threads must never be at, at the same time."""

    __slots__ = ("inside", "most")

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


def test_threads_that_ask_one_shard_judge_it_one_after_the_other(
    says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two are its one probe, or two probes' failures double its delay twice."""
    with closing(socket.create_server(("127.0.0.1", 0))) as nobody:
        port = nobody.getsockname()[1]
    says.slots = slots_of((0, SLOTS_MAX, port))
    breaker = Unlocked()
    monkeypatch.setattr(cluster, "Breaker", lambda: breaker)
    with says.index() as index:

        def ask() -> None:
            for _ in range(3):
                with suppress(IndexUnavailableError):
                    index.lookup(KEYS[:1])

        at_once([ask] * 4)
        assert breaker.most == 1


def test_a_child_that_is_forked_while_the_map_is_fetched_can_fetch_one(says: Says) -> None:
    """The thread that had the lock has not come along."""
    says.answer = b"*1\r\n$-1\r\n"
    held, done = threading.Event(), threading.Event()

    def first_waits() -> None:
        if not held.is_set():
            held.set()
            done.wait(10)

    says.before_slots = first_waits
    with says.index() as index:
        thread = threading.Thread(target=index.lookup, args=(KEYS[:1],))
        thread.start()
        assert held.wait(10)
        answered = holds_in_child(lambda: index.lookup(KEYS[:1]) == [None])
        done.set()
        thread.join()
        assert answered


def test_a_shard_that_a_slot_is_on_its_way_to_is_away_like_any_other(says: Says) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        nobody = other.getsockname()[1]
    says.slots = slots_of((0, 8000, says.port), (8001, SLOTS_MAX, nobody))
    says.answer = b"-ASK 1 127.0.0.1:%d\r\n" % nobody
    with says.index() as index:
        here = [key for key in KEYS if SPACE.slot(key) <= 8000]
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
