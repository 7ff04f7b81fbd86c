"""A node is ready when its index and its memory were tried, and its health check says so."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from redis_servers import RedisServer, free_port, stopped, wait_until
from stores import MIB, PATIENT

from kvstore import Client
from kvstore.core.node import NodeCore
from kvstore.errors import IndexUnavailableError
from kvstore.index.memory import MemoryIndex
from kvstore.index.outage import GuardedIndex
from kvstore.index.redis.index import open_index
from kvstore.node import Node, NodeConfig
from kvstore.node.readiness import Readiness
from kvstore.nodedir import NodeDir
from kvstore.segment.shm import OwnedShm

KEY_PREFIX = "kv:ready"


class Command:
    """`kvstore node` as a process, and its health check as another."""

    def __init__(self, url: str) -> None:
        self.run_dir = Path(tempfile.mkdtemp(prefix="kvy-"))
        self.place = ("--run-dir", str(self.run_dir), "--key-prefix", KEY_PREFIX)
        self.directory = NodeDir(self.run_dir, "node")
        self.log = self.run_dir / "log"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "kvstore.cli", "node", "--size", "4MiB"),
                *("--url", url, *self.place),
            ],
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
        )
        wait_until(self.directory.socket.exists, "the node serves its host")

    def said(self, words: str) -> bool:
        return words in self.log.read_text()

    def healthy(self) -> tuple[bool, str]:
        """As docker-compose.yml asks."""
        ran = subprocess.run(
            [sys.executable, "-m", "kvstore.cli", "stat", "--node", "node", *self.place],
            capture_output=True,
            text=True,
        )
        return ran.returncode == 0, ran.stderr

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(20)


@pytest.fixture
def guarded() -> Iterator[RedisServer]:
    with RedisServer("--requirepass", "right-one", port=free_port()) as server:
        yield server


def url_of(server: RedisServer, password: str) -> str:
    return f"redis://:{password}@127.0.0.1:{server.port}"


def test_a_node_that_redis_refuses_is_not_ready_until_redis_lets_it_in(
    guarded: RedisServer,
) -> None:
    with closing(Command(url_of(guarded, "later"))) as node:
        wait_until(lambda: node.said("wrong user name or password"), "a warning")
        good, why = node.healthy()
        assert not good
        assert "node node is not ready" in why
        assert "wrong user name or password" in why
        assert not node.said("ready,")
        options = {"run_dir": node.run_dir, "key_prefix": KEY_PREFIX, "limits": PATIENT}
        guarded.admin(password="right-one").config_set("requirepass", "later")
        wait_until(lambda: node.said(": ready,"), "the node is ready")
        assert node.healthy() == (True, "")
        with Client(url_of(guarded, "later"), **options) as client:
            assert client.put("k", b"v")
        # What it may is taken from it while it runs.
        admin = guarded.admin(password="later")
        admin.execute_command("ACL", "SETUSER", "default", "-set", "-mset", "-evalsha")
        wait_until(lambda: not node.healthy()[0], "it says that Redis refuses it")
        assert "lacks a right" in node.healthy()[1]
        admin.execute_command("ACL", "SETUSER", "default", "+@all")
        wait_until(lambda: node.healthy()[0], "it is ready again")


def test_a_node_that_was_ready_is_healthy_while_redis_is_away() -> None:
    with RedisServer() as server, closing(Command(server.url)) as node:
        wait_until(lambda: node.said(": ready,"), "the node is ready")
        server.kill()
        wait_until(lambda: node.said("cannot reach the index"), "it notices")
        assert node.healthy()[0]


def test_a_node_that_starts_while_redis_is_away_is_ready_when_it_comes() -> None:
    with RedisServer() as server:
        server.kill()
        with closing(Command(server.url)) as node:
            wait_until(lambda: node.said("cannot reach the index"), "it notices")
            assert not node.healthy()[0]
            server.start()
            wait_until(lambda: node.said(": ready,"), "the node is ready")
            assert node.healthy()[0]


class Forgetful(MemoryIndex):
    """Takes what is published, and has nothing."""

    def publish(self, records):  # type: ignore[no-untyped-def]
        return []


def config(tmp_path: Path) -> NodeConfig:
    return NodeConfig(run_dir=tmp_path, size_bytes=4 * MIB)


def test_an_index_that_gives_nothing_back_is_no_index(tmp_path: Path) -> None:
    with Node(config(tmp_path), Forgetful()) as node:
        assert "does not give back what is published" in node.dir.why_not_ready()


def test_memory_that_gives_back_something_else_is_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnedShm, "checksum", lambda *_: 1)
    with Node(config(tmp_path), MemoryIndex()) as node:
        assert "a slot does not give back" in node.dir.why_not_ready()


def test_the_trial_leaves_nothing_behind(tmp_path: Path) -> None:
    index = MemoryIndex()
    with Node(config(tmp_path), index) as node:
        assert node.dir.why_not_ready() == ""
        found = node.stats()
        assert found["reserved"] == found["blocks"] == found["unpublished"] == 0
        assert not index._records


def test_a_full_node_gives_no_block_away_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.node.readiness.TRIAL_ROOM_BYTES", 1 << 40)
    asked: list[object] = []
    handle = NodeCore.handle

    def noted(core, event, now):  # type: ignore[no-untyped-def]
        asked.append(event)
        return handle(core, event, now)

    monkeypatch.setattr(NodeCore, "handle", noted)
    with Node(config(tmp_path), MemoryIndex()) as node:
        assert node.dir.why_not_ready() == ""
        assert asked == []


def test_a_breaker_that_is_open_hides_no_reason(tmp_path: Path) -> None:
    from kvstore.errors import IndexBreakerOpenError, IndexRefusedError

    directory = NodeDir(tmp_path, "n")
    directory.path.mkdir(parents=True)
    readiness = Readiness(MemoryIndex(), directory, (1, 1), lambda key: True)
    readiness.beaten(IndexRefusedError("wrong password"))
    readiness.beaten(IndexBreakerOpenError("breaker open"))
    assert directory.why_not_ready() == "wrong password"
    other = IndexBreakerOpenError("breaker open")
    other.__cause__ = IndexRefusedError("no rights")
    readiness.beaten(other)
    assert directory.why_not_ready() == "no rights"
    readiness.beaten(None)
    readiness.beaten(IndexUnavailableError("away"))
    assert directory.why_not_ready() == ""


def test_a_redis_that_comes_back_and_refuses_the_node_is_seen_behind_an_open_breaker(
    tmp_path: Path,
) -> None:
    """The breaker opened while it was away, and nothing but probes reaches it since."""
    with RedisServer() as redis:
        index = GuardedIndex(open_index(redis.url, timeout_s=0.5, publish_timeout_s=0.5))
        with closing(index), Node(config(tmp_path), index) as node:
            wait_until(lambda: node.dir.why_not_ready() == "", "it is ready")
            with stopped(redis):
                wait_until(lambda: index._writing.open, "the breaker is open")
                redis.kill()
            redis.options = ("--requirepass", "another")
            redis.start()
            wait_until(lambda: "NOAUTH" in node.dir.why_not_ready(), "it says so", 20)
