"""A whole store whose Redis fails in every way it can: misses and deadlines, never wrong bytes.

Readers have no local node (their run directory is another one where that matters), so
that every answer needs the index; `NodeProcess` and its clients are those of a user.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing

import pytest
import redis
from redis_servers import RedisCluster, RedisServer, free_port, stopped, wait_until
from stores import NodeProcess

from kvstore import Client, Limits, PutStatus
from kvstore.client.explanation import MissReason
from kvstore.errors import IndexUnavailableError
from kvstore.testing.proxy import FaultyProxy

VALUES = {f"key {i}": bytes([i]) * 3000 + os.urandom(8) for i in range(200)}
HEALED_S = 20.0
"""The node's heartbeat, a deadline or two and a busy machine."""


class Place:
    """A Redis as `NodeProcess` wants it, reached by any URL."""

    def __init__(self, url: str) -> None:
        self.url = url


@pytest.fixture
def started() -> Iterator[Callable[..., NodeProcess]]:
    nodes: list[NodeProcess] = []

    def start(url: str, **options: int) -> NodeProcess:
        nodes.append(NodeProcess(Place(url), **options))  # type: ignore[arg-type]
        return nodes[-1]

    yield start
    for node in nodes:
        node.close()


def client_of(node: NodeProcess, **options: object) -> Client:
    return Client(**{**node.client_options, **options})


def proxied(server: RedisServer) -> FaultyProxy:
    def connect() -> socket.socket:
        behind = socket.socket(socket.AF_UNIX)
        behind.connect(str(server.socket))
        return behind

    return FaultyProxy(connect)


def url_of(proxy: FaultyProxy) -> str:
    return "redis://{}:{}/0".format(*proxy.address)


def indexed(node: NodeProcess) -> int:
    """How many of the values the index leads to, asked by a client that has seen none."""
    with client_of(node) as asking:
        return indexed_by(asking)


def right_or_missing(client: Client) -> int:
    """Hits among all values; any other bytes fail the test."""
    got = client.get_many(list(VALUES))
    assert all(
        value is None or value == saved for value, saved in zip(got, VALUES.values(), strict=True)
    )
    return sum(value is not None for value in got)


def test_a_redis_restarted_empty_is_filled_again_while_reads_and_writes_go_on(started):
    with RedisServer() as server:
        node = started(server.url)
        with client_of(node) as client:
            client.put_many(VALUES)
            server.restart()
            assert client.put("meanwhile", b"1").status is PutStatus.STORED
            assert right_or_missing(client) == len(VALUES)
            wait_until(lambda: indexed(node) == len(VALUES), "every record is back", HEALED_S)


def test_after_a_failover_by_three_sentinels_what_the_replica_lost_is_published_again(started):
    with SentinelFailover() as group:
        node = started(group.url)
        with client_of(node) as client:
            client.put_many(dict(list(VALUES.items())[:100]))
            group.stall_replica()
            client.put_many(dict(list(VALUES.items())[100:]))
            assert indexed(node) == len(VALUES)
            group.fail_over()
            assert right_or_missing(client) == len(VALUES)
            wait_until(lambda: indexed(node) == len(VALUES), "what was lost is back", 60)


