"""Saving to the node of another host: clients without a node on theirs."""

import os
import signal
import time

import pytest
from redis_servers import wait_until
from stores import MIB
from two_hosts import client_of, listening_node

from kvstore import Client, Limits, PutStatus
from kvstore.client.nodes.saving import remote_writer as remote_writer
from kvstore.types import NO_SPACE, STORED


@pytest.mark.parametrize("size", [0, 1, 100, (64 << 10) + 1, 3 * MIB + 7, 4 * MIB])
def test_a_client_without_a_node_on_its_host_saves_to_another_one(reader, writer, size):
    value = os.urandom(size)
    assert reader.put("k", value).status is PutStatus.STORED
    assert writer.get("k") == value, "it is in the memory of the node's host"
    assert writer.stats()["transports"]["stream_hits"] == 0
    assert reader.put("k", b"other").status is PutStatus.DIFFERS
    assert reader.get("k") == value


def test_many_values_are_saved_to_another_host_in_their_order(reader, writer):
    numpy = pytest.importorskip("numpy")
    values = {f"k{i}": os.urandom(1 + i * 50_000) for i in range(20)}
    results = reader.put_many([*values.items(), ("big", bytes(65 * MIB)), ("a", numpy.arange(9))])
    assert [bool(result) for result in results] == [True] * 20 + [False, True]
    assert "size_bytes" in results[20].reason
    assert writer.get_many(list(values)) == list(values.values())
    assert list(writer.get("a")) == list(range(9))


def test_one_batch_that_is_larger_than_a_request_is_saved_in_several(elsewhere, redis_server):
    with (
        listening_node(redis_server, size=160 * MIB) as node,
        client_of(node, elsewhere) as client,
    ):
        values = {f"k{i}": os.urandom(4) * MIB for i in range(20)}
        assert all(client.put_many(values))
        assert client.get_many(list(values)) == list(values.values())


def test_connectors_save_blocks_to_another_host(reader, writer):
    tokens = list(range(256 * 4))
    keys = reader.namespace.block_keys(tokens, 256)
    session, blocks = reader.session, [os.urandom(100_000) for _ in keys]
    slots = session.reserve(keys[:3], 100_000, reader.namespace.id)
    for slot, block in zip(slots, blocks, strict=False):
        slot.buffer[:] = block
    assert session.match(keys) == []
    session.abort(slots[2:])
    assert all(session.commit(slots[:2]))
    assert len(writer.session.match(keys)) == 2
    again = session.reserve(keys, 100_000, reader.namespace.id)
    assert [getattr(answer, "status", None) for answer in again] == [
        PutStatus.EXISTS,
        PutStatus.EXISTS,
        None,
        None,
    ]
    session.abort(again[2:])
    out = [bytearray(100_000) for _ in keys]
    assert writer.get_blocks(tokens, out) == 2
    assert out[:2] == blocks[:2]


def test_what_was_given_back_or_saved_before_is_not_saved_by_a_late_commit(reader, writer):
    """Its buffer may hold anything by then."""
    keys = [os.urandom(32) for _ in range(2)]
    given_back, saved = reader.session.reserve(keys, 1000, reader.namespace.id)
    reader.session.abort([given_back])
    assert all(reader.session.commit([saved]))
    writer.session.writer.clear(reader.namespace.id)
    saved.buffer[:] = bytes(1000)
    assert not any(reader.session.commit([given_back, saved]))
    assert writer.session.match(keys[:1]) == writer.session.match(keys[1:]) == []


def test_the_node_learns_what_the_namespace_of_a_remote_writer_is(reader, writer):
    reader.put("k", b"v" * 1000)
    rows = writer.session.writer.listing(b"", 10)
    assert [row[2] for row in rows] == [reader.namespace.id]


def test_without_any_node_a_put_is_rejected_and_says_why(redis_server, elsewhere):
    with Client(redis_server.url, run_dir=elsewhere, key_prefix="kv:nobody") as client:
        result = client.put("k", b"v")
        assert result.status is PutStatus.REJECTED
        assert "no memory node on this host" in result.reason
        assert client.session.writer.no_node() is not None


