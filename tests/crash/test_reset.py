"""A reset reaches every node of every host, or says which it has not reached (rule 7 all the same).

Hosts are run directories of their own: their nodes know each other by Redis alone.
"""

import signal
import time
from collections.abc import Iterator

import pytest
from redis_servers import RedisServer, wait_until
from stores import NodeProcess

from kvstore import Client, DeadlineError, ResetResult
from kvstore.index.announced import announced_nodes
from kvstore.limits import NODE_TTL_S
from kvstore.spi import NodeUnavailableError

SOON_S = 20.0
NAMES = [f"k{i}" for i in range(8)]
WAIT_S = 20.0
"""For a reset on a busy machine."""


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def hosts(redis: RedisServer) -> Iterator[tuple[NodeProcess, NodeProcess]]:
    with (
        NodeProcess(redis, key_prefix="kv:reset") as here,
        NodeProcess(redis, key_prefix="kv:reset") as there,
    ):
        yield here, there


def filled(node: NodeProcess, namespace: str = "n") -> Client:
    client = Client(**node.client_options, namespace=namespace)
    for name in NAMES:
        assert client.put(name, name.encode() * 100)
    return client


def found(node: NodeProcess, namespace: str = "n") -> int:
    """By a client of that host that has never asked before."""
    with Client(**node.client_options, namespace=namespace) as client:
        return sum(value is not None for value in client.get_many(NAMES))


def test_a_clear_reaches_nodes_of_other_hosts_and_clients_that_remember(hosts) -> None:
    here, there = hosts
    with filled(here) as mine, filled(there) as theirs, filled(there, "other") as others:
        assert theirs.get(NAMES[0]) is not None
        result = mine.clear(WAIT_S)
        assert result, str(result)
        assert len(result.confirmed) == 2
        for client in (mine, theirs):
            assert client.get_many(NAMES) == [None] * len(NAMES)
        assert None not in others.get_many(NAMES), "another namespace is nobody's business"
        assert found(there) == found(here) == 0
        assert theirs.put(NAMES[0], b"new")
        time.sleep(2.5)  # heartbeats: the reset is told again and again, and dropped once
        assert theirs.get(NAMES[0]) == b"new"


def test_a_value_that_is_being_written_is_not_in_the_store_after_a_clear(hosts) -> None:
    here, there = hosts
    with filled(here) as mine, Client(**there.client_options, namespace="n") as theirs:
        key = theirs.namespace.value_key("slow")
        (slot,) = theirs.session.reserve([key], 100, theirs.namespace.id)
        assert mine.clear(WAIT_S)
        (result,) = theirs.session.commit([slot])
        assert not result
        assert theirs.get("slow") is None


def test_an_emptied_redis_brings_nothing_back(hosts, redis: RedisServer) -> None:
    here, there = hosts
    with filled(here) as mine, filled(there):
        assert mine.clear(WAIT_S)
        redis.admin().flushall()
        wait_until(
            lambda: len(announced_nodes(mine.session.index)) == 2, "the nodes are back", SOON_S
        )
        time.sleep(1.0)
        assert found(here) == found(there) == 0


def test_a_node_that_was_down_meanwhile_serves_nothing_old_when_it_is_back(hosts) -> None:
    here, there = hosts
    with filled(here) as mine:
        filled(there).close()
        there.kill()
        wait_until(lambda: len(mine.session.index.nodes()) == 1, "it is forgotten", 3 * NODE_TTL_S)
        result = mine.clear(WAIT_S)
        assert result, str(result)
        there.start()
        assert found(there) == 0


def test_nor_when_redis_was_emptied_while_it_was_down(hosts, redis: RedisServer) -> None:
    here, there = hosts
    with filled(here) as mine:
        filled(there).close()
        there.kill()
        wait_until(lambda: len(mine.session.index.nodes()) == 1, "it is forgotten", 3 * NODE_TTL_S)
        assert mine.clear(WAIT_S)
        here.signal(signal.SIGSTOP)  # so that nobody tells it at once
        try:
            redis.admin().flushall()
        finally:
            here.signal(signal.SIGCONT)
        there.start()
        assert found(there) == 0


def test_a_restart_without_a_reset_keeps_the_blocks(hosts) -> None:
    here, there = hosts
    with filled(here) as mine:
        filled(there, "other").close()
        assert mine.clear(WAIT_S)
        there.kill()
        there.start()
        wait_until(lambda: found(there, "other") == len(NAMES), "they are there", SOON_S)


def test_blocks_saved_after_a_reset_survive_a_restart(hosts) -> None:
    here, there = hosts
    with filled(here) as mine, filled(there) as theirs:
        assert mine.clear(WAIT_S)
        assert theirs.put("new", b"new")
        there.kill()
        there.start()
        with Client(**there.client_options, namespace="n") as client:
            wait_until(lambda: client.get("new") == b"new", "it is there", SOON_S)


def test_a_node_that_hangs_is_named_and_drops_it_when_it_goes_on(hosts) -> None:
    here, there = hosts
    with filled(here) as mine:
        filled(there).close()
        there.signal(signal.SIGSTOP)
        try:
            result = mine.clear(1.0)
            assert not result
            assert result.confirmed
            (late,) = result.unconfirmed
            assert late.startswith("node@")
            assert late in str(result)
            assert mine.get_many(NAMES) == [None] * len(NAMES)
        finally:
            there.signal(signal.SIGCONT)
        wait_until(lambda: found(there) == 0, "it has dropped them", SOON_S)


def test_where_the_only_node_hangs_it_is_named_and_nothing_is_dropped(redis: RedisServer) -> None:
    with NodeProcess(redis, key_prefix="kv:hangs") as node, filled(node) as client:
        node.signal(signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineError):
                client.clear(0.5)
            with pytest.raises(NodeUnavailableError, match=f"^node {node.name} did not answer"):
                client.clear(0.5)
        finally:
            node.signal(signal.SIGCONT)


def test_without_redis_the_own_host_is_cleared_and_the_others_hear_of_it_later(
    hosts, redis: RedisServer
) -> None:
    here, there = hosts
    with filled(here) as mine, filled(there) as theirs:
        redis.kill()
        result = mine.clear(2.0)
        assert not result
        assert not result.index_answered
        assert len(result.confirmed) == 1
        assert "index" in str(result)
        assert mine.get_many(NAMES) == [None] * len(NAMES)
        redis.start()
        wait_until(
            lambda: theirs.get_many(NAMES) == [None] * len(NAMES), "they have heard of it", SOON_S
        )


def test_nodes_of_one_host_tell_each_other_without_redis(redis: RedisServer) -> None:
    with NodeProcess(redis) as first, Client(**first.client_options, namespace="n") as client:
        assert client.put("k", b"1")
        redis.kill()
        assert first.directory.kept_resets()["resets"] == ""
        client.clear(1.0)
        assert first.directory.kept_resets()["resets"] != ""


def test_a_host_without_a_node_cannot_reset_and_says_so(redis: RedisServer, tmp_path) -> None:
    with NodeProcess(redis, key_prefix="kv:reset") as node:
        filled(node).close()
        far = {**node.client_options, "run_dir": tmp_path}
        with Client(**far) as client, pytest.raises(NodeUnavailableError):
            client.clear()


def test_where_there_is_no_node_there_is_nothing_to_reset(redis: RedisServer, tmp_path) -> None:
    with Client(redis.url, run_dir=tmp_path, key_prefix="kv:nobody") as client:
        assert client.clear() == ResetResult((), (), index_answered=True)