class SentinelFailover:
    """A master, a replica that can fall behind, and three sentinels."""

    def __init__(self) -> None:
        self.master = RedisServer(port=free_port())
        self.replica = RedisServer(
            "--replicaof", "127.0.0.1", str(self.master.port), port=free_port()
        )
        self.sentinels: list[RedisServer] = []
        for _ in range(3):
            port = free_port()
            conf = self.master.directory / f"sentinel-{port}.conf"
            conf.write_text(
                f"sentinel monitor main 127.0.0.1 {self.master.port} 2\n"
                "sentinel down-after-milliseconds main 1000\n"
                "sentinel failover-timeout main 5000\n"
            )
            self.sentinels.append(RedisServer(port=port, args=(str(conf), "--sentinel")))
        wait_until(self._all_know_all, "the sentinels know each other and the replica", 40)

    def _all_know_all(self) -> bool:
        return (
            all(
                (state := sentinel.admin().sentinel_master("main"))["num-other-sentinels"] == 2
                and state["num-slaves"] == 1
                for sentinel in self.sentinels
            )
            and self.replica.admin().info("replication")["master_link_status"] == "up"
        )

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/main"

    def stall_replica(self) -> None:
        """From here on it misses what the master is told: it cannot log in there any more."""
        self.replica.admin().config_set("masterauth", "wrong")
        self.master.admin().execute_command("CLIENT", "KILL", "TYPE", "replica")

    def fail_over(self) -> None:
        """Kill the master; ends when the sentinels have made the replica one."""
        self.master.kill()
        wait_until(self._promoted, "the replica is promoted", 60)

    def _promoted(self) -> bool:
        try:  # one that is being promoted hangs up
            return bool(self.replica.admin().info("replication")["role"] == "master")
        except redis.ConnectionError:
            return False

    def __enter__(self) -> SentinelFailover:
        return self

    def __exit__(self, *exc: object) -> None:
        for server in (*self.sentinels, self.replica, self.master):
            server.close()


def test_a_lost_shard_of_a_cluster_costs_its_own_keys_only_and_is_filled_again(started):
    with closing(RedisCluster()) as cluster:
        for server in cluster.nodes:  # the others answer while one is away
            server.admin().config_set("cluster-require-full-coverage", "no")
        node = started(cluster.url)
        with client_of(node) as client:
            client.put_many(VALUES)
            assert indexed(node) == len(VALUES)
            lost = cluster.nodes[1]
            lost.kill()
            assert right_or_missing(client) == len(VALUES)
            assert client.put("meanwhile", b"1").status is PutStatus.STORED
            there = indexed(node)
            assert 0 < there < len(VALUES)
            lost.start()
            wait_until(lambda: indexed(node) == len(VALUES), "every record is back", 60)


def test_a_redis_out_of_memory_loses_publications_and_no_bytes_and_is_told_later(started):
    with RedisServer("--maxmemory-policy", "noeviction") as server:
        node = started(server.url)
        with client_of(node) as client:
            client.put("before", b"0")
            server.admin().config_set("maxmemory", "1")
            results = client.put_many(VALUES)
            assert {result.status for result in results} == {PutStatus.STORED}
            assert right_or_missing(client) == len(VALUES)  # by this host's own hints
            assert indexed(node) == 0
            wait_until(lambda: not client.health(), "it is said", HEALED_S)
            assert "is full; give it a larger maxmemory" in str(client.health())
            server.admin().config_set("maxmemory", "0")
            wait_until(lambda: indexed(node) == len(VALUES), "every record is told", HEALED_S)
            wait_until(client.health, "all is well again", HEALED_S)