def test_a_writer_that_dies_half_way_leaves_nothing(far, writer, reader):
    from kvstore.protocol.stream import SaveOffer, pack_put

    remote = reader.session.remote
    reader.put("known", b"1")  # so that the node is known
    ((_, word),) = remote.directory.all()
    channel = remote.stream.pool(word).take(time.monotonic() + 10)
    keys = [os.urandom(32) for _ in range(4)]
    offers = [SaveOffer(key, 3 * MIB, 0, 0, 1) for key in keys]
    channel.send_frame(pack_put(offers, 7, b"", 10.0), time.monotonic() + 10)
    channel.send([bytes(4 * MIB)], time.monotonic() + 10)
    node = writer.session.writer
    wait_until(lambda: node.stats()["reserved"] == 4, "the node has reserved")
    channel.close()
    wait_until(lambda: node.stats()["reserved"] == 0, "it has given the slots back")
    assert writer.session.match(keys) == []
    assert node.stats()["blocks"] == 1


def test_bytes_that_arrive_wrong_are_not_stored(far, writer, reader, monkeypatch):
    from kvstore.transport.stream import requests

    monkeypatch.setattr(requests.Digests, "value", lambda self: 12345)
    result = reader.put("k", os.urandom(100_000))
    assert result.status is PutStatus.REJECTED
    assert "checksum" in result.reason
    monkeypatch.undo()
    assert writer.get("k") is None
    assert writer.session.writer.stats()["reserved"] == 0
    assert reader.put("k", b"v" * 100_000).status is PutStatus.STORED


def to_the_largest(monkeypatch):
    """Whoever is drawn otherwise (tests/client/nodes/saving/test_placement.py)."""

    def choose(candidates, random):
        return max(candidates, key=lambda candidate: candidate.capacity_bytes)

    monkeypatch.setattr(remote_writer, "two_choices", choose)


def test_saves_are_spread_over_all_nodes_by_size_and_free_share(redis_server, far, elsewhere):
    with listening_node(redis_server, key_prefix=far.key_prefix, size=64 * MIB) as larger:
        with client_of(far, elsewhere) as client:
            client.session.remote_writer._random.seed(1)
            for i in range(30):
                assert client.put(f"k{i}", os.urandom(1000))
        blocks = []
        for node in (far, larger):
            with client_of(node) as neighbour:
                blocks.append(neighbour.session.writer.stats()["blocks"])
        assert sum(blocks) == 30
        assert 0 < blocks[0] < blocks[1]


def test_a_save_goes_elsewhere_when_the_first_node_is_stopped(
    redis_server, far, elsewhere, monkeypatch
):
    to_the_largest(monkeypatch)
    quick = Limits(redis_timeout_s=5.0, request_timeout_s=10.0, stream_timeout_s=2.0)
    with listening_node(redis_server, key_prefix=far.key_prefix, size=256 * MIB) as larger:
        larger.signal(signal.SIGSTOP)
        with client_of(far, elsewhere, limits=quick) as client:
            assert client.put("k", os.urandom(100_000)).status is PutStatus.STORED
        larger.signal(signal.SIGCONT)


def test_what_finds_no_room_in_the_first_node_goes_to_the_next(
    redis_server, far, elsewhere, monkeypatch
):
    """A cache is mostly full, and some of it may be pinned."""
    to_the_largest(monkeypatch)
    real, full = remote_writer.put, []

    def put(stream, word, payloads, *options, **more):
        if not full:
            full.append(word.node_id)
        if word.node_id != full[0]:
            return real(stream, word, payloads, *options, **more)
        return [STORED if i == 0 else NO_SPACE for i in range(len(payloads))]

    monkeypatch.setattr(remote_writer, "put", put)
    with (
        listening_node(redis_server, key_prefix=far.key_prefix),
        client_of(far, elsewhere) as client,
    ):
        results = client.put_many([(f"k{i}", b"v" * 1000) for i in range(3)])
        assert [result.status for result in results] == [PutStatus.STORED] * 3
        assert client.get_many([f"k{i}" for i in range(3)]) == [None, b"v" * 1000, b"v" * 1000]


def test_a_client_without_a_node_on_its_host_clears_the_namespace_everywhere(reader, writer):
    for client, name in ((reader, "far"), (writer, "near")):
        assert client.put(name, b"1")
    result = reader.clear(20.0)
    assert result, str(result)
    assert writer.get_many(["far", "near"]) == reader.get_many(["far", "near"]) == [None, None]


def test_each_result_of_a_save_is_that_of_its_own_value(reader, writer):
    assert writer.put("k1", b"there already" * 100)
    assert writer.put("k3", b"there already" * 100)
    results = reader.put_many([(f"k{i}", b"v" * 1000) for i in range(5)])
    assert [result.status for result in results] == [
        PutStatus.STORED,
        PutStatus.DIFFERS,
        PutStatus.STORED,
        PutStatus.DIFFERS,
        PutStatus.STORED,
    ]
