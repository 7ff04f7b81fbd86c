"""A node whose process has no file descriptor left goes on, says so once, and recovers."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_servers import RedisServer, wait_until
from stores import MIB, NodeProcess
from warm_processes import WarmProcess, program

from kvstore import Client
from kvstore.segment.header import SUPERBLOCK_BYTES, life_of
from kvstore.system.host_clock import Moment

VALUE = b"v" * 100_000
LOGGED = """
import os, sys
os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
from kvstore.cli import main
sys.exit(main(sys.argv[2:]))
"""
NO_MORE_S = 3.0


class LoggedNode(NodeProcess):
    """`kvstore node` whose log is in a file."""

    def start(self, *options: str) -> None:
        self.log = self.run_dir / "log"
        argv = ["node", "--url", self.redis.url, "--run-dir", str(self.run_dir)]
        argv += ["--name", self.name, "--key-prefix", self.key_prefix, *self._options, *options]
        self.process = WarmProcess(
            program, LOGGED, str(self.log), *argv, environment=self.environment
        )
        wait_until(self._ready, "the node is ready")

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def leave(self, spare: int) -> None:
        """Leave the process `spare` more file descriptors."""
        taken = {int(path.name) for path in Path(f"/proc/{self.process.pid}/fd").iterdir()}
        free = [number for number in range(len(taken) + spare + 1) if number not in taken]
        resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (free[spare], self.most))

    def free(self) -> None:
        resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (self.most, self.most))

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]


@pytest.fixture
def node(redis_server: RedisServer) -> Iterator[LoggedNode]:
    options = ("--listen", "127.0.0.1:0", "--open")
    with LoggedNode(redis_server, size=8 * MIB, options=options) as node:
        yield node


def connected(path: Path) -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    one.connect(str(path))
    return one


def test_its_clients_go_on_its_log_stays_short_and_it_takes_new_ones_again(
    node: LoggedNode,
) -> None:
    word = node.directory.announcement()
    assert word is not None
    host, _, port = word.transports["stream"].rpartition("/")[2].rpartition(":")
    with Client(**node.client_options) as old:
        assert old.put("old", VALUE)
        before = len(node.lines())
        node.leave(0)
        waiting = [connected(node.directory.socket) for _ in range(5)]
        far = [socket.create_connection((host, int(port))) for _ in range(5)]
        over = time.monotonic() + NO_MORE_S
        count = 0
        while time.monotonic() < over:
            assert old.put(f"k{count % 10}", VALUE)
            assert old.get("old") == VALUE
            count += 1
        said = node.lines()[before:]
        assert [line for line in said if "Traceback" in line] == []
        assert 1 <= len([line for line in said if "cannot take new clients" in line]) <= 2
        assert len([line for line in said if "connections of other hosts" in line]) == 1
        assert len(said) <= 6, said
        node.free()
        with Client(**node.client_options) as new:
            wait_until(lambda: new.put("new", VALUE), "a new client saves")
        assert old.get("new") == VALUE
        with Client(**{**node.client_options, "run_dir": node.run_dir / "far"}) as distant:
            wait_until(lambda: distant.get("new") == VALUE, "another host reads")
        for one in (*waiting, *far):
            one.close()
    assert node.process.poll() is None
    assert node.directory.announcement() == word


def test_it_says_that_it_lives_all_the_same(node: LoggedNode) -> None:
    """Else its memory would be freed as that of one long dead, when it is killed then."""
    wait_until(node.directory.keep.exists, "it serves")
    node.leave(0)
    before = node.directory.keep.read_bytes(), *map(life, node.segment_files()[1:])
    wait_until(
        lambda: all(
            now != then
            for now, then in zip(
                (node.directory.keep.read_bytes(), *map(life, node.segment_files()[1:])),
                before,
                strict=True,
            )
        ),
        "a sign of life",
    )


def life(head: Path) -> Moment | None:
    return life_of(head.read_bytes()[:SUPERBLOCK_BYTES])