def test_a_redis_slower_than_the_deadline_is_a_miss_in_time_and_then_at_once(started):
    with RedisServer() as server, proxied(server) as proxy:
        node = started(server.url)
        quick = Limits(redis_timeout_s=0.05)
        with client_of(node) as saver, client_of(node, url=url_of(proxy), limits=quick) as client:
            saver.put_many(VALUES)
            proxy.delay_s = 0.3
            waits = []
            for i in range(60):
                started_at = time.monotonic()
                assert client.get(f"unknown {i}") is None
                waits.append(time.monotonic() - started_at)
            assert max(waits) < 5.0
            assert sorted(waits)[len(waits) // 2] < 0.01, "the breaker is open for most calls"
            assert client.stats()["missed"].get(MissReason.BREAKER_OPEN.value, 0) > 0
            proxy.delay_s = 0.0
            wait_until(lambda: indexed_by(client) == len(VALUES), "Redis is asked again", HEALED_S)


def test_a_node_whose_redis_is_slow_goes_on_serving_its_own_host(started):
    with RedisServer() as server, proxied(server) as proxy:
        node = started(url_of(proxy))
        with client_of(node, url=server.url) as client:
            proxy.delay_s = 1.0
            results = client.put_many(VALUES)
            assert {result.status for result in results} == {PutStatus.STORED}
            assert right_or_missing(client) == len(VALUES)
            proxy.delay_s = 0.0
            wait_until(lambda: indexed_by(client) == len(VALUES), "all is published", 60)


def indexed_by(client: Client, names: Iterable[str] = VALUES) -> int:
    """How many of them the index has for this client; it may not answer."""
    try:
        found = client.session.index.lookup([client.namespace.value_key(name) for name in names])
    except IndexUnavailableError:
        return 0
    return sum(one is not None for one in found)


def test_connections_that_are_reset_all_the_time_cost_misses_and_no_wrong_byte(started):
    with RedisServer() as server, proxied(server) as proxy:
        node = started(url_of(proxy))
        with client_of(node, url=url_of(proxy)) as client:
            stored = 0
            for i, (key, value) in enumerate(VALUES.items()):
                if i % 5 == 0:
                    proxy.reset()
                stored += client.put(key, value).status is PutStatus.STORED
                if i % 7 == 0:
                    right_or_missing(client)
            assert stored == len(VALUES)
            assert proxy.accepted > 10
            wait_until(lambda: indexed_by(client) == len(VALUES), "all is published", HEALED_S)


def test_answers_that_never_come_hold_nobody_and_late_ones_are_not_taken(started):
    with RedisServer() as server, proxied(server) as proxy:
        node = started(server.url)
        hasty = Limits(redis_timeout_s=0.1)
        with client_of(node) as saver, client_of(node, url=url_of(proxy), limits=hasty) as client:
            saver.put_many(VALUES)
            proxy.silent = True
            started_at = time.monotonic()
            assert sum(indexed_by(client, [name]) for name in list(VALUES)[:20]) == 0
            assert time.monotonic() - started_at < 5.0
            proxy.silent = False
            wait_until(lambda: indexed_by(client) == len(VALUES), "Redis is asked again", HEALED_S)
            assert right_or_missing(client) == len(VALUES)


def test_bytes_flipped_on_the_way_from_redis_are_misses_and_never_wrong_values(started, tmp_path):
    with RedisServer() as server, proxied(server) as proxy:
        node = started(server.url)
        seed = int.from_bytes(os.urandom(4))
        print("seed", seed)
        state = seed

        def flip(chunk: bytearray) -> None:
            nonlocal state
            state = (state * 1103515245 + 12345) % (1 << 31)
            chunk[state % len(chunk)] ^= 1 << (state >> 8) % 8

        with client_of(node) as saver:
            saver.put_many(VALUES)
            proxy.flip = flip
            for _ in range(10):
                with client_of(node, url=url_of(proxy)) as client:
                    right_or_missing(client)
                    for key in list(VALUES)[:20]:
                        assert client.get(key) in (None, VALUES[key])


def test_a_client_that_may_only_read_redis_puts_and_gets_and_changes_nothing_there(started):
    prefix_of = "kv:"
    with RedisServer() as server:
        admin = server.admin()
        admin.execute_command(
            "ACL", "SETUSER", "reader", "on", ">r", f"~{prefix_of}*", "resetchannels",
            "-@all", "+mget", "+get", "+exists", "+ping", "+hello", "+info", "+auth", "+select",
        )  # fmt: skip
        node = started(server.url)
        with client_of(node, url=f"unix://reader:r@{server.socket}") as client:
            assert {r.status for r in client.put_many(VALUES)} == {PutStatus.STORED}
            assert right_or_missing(client) == len(VALUES)
            assert indexed_by(client) == len(VALUES)
        with pytest.raises(redis.exceptions.ResponseError):
            redis.Redis(unix_socket_path=str(server.socket), username="reader", password="r").set(
                f"{prefix_of}x", "1"
            )


def test_a_stopped_redis_delays_no_put_for_longer_than_its_deadline(started):
    with RedisServer() as server:
        node = started(server.url)
        with client_of(node) as client:
            client.put("before", b"0")
            with stopped(server):
                started_at = time.monotonic()
                for key, value in list(VALUES.items())[:50]:
                    assert client.put(key, value).status is PutStatus.STORED
                assert time.monotonic() - started_at < 20.0
            wait_until(lambda: indexed_by(client) >= 50, "all is published", HEALED_S)
