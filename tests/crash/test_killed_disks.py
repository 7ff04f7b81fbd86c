"""A node with disks is killed, and all that was in memory is gone: what its disks have is found
again, and what was dropped is not."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_stories import (
    NODE_BYTES,
    SIZE_BYTES,
    SOON_S,
    DiskNode,
    filled,
    lives,
    value_of,
    written,
)
from redis_servers import RedisServer, wait_until
from stores import MIB, node_stats

from kvstore import Client


@pytest.fixture
def node(redis_server: RedisServer, tmp_path: Path) -> Iterator[DiskNode]:
    with DiskNode(redis_server, tmp_path / "disk", "--disk-write", "through") as node:
        yield node


NAMES = [f"k{i}" for i in range(4 * NODE_BYTES // SIZE_BYTES)]
"""Four times what the memory holds."""


def test_four_times_the_memory_is_read_back_from_disk(node):
    with Client(**node.client_options) as client:
        filled(client, NAMES)
        assert node_stats(client)["blocks"] < len(NAMES) / 3
        assert client.get_many(NAMES) == [value_of(name) for name in NAMES]

        def brought_back() -> bool:
            # Uses that follow each other at once are told as one.
            assert client.get_many(NAMES[:9]) == [value_of(name) for name in NAMES[:9]]
            return node_stats(client)["disk_promoted"] > 0

        wait_until(brought_back, "a second use brings some back")
        assert client.get_many(NAMES) == [value_of(name) for name in NAMES]


def test_after_a_reboot_it_is_all_there_but_what_was_dropped(node):
    with Client(**node.client_options) as client:
        filled(client, NAMES)
        assert client.delete_many(NAMES[:3]) == [True] * 3
        assert client.put(NAMES[3], value_of(NAMES[3], 1), replace=True)
    for _ in range(2):
        node.kill()
        node.lose_memory()
        node.start()
        with Client(**node.client_options) as client:
            wait_until(lambda: not node_stats(client)["disk_adopting"], "adoption", SOON_S)
            assert node_stats(client)["blocks"] == 0
            assert client.get_many(NAMES[:3]) == [None] * 3
            assert client.get(NAMES[3]) in (None, value_of(NAMES[3], 1))
            assert client.get_many(NAMES[4:]) == [value_of(name) for name in NAMES[4:]]


def test_after_a_reboot_nothing_is_there_that_was_cleared(node):
    with Client(**node.client_options) as client:
        filled(client, NAMES)
        assert client.clear()
        assert client.put("later", value_of("later"))
        wait_until(lambda: written(client) == 1, "it is on the disk")
    node.kill()
    node.lose_memory()
    node.start()
    with Client(**node.client_options) as client:
        wait_until(lambda: not node_stats(client)["disk_adopting"], "adoption", SOON_S)
        assert client.get_many(NAMES) == [None] * len(NAMES)
        assert client.get("later") == value_of("later")


LARGE = [f"b{i}" for i in range(600)]
"""Of 1 MiB each, ten times the memory."""


def large_value_of(name: str) -> bytes:
    return random.Random(name).randbytes(16 << 10) * 64


def large_hits(client: Client) -> int:
    """Read all of `LARGE`, and return how many were there."""
    found = [(name, client.get(name)) for name in LARGE]
    there = [(name, raw) for name, raw in found if raw is not None]
    assert [name for name, raw in there if raw != large_value_of(name)] == []
    return len(there)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_within_a_minute_of_a_reboot_nearly_all_is_found_that_was_found_before(
    redis_server, tmp_path
):
    with DiskNode(redis_server, tmp_path / "disk", size=64 * MIB, disk_size=1 << 30) as node:
        with Client(**node.client_options) as client:
            for name in LARGE:
                assert client.put(name, large_value_of(name))
            before = large_hits(client)
            assert before > 100
            wait_until(lambda: written(client) >= before, "an idle node writes all", 60)
        node.kill()
        node.lose_memory()
        began = time.monotonic()
        node.start()
        with Client(**node.client_options) as client:
            wait_until(lambda: not node_stats(client)["disk_adopting"], "adoption", SOON_S)
            assert large_hits(client) >= 0.95 * before
        assert time.monotonic() - began < 60


def test_a_node_that_is_killed_at_any_moment_gives_right_bytes_or_misses(redis_server, tmp_path):
    for mode in ("eviction", "through"):
        with DiskNode(redis_server, tmp_path / mode, "--disk-write", mode) as node:
            lives(node, 7, 4)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_node_that_is_killed_very_often_gives_right_bytes_or_misses(redis_server, tmp_path):
    seed = int(time.time())
    with DiskNode(redis_server, tmp_path / "disk", "--disk-write", "idle") as node:
        lives(node, seed, 40)
