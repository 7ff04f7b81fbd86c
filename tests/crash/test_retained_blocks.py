"""What a client has retained is there after floods, kills and its own end: real processes."""

import pytest
from redis_servers import wait_until
from stores import MIB, NodeProcess, node_stats

from kvstore import Client, Retained
from kvstore.errors import NodeUnavailableError

SOON_S = 20.0
BLOCK = 128 << 10
TOKENS = list(range(256 * 8))


def block(i: int) -> bytes:
    return bytes([i + 1]) * BLOCK


def flood(client: Client, times: int, size_bytes: int) -> None:
    """Values of `times` the node's capacity, in the order of their names."""
    value = b"f" * MIB
    for i in range(times * size_bytes // MIB):
        assert client.put(f"flood {times} {i}", value)


def hits(client: Client) -> bool:
    out = [bytearray(BLOCK) for _ in range(8)]
    got = client.get_blocks(TOKENS, out)
    return got == 8 and all(out[i] == block(i) for i in range(8))


def test_a_retained_prefix_hits_through_a_flood_a_kill_and_an_eviction_storm(redis_server):
    size_bytes = 16 * MIB
    with NodeProcess(redis_server, size=f"{size_bytes >> 20}MiB") as node:
        with Client(**node.client_options) as client:
            assert all(client.put_blocks(TOKENS, [block(i) for i in range(8)]))
            assert client.retain_blocks(TOKENS, 3600, "a tenant") == [Retained.YES] * 8
        with Client(**node.client_options) as client:
            flood(client, 10, size_bytes)
            assert hits(client)
        node.kill()
        node.start()
        with Client(**node.client_options) as client:
            wait_until(lambda: hits(client), "the node goes on", SOON_S)
            assert node_stats(client)["retained"] == 8
            flood(client, 3, size_bytes)
            assert hits(client)
            assert client.retain_blocks(TOKENS, 0, "a tenant") == [Retained.YES] * 8
            flood(client, 2, size_bytes)
            assert not hits(client)
            assert "evicted" in str(client.explain(TOKENS))


def test_a_store_without_a_node_retains_nothing_and_says_so(redis_server, tmp_path):
    with (
        Client(redis_server.url, run_dir=tmp_path) as client,
        pytest.raises(NodeUnavailableError, match="kvstore node"),
    ):
        client.retain("k", 10)
