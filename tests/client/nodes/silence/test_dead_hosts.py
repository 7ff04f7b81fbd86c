"""A node of another host is killed: its records stay in the index for seconds, and count for no
client any more that has noticed. Each notices for itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis_servers import RedisServer, wait_until
from stores import MIB, NodeProcess
from two_hosts import client_of, listening_node

from kvstore import Client, Limits

QUICK = Limits(redis_timeout_s=5.0, request_timeout_s=10.0, stream_timeout_s=1.0)


@pytest.fixture
def node(redis_server: RedisServer) -> Iterator[NodeProcess]:
    with listening_node(redis_server) as process:
        with client_of(process) as client:
            assert client.put("k", os.urandom(MIB))
            assert client.put("other", os.urandom(MIB))
        yield process


@pytest.fixture
def two(node: NodeProcess, elsewhere: Path) -> Iterator[tuple[Client, Client]]:
    """Clients of one host, the node's is another."""
    with (
        client_of(node, elsewhere, limits=QUICK) as one,
        client_of(node, elsewhere, limits=QUICK) as two,
    ):
        yield one, two


def announced(node: NodeProcess, client: Client) -> bool:
    word = node.directory.announcement()
    assert word is not None
    return client.session.index.node(word.node_id) is not None


def get(client: Client) -> None:
    assert client.get("other") is None


def put(client: Client) -> None:
    client.put("another", b"v" * 1000)


@pytest.mark.parametrize("fails", [get, put])
def test_what_fails_at_a_dead_node_has_its_blocks_missing_at_once(
    node: NodeProcess, two: tuple[Client, Client], fails: Callable[[Client], None]
) -> None:
    """To look-ups as well, of that client."""
    client, _ = two
    assert client.get("k") is not None
    assert client.put("mine", b"v" * 1000)
    node.kill()
    fails(client)
    assert not client.exists("k")
    assert client.session.match([client.namespace.value_key("k")]) == []
    assert announced(node, client), "it was not the end of the announcement"


def test_clients_that_only_look_notice_a_killed_node_they_are_connected_to(
    node: NodeProcess, two: tuple[Client, Client]
) -> None:
    for client in two:
        assert client.get("k") is not None
    node.kill()
    for client in two:
        wait_until(lambda it=client: not it.exists("other"), "its connection was hung up")
    assert announced(node, two[0])
