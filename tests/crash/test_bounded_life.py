"""Nothing of a namespace with `ttl_s` is found, or lies in a segment, after it: real processes."""

import os
import time

import pytest
from redis_servers import wait_until
from stores import MIB, NodeProcess, node_stats

from kvstore import Client, Namespace, UsageError

SOON_S = 20.0
TTL_S = 4
BOUNDED = Namespace({"name": "a tenant", "ttl_s": TTL_S})
TOKENS = list(range(256 * 8))
BLOCK = 128 << 10


@pytest.fixture
def node(redis_server):
    with NodeProcess(redis_server, size=16 * MIB) as node:
        yield node


def blocks():
    """Bytes that lie nowhere by accident."""
    return [os.urandom(64) * (BLOCK // 64) for _ in range(8)]


def of(node, namespace=BOUNDED):
    return Client(**{**node.client_options, "namespace": namespace})


def lie_in(node, saved):
    """How many of these blocks have bytes in the node's segment."""
    memory = node.segment_files()[0].read_bytes()
    return sum(block[:64] in memory for block in saved)


def hits(client):
    return client.get_blocks(TOKENS, [bytearray(BLOCK) for _ in range(8)])


def test_after_its_time_a_block_is_a_miss_and_no_byte_of_it_is_in_the_segment(node):
    saved, others = blocks(), blocks()
    with of(node) as client, Client(**node.client_options) as unbounded:
        assert all(unbounded.put_blocks(TOKENS, others))
        started = time.monotonic()
        assert all(client.put_blocks(TOKENS, saved))
        if hits(client) < 8 or lie_in(node, saved) < 8:
            assert time.monotonic() > started + TTL_S - 1
        wait_until(lambda: lie_in(node, saved) == 0, "they are wiped", SOON_S)
        assert hits(client) == 0
        assert "expired" in str(client.explain(TOKENS))
        assert node_stats(client)["expired"] == 8
        assert hits(unbounded) == 8
        assert lie_in(node, others) == 8


def test_a_kill_and_a_warm_restart_lengthen_no_life(node):
    saved, others = blocks(), blocks()
    with of(node) as client, Client(**node.client_options) as unbounded:
        assert all(unbounded.put_blocks(TOKENS, others))
        assert all(client.put_blocks(TOKENS, saved))
        ends_at = time.monotonic() + TTL_S
    node.kill()
    assert lie_in(node, others) == 8
    node.start()
    with of(node) as client, Client(**node.client_options) as unbounded:
        assert hits(unbounded) == 8, "the restart was warm"
        found = hits(client)
        assert found in (0, 8)
        assert found == 0 or time.monotonic() < ends_at + SOON_S
        wait_until(lambda: lie_in(node, saved) == 0, "they are wiped", SOON_S)
        assert hits(client) == 0


def test_what_is_evicted_or_cleared_before_its_time_is_wiped_at_once(node):
    saved = blocks()
    with of(node, Namespace({"name": "long", "ttl_s": 3600})) as client:
        assert all(client.put_blocks(TOKENS, saved))
        assert lie_in(node, saved) == 8
        client.clear()
        assert lie_in(node, saved) == 0
        assert all(client.put_blocks(TOKENS, saved))
    with Client(**node.client_options) as other:
        for i in range(64):
            assert other.put(f"flood {i}", bytes(MIB))
    assert lie_in(node, saved) == 0


def test_a_bound_that_is_none_is_refused_by_name():
    with pytest.raises(UsageError, match="ttl_s='soon'"):
        Namespace({"name": "x", "ttl_s": "soon"})
