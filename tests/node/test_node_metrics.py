"""What a node tells Prometheus and probes: a real node, asked over HTTP."""

from __future__ import annotations

import http.client
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from redis_servers import wait_until
from test_daemon import KEYS, MIB, Talker

from kvstore.core.report import stats
from kvstore.errors import IndexUnavailableError, UsageError
from kvstore.index.memory import MemoryIndex
from kvstore.node import Node, NodeConfig, metrics
from kvstore.node.metrics import FAMILIES, PREFIX

HOST = "127.0.0.1"


def made(tmp_path: Path, index: MemoryIndex, address: tuple[str, int] = (HOST, 0)) -> Node:
    shm = tmp_path / "shm"
    shm.mkdir(exist_ok=True)
    config = NodeConfig(run_dir=tmp_path, shm_dir=shm, size_bytes=4 * MIB, metrics=address)
    return Node(config, index)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with made(tmp_path, MemoryIndex()) as node:
        wait_until(lambda: not node.dir.why_not_ready(), "it is ready", 10)
        yield node


def ask(node: Node, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and body."""
    assert node._metrics is not None
    connection = http.client.HTTPConnection(HOST, node._metrics.port, timeout=10)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def told(node: Node) -> dict[str, float]:
    """The node's metrics by name, without the prefix."""
    status, body = ask(node, "/metrics")
    assert status == 200, body
    return {
        sample.name.removeprefix(PREFIX): sample.value
        for family in text_string_to_metric_families(body)
        for sample in family.samples
        if sample.labels.get("node") == "node"
    }


def test_what_it_tells_is_what_the_node_counts(node: Node) -> None:
    talker = Talker(node)
    for key in KEYS:
        talker.put(key)
    talker.put(KEYS[0])
    found = told(node)
    assert found["stored_total"] == found["blocks"] == len(KEYS)
    assert found["exists_total"] == 1
    assert found["clients"] == 1
    assert found["ready"] == 1
    assert found["capacity_bytes"] == 4 * MIB
    assert found["free_bytes"] < 4 * MIB
    assert found["info"] == 1
    talker.lease.release()


def test_nothing_that_a_node_counts_is_left_out(node: Node) -> None:
    counted = stats(node.core, 0.0).keys() | {"clients", "ready", "index_away"}
    assert {family.of for family in FAMILIES} == counted
    assert len(FAMILIES) == len(counted)


def test_each_name_is_as_prometheus_wants_it(node: Node) -> None:
    """Base units, and `_total` for what only grows."""
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    assert not any(name.endswith(("_s", "_ms", "_total", "_count")) for name in names)
    _, body = ask(node, "/metrics")
    for family in text_string_to_metric_families(body):
        assert family.documentation, family.name
    assert "process_cpu_seconds_total" in body


@pytest.mark.parametrize("path", ["/live", "/ready"])
def test_a_node_that_serves_is_live_and_ready(node: Node, path: str) -> None:
    assert ask(node, path) == (200, "yes\n")


def test_a_node_without_its_index_is_live_and_not_ready(tmp_path: Path) -> None:
    class Away(MemoryIndex):
        def announce(self, node_id: int, announcement: bytes, ttl_s: float) -> None:
            raise IndexUnavailableError("Redis at nowhere: refused")

    with made(tmp_path, Away()) as node:
        assert ask(node, "/live") == (200, "yes\n")
        wait_until(lambda: "refused" in ask(node, "/ready")[1], "the reason", 10)
        assert ask(node, "/ready")[0] == 503
        assert told(node)["ready"] == 0


@pytest.mark.parametrize("path", ["/metrics", "/live", "/ready"])
def test_a_loop_that_does_not_answer_is_told(
    node: Node, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(metrics, "LOOP_TIMEOUT_S", 0.2)
    stuck, on = threading.Event(), threading.Event()

    def stop() -> None:
        stuck.set()
        on.wait(20)

    assert node._loop is not None
    node._loop.call_soon_threadsafe(stop)
    assert stuck.wait(10)
    try:
        status, body = ask(node, path)
    finally:
        on.set()
    assert status == 503
    assert "has not answered" in body
    assert ask(node, path)[0] == 200


@pytest.mark.parametrize(("path", "status"), [("/", 404), ("/metrics/../etc", 404), ("/x", 404)])
def test_what_is_not_there_is_told_with_what_is(node: Node, path: str, status: int) -> None:
    assert ask(node, path) == (status, "try /metrics, /live or /ready\n")


def test_who_says_nothing_keeps_others_waiting_for_a_moment_only(
    node: Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics._Handler, "timeout", 0.3)
    assert node._metrics is not None
    with socket.create_connection((HOST, node._metrics.port)):
        time.sleep(0.1)
        assert ask(node, "/live") == (200, "yes\n")
    assert not capfd.readouterr().err, "a scan of ports fills no log"


@pytest.mark.parametrize(
    "said", [b"\xff\xfe\x00\n\n", b"GET\n\n", b"GET /metrics" + b"x" * 70_000 + b"\n\n"]
)
def test_what_is_no_request_ends_its_connection_alone(
    node: Node, said: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    assert node._metrics is not None
    with socket.create_connection((HOST, node._metrics.port), timeout=10) as odd:
        odd.sendall(said)
        odd.shutdown(socket.SHUT_WR)
        while odd.recv(65536):
            pass
    assert ask(node, "/live") == (200, "yes\n")
    assert not capfd.readouterr().err


def test_it_ends_with_its_node(tmp_path: Path) -> None:
    with made(tmp_path, MemoryIndex()) as node:
        assert ask(node, "/live")[0] == 200
        port = node._metrics.port if node._metrics is not None else 0

    def gone() -> bool:
        try:
            socket.create_connection((HOST, port), timeout=1).close()
        except OSError:
            return True
        return False

    wait_until(gone, "nobody listens", 10)
    names = lambda: {thread.name for thread in threading.enumerate()}  # noqa: E731
    wait_until(lambda: "kvstore-metrics" not in names(), "its thread has ended", 10)


@pytest.mark.parametrize("how", ["in use", "no address", "no library"])
def test_where_it_cannot_be_the_node_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with socket.create_server((HOST, 0)) as other:
        address = (HOST, other.getsockname()[1]) if how == "in use" else ("not an address", 1)
        if how == "no library":
            monkeypatch.setitem(sys.modules, "prometheus_client", None)
        with pytest.raises(UsageError, match="metrics=") as refused:
            made(tmp_path, MemoryIndex(), address).start()
    assert ("pip install" in str(refused.value)) == (how == "no library")
