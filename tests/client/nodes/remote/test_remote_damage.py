"""Bytes that reach another host wrong: a miss; the block goes only if the node's own are wrong."""

import os
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from damage import flip
from redis_servers import RedisServer, wait_until
from stores import NodeProcess, node_stats
from two_hosts import PATIENT, client_of, listening_node

from kvstore import Client, MissReason
from kvstore.protocol.control import Op
from kvstore.protocol.stream_reply import heads_bytes
from kvstore.testing.proxy import FaultyProxy
from kvstore.transport.stream.address import Address
from kvstore.transport.stream.requests import tell

SIZES = (100, 300_000)
"""Copied by the node before it is sent, and sent in place."""
RNG = random.Random(7)


@pytest.fixture(scope="module")
def node(redis_server: RedisServer) -> Iterator[NodeProcess]:
    with listening_node(redis_server) as process:
        yield process


@pytest.fixture
def reader(node: NodeProcess, elsewhere: Path) -> Iterator[Client]:
    """On another host."""
    with client_of(node, elsewhere) as client:
        yield client


@pytest.fixture(params=["always", "never"])
def writer(node: NodeProcess, request: pytest.FixtureRequest) -> Iterator[Client]:
    """On the node's host. Where it does not verify, headers have no checksum: the node only
    knows what it has served before."""
    with Client(**node.client_options, verify=request.param) as client:
        client.session.writer.clear(client.namespace.id)
        yield client


def corrupt(writer: Client) -> int:
    """How many blocks the node has dropped because their bytes were wrong."""
    return int(node_stats(writer)["corrupt"])


def damaged(reader: Client) -> int:
    return int(reader.stats()["transports"]["stream_checksum"])


@pytest.mark.parametrize("size", SIZES)
def test_a_bit_flipped_in_the_nodes_memory_is_a_miss_and_the_block_is_dropped(
    writer: Client, reader: Client, size: int
) -> None:
    value = os.urandom(size)
    before = corrupt(writer)
    assert writer.put_many([("k", value), ("other", value)])
    assert reader.get_many(["k", "other"]) == [value] * 2
    flip(writer, writer.namespace.value_key("k"), RNG)
    assert reader.get("k") is None
    assert damaged(reader) >= 1
    wait_until(lambda: corrupt(writer) == before + 1, "the node looked and dropped it")
    assert not writer.exists("k")
    wait_until(lambda: reader.explain_key("k").first_missing is not None, "the index is told")
    missing = reader.explain_key("k").first_missing
    assert missing is not None
    assert missing.reason is MissReason.CORRUPT
    assert reader.get("other") == value
    assert writer.put("k", value)
    assert reader.get("k") == value


@pytest.mark.parametrize("size", SIZES)
def test_a_bit_flipped_on_the_wire_is_a_miss_and_the_block_is_kept(
    writer: Client, reader: Client, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    value = os.urandom(size)
    before = corrupt(writer)
    assert writer.put("k", value)
    port = int(node_address(writer).rpartition(":")[2])
    with FaultyProxy(lambda: socket.create_connection(("127.0.0.1", port))) as proxy:
        address = Address("tcp", *proxy.address)
        monkeypatch.setattr(reader.session.remote.stream, "_address", lambda node: address)
        assert reader.get("k") == value

        def flip_once(chunk: bytearray) -> None:
            proxy.flip = None
            chunk[heads_bytes(1) + 50] ^= 4

        proxy.flip = flip_once
        # A failed block of a place that was remembered is asked for once more.
        assert reader.get("k") in (None, value)
        assert proxy.flip is None
        assert damaged(reader) == 1
        # The same connection: what was said of the block came before this.
        assert reader.get("k") == value
        assert proxy.accepted == 1
    assert corrupt(writer) == before
    assert writer.get("k") == value


def node_address(client: Client) -> str:
    (word,) = (attached.announcement for attached in client.session.nodes.mapped)
    return str(word.transports["stream"])


@pytest.mark.parametrize("writer", ["always"], indirect=True)
def test_a_connector_s_read_of_a_damaged_block_drops_it_too(writer: Client, reader: Client) -> None:
    blocks = [os.urandom(100_000) for _ in range(3)]
    tokens = list(range(256 * 3))
    before = corrupt(writer)
    assert all(writer.put_blocks(tokens, blocks))
    keys = writer.namespace.block_keys(tokens, 256)
    flip(writer, keys[1], RNG)
    found = reader.session.match(keys)
    views = list(reader.session.views(found, None, 10.0))
    assert [view and bytes(view.buffer) for view in views] == [blocks[0], None, blocks[2]]
    wait_until(lambda: corrupt(writer) == before + 1, "the node looked and dropped it")
    wait_until(lambda: len(reader.session.match(keys)) == 1, "the index is told")


def test_a_client_elsewhere_that_lies_about_damage_drops_nothing(
    writer: Client, reader: Client
) -> None:
    value = os.urandom(50_000)
    before = corrupt(writer)
    assert writer.put("k", value)
    assert reader.get("k") == value
    remote = reader.session.remote
    ((_, announcement),) = remote.directory.all()
    raw_key = writer.namespace.value_key("k")
    message = [Op.SUSPECT, 0, raw_key + b"?" * 32]
    tell(remote.stream, announcement, message, time.monotonic() + PATIENT.stream_timeout_s)
    assert reader.get("k") == value, "over the same connection"
    assert corrupt(writer) == before


@pytest.mark.parametrize("writer", ["never"], indirect=True)
def test_what_a_block_without_a_checksum_was_before_its_first_reading_nobody_knows(
    writer: Client, reader: Client
) -> None:
    """The limit of what is checked without `verify="always"` where blocks are saved."""
    before = corrupt(writer)
    assert writer.put("k", bytes(100_000))
    flip(writer, writer.namespace.value_key("k"), RNG)
    changed = reader.get("k")
    assert changed is not None
    assert changed != bytes(100_000)
    flip(writer, writer.namespace.value_key("k"), RNG)
    assert reader.get("k") is None
    wait_until(lambda: corrupt(writer) == before + 1, "the node looked and dropped it")
