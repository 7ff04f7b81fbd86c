"""A Redis that is full keeps nobody from another host's blocks, and nodes from freeing its memory.

`maxmemory 1` makes it full at once, whatever it holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from redis_servers import RedisCluster, RedisSentinel, RedisServer, wait_until
from stores import NodeProcess

from kvstore import Client
from kvstore.cli.checks import redis as redis_check
from kvstore.cli.checks.base import Context, Level
from kvstore.errors import IndexRefusedError
from kvstore.index.base import KeyRecord
from kvstore.index.redis.connection import ErrorReply, Link
from kvstore.index.redis.index import open_index
from kvstore.limits import NODE_TTL_S

SECRET = "a secret of thirty-two bytes ....."
RECORDS = [KeyRecord(bytes([i]) * 32, b"record") for i in range(3)]
KEYS = [key for key, _ in RECORDS]
VOLATILE = ("volatile-lru", "volatile-lfu", "volatile-random", "volatile-ttl")


class Place:
    def __init__(self, url: str) -> None:
        self.url = url


def single() -> tuple[str, list[RedisServer], Callable[[], None]]:
    server = RedisServer()
    return server.url, [server], server.close


def sentinel() -> tuple[str, list[RedisServer], Callable[[], None]]:
    group = RedisSentinel()
    return group.url, [group.master], group.close


def cluster() -> tuple[str, list[RedisServer], Callable[[], None]]:
    group = RedisCluster()
    return group.url, group.nodes, group.close


@pytest.fixture(params=[single, sentinel, cluster], ids=["single", "sentinel", "cluster"])
def place(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[RedisServer]]]:
    url, servers, close = request.param()
    yield url, servers
    close()


def set_everywhere(servers: list[RedisServer], name: str, value: str) -> None:
    for server in servers:
        server.admin().config_set(name, value)


def elsewhere(node: NodeProcess, tmp_path) -> Client:
    return Client(**{**node.client_options, "run_dir": tmp_path})


def test_another_host_reads_from_a_node_for_as_long_as_redis_is_full(
    place: tuple[str, list[RedisServer]], tmp_path, monkeypatch
) -> None:
    """Both who knew the node before and who has never heard of it."""
    url, servers = place
    monkeypatch.setenv("KVSTORE_SECRET", SECRET)
    set_everywhere(servers, "maxmemory-policy", "noeviction")
    node = NodeProcess(Place(url), options=("--listen", "127.0.0.1:0"))  # type: ignore[arg-type]
    with node, Client(**node.client_options) as saver, elsewhere(node, tmp_path / "one") as old:
        assert saver.put("hot", b"x" * 1000)
        wait_until(lambda: old.get("hot") == b"x" * 1000, "another host reads it")
        set_everywhere(servers, "maxmemory", "1")
        full_at = time.monotonic()
        assert saver.put("new", b"y").status
        while time.monotonic() < full_at + NODE_TTL_S + 3:
            assert old.get("hot") == b"x" * 1000
            with elsewhere(node, tmp_path / "other") as young:
                assert young.get("hot") == b"x" * 1000
            time.sleep(0.5)
        assert "is full" in str(saver.health())
        set_everywhere(servers, "maxmemory", "0")
        wait_until(lambda: old.get("new") == b"y", "what was saved meanwhile is told")


def test_a_node_that_died_while_redis_was_full_is_not_kept_alive(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("KVSTORE_SECRET", SECRET)
    with RedisServer() as server, NodeProcess(server, options=("--listen", "127.0.0.1:0")) as node:
        server.admin().config_set("maxmemory", "1")
        node.kill()
        index = open_index(server.url, key_prefix=node.key_prefix, timeout_s=5)
        wait_until(lambda: index.nodes() == {}, "it is not announced", NODE_TTL_S + 10)
        index.close()


@pytest.mark.parametrize("scripts", [True, False])
def test_records_can_be_removed_from_a_full_redis(scripts: bool) -> None:
    """It would stay full for ever. Redis 7 refuses a DEL in a transaction then, and no other."""
    banned = ("--rename-command", "EVALSHA", "", "--rename-command", "SCRIPT", "")
    with RedisServer(*(() if scripts else banned)) as server:
        index = open_index(server.url, timeout_s=5, publish_timeout_s=5)
        index.publish(RECORDS)
        server.admin().config_set("maxmemory", "1")
        with pytest.raises(IndexRefusedError, match="it is full"):
            index.publish(RECORDS)
        assert index.remove([RECORDS[0], KeyRecord(KEYS[1], b"another")]) == 1
        assert index.lookup(KEYS) == [None, b"record", b"record"]
        index.close()


def test_a_transaction_that_a_full_redis_refuses_is_a_plain_delete(monkeypatch) -> None:
    """As Redis 7 does, whichever server is installed: it refuses what is queued, then EXEC."""
    real = Link.run_here

    def refused(link: Link, request: bytes, replies: int, deadline: float) -> list[object]:
        if b"MULTI" not in request:
            return real(link, request, replies, deadline)
        done, _, aborted = real(link, request.replace(b"DEL", b"OOM"), replies, deadline)
        return [done, ErrorReply("OOM command not allowed"), aborted]

    banned = ("--rename-command", "EVALSHA", "", "--rename-command", "SCRIPT", "")
    with RedisServer(*banned) as server:
        index = open_index(server.url, timeout_s=5, publish_timeout_s=5)
        index.publish(RECORDS)
        monkeypatch.setattr(Link, "run_here", refused)
        assert index.remove([RECORDS[0], KeyRecord(KEYS[1], b"another")]) == 1
        assert index.lookup(KEYS) == [None, b"record", b"record"]
        index.close()


def test_the_incarnation_of_a_full_redis_is_what_it_was() -> None:
    with RedisServer() as server:
        index = open_index(server.url, timeout_s=5, publish_timeout_s=5)
        before = index.incarnation()
        server.admin().config_set("maxmemory", "1")
        assert index.incarnation() == before
        server.admin().flushall()
        with pytest.raises(IndexRefusedError):
            index.incarnation()
        index.close()


@pytest.mark.parametrize("policy", VOLATILE)
def test_a_policy_that_evicts_announcements_first_fails_the_doctor_and_is_logged_by_nodes(
    policy: str, tmp_path, caplog
) -> None:
    with RedisServer("--maxmemory", "100mb", "--maxmemory-policy", policy) as server:
        found = redis_check.look(Context(server.url, "kv:default", tmp_path))
        (failed,) = [finding for finding in found if finding.level is Level.FAIL]
        assert policy in failed.found
        assert "allkeys-lru" in failed.do
        index = open_index(server.url, timeout_s=5)
        index.announce(1, b"here", 60)
        assert policy in caplog.text
        caplog.clear()
        server.admin().config_set("maxmemory-policy", "allkeys-lru")
        other = open_index(server.url, timeout_s=5)
        other.announce(1, b"here", 60)
        assert caplog.text == ""
        for one in (index, other):
            one.close()
