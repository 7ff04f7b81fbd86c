"""Nobody who can connect to a port of a node takes all its file descriptors: a real node, crowds at
each of its ports, and clients that come all the same."""

from __future__ import annotations

import resource
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from redis_servers import RedisServer, wait_until
from stores import MIB, NodeProcess

from kvstore import Client
from kvstore.spi import Residency
from kvstore.testing.ports import held_ports

HOST = "127.0.0.1"
FILES, CROWD = 400, 600
"""As with 1,024 files and 1,100 connections, in less time."""
ZMQ_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(47)


def pair_of_ports() -> int:
    """The first of two ports, one after the other, that nobody has."""
    while True:
        with socket.socket() as one, socket.socket() as other, suppress(OSError):
            one.bind((HOST, 0))
            port = int(one.getsockname()[1])
            other.bind((HOST, port + 1))
            return port


class OpenNode(NodeProcess):
    """A node that has all ports that a node can have, and few files."""

    def __init__(self, redis: RedisServer, metrics: int) -> None:
        self.metrics, self.events = metrics, pair_of_ports()
        options = ("--listen", f"{HOST}:0", "--open", "--metrics", f"{HOST}:{metrics}")
        options += ("--events", f"tcp://{HOST}:{self.events}")
        super().__init__(redis, size=8 * MIB, options=options)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (FILES, hard))

    def ports(self) -> dict[str, tuple[str, int] | str]:
        word = self.directory.announcement()
        assert word is not None
        stream = int(word.transports["stream"].rpartition(":")[2])
        return {
            "events": (HOST, self.events),
            "answers": (HOST, self.events + 1),
            "metrics": (HOST, self.metrics),
            "stream": (HOST, stream),
            "control": str(self.directory.socket),
        }

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


@pytest.fixture
def node(redis_server: RedisServer) -> Iterator[OpenNode]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    with held_ports(1) as (metrics,), OpenNode(redis_server, metrics) as node:
        yield node
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def crowd(at: tuple[str, int] | str, said: bytes) -> list[socket.socket]:
    come = []
    for _ in range(CROWD):
        one = socket.socket(socket.AF_UNIX if isinstance(at, str) else socket.AF_INET)
        one.settimeout(10)
        one.connect(at)
        with suppress(OSError):  # hung up on already
            one.sendall(said)
        come.append(one)
    return come


@pytest.mark.parametrize("said", [b"", ZMQ_GREETING], ids=["silent", "greets"])
@pytest.mark.parametrize("port", ["events", "answers", "metrics", "stream", "control", "each"])
def test_a_crowd_at_a_port_keeps_no_client_out(node: OpenNode, port: str, said: bytes) -> None:
    if said and port not in ("events", "answers"):
        said = b"\x00"
    with Client(**node.client_options) as old, ExitStack() as stack:  # type: ignore[arg-type]
        assert old.put("old", b"value")
        for name, at in node.ports().items():
            if port in (name, "each"):
                for one in crowd(at, said):
                    stack.enter_context(one)
        with Client(**node.client_options) as new:  # type: ignore[arg-type]
            assert new.put("new", b"value").reason == ""
        assert old.get("new") == b"value"
        far = {**node.client_options, "run_dir": node.run_dir / "far", "transports": ("stream",)}
        with Client(**far) as distant:  # type: ignore[arg-type]
            wait_until(lambda: distant.get("new") == b"value", "another host reads", 20)
        with urllib.request.urlopen(f"http://{HOST}:{node.metrics}/live", timeout=1.0) as live:
            assert live.status == 200
        listening = Residency([f"tcp://{HOST}:{node.events}"])
        stack.callback(listening.close)
        wait_until(lambda: listening.in_sync, "a listener hears of the node", 20)
        wait_until(lambda: node.open_files() < FILES, "its files suffice", 20)
        assert node.process.poll() is None
