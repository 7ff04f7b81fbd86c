"""A node is killed and never started again: its memory comes back, whoever of ours still lives."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
from clocks import died_ago
from redis_servers import wait_until
from stores import MIB, NodeProcess, NodeThread

from kvstore import Client
from kvstore.cli.fleet import Fleet
from kvstore.limits import RESTART_WITHIN_S
from kvstore.nodedir import NodeDir
from kvstore.segment.abandoned import Sweeper

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from redis_servers import RedisServer

SOON_S = 20.0
EVERY_S = 0.1


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sweeper, "every_s", EVERY_S)


@pytest.fixture
def dead(redis_server: RedisServer) -> Iterator[NodeProcess]:
    """A node that was killed with a block in it, a moment ago."""
    with NodeProcess(redis_server, size=8 * MIB) as node:
        with Client(**node.client_options) as client:
            assert client.put("k", b"v" * 10_000)
        node.kill()
        yield node


def let_time_pass(node: NodeProcess) -> list[Path]:
    """As if it had died eleven minutes ago; the files of its segment.

    Any node of this host may free them from the first file on: those of other tests too.
    """
    files = node.segment_files()
    died_ago(RESTART_WITHIN_S + 60, keep=node.directory.keep, files=files)
    return files


def gone(files: list[Path]) -> bool:
    return len(files) == 2 and not any(path.exists() for path in files)


@pytest.mark.usefixtures("often")
def test_another_node_frees_it_from_another_run_directory(
    dead: NodeProcess, redis_server: RedisServer
) -> None:
    with NodeThread(redis_server, size_bytes=4 * MIB):
        time.sleep(3 * EVERY_S)
        assert all(path.exists() for path in dead.segment_files())  # it may come back yet
        files = let_time_pass(dead)
        wait_until(lambda: gone(files), "the node frees it", SOON_S)


@pytest.mark.usefixtures("often")
def test_a_clients_reaper_frees_it_while_the_client_asks_nothing(
    dead: NodeProcess, redis_server: RedisServer
) -> None:
    with (
        NodeThread(redis_server, size_bytes=4 * MIB) as other,
        Client(**other.client_options) as client,
    ):
        assert client.put("k", b"v")
        assert client.get("k") == b"v"
        files = let_time_pass(dead)
        wait_until(lambda: gone(files), "the client frees it", SOON_S)


def test_the_supervisor_frees_it(dead: NodeProcess, tmp_path: Path) -> None:
    files = let_time_pass(dead)
    fleet = Fleet(0, [], run_dir=tmp_path, env={}, numa=[])
    stops = iter((False, True))
    fleet.tend(lambda: next(stops), print)
    assert gone(files)


@pytest.mark.usefixtures("often")
def test_a_node_that_comes_back_after_a_look_has_every_block(
    dead: NodeProcess, redis_server: RedisServer
) -> None:
    with NodeThread(redis_server, size_bytes=4 * MIB):
        time.sleep(3 * EVERY_S)
        dead.start()
        with Client(**dead.client_options) as client:
            wait_until(lambda: client.get("k") == b"v" * 10_000, "a hit", SOON_S)


@pytest.mark.usefixtures("often")
def test_whose_time_is_over_starts_empty(dead: NodeProcess, redis_server: RedisServer) -> None:
    files = let_time_pass(dead)
    with NodeThread(redis_server, size_bytes=4 * MIB):
        wait_until(lambda: gone(files), "the node frees it", SOON_S)
    dead.start()
    with Client(**dead.client_options) as client:
        assert client.get("k") is None
        assert client.put("k", b"w")
        assert client.get("k") == b"w"


def test_a_node_that_runs_says_again_and_again_that_it_lives(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.node.upkeep.SIGN_OF_LIFE_S", 0.05)
    with NodeThread(redis_server, size_bytes=4 * MIB) as node:
        word = NodeDir(node.run_dir, "node").announcement()
        assert word is not None
        os.utime(word.head_path, (0, 0))
        wait_until(lambda: os.stat(word.head_path).st_mtime > 0, "a sign of life", SOON_S)  # noqa: PTH116
