"""What a node tells Prometheus and probes: a real node, asked over HTTP."""

from __future__ import annotations

import http.client
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import groupby
from pathlib import Path

import pytest
from disk_nodes import DISK_BYTES, DiskNode
from disk_nodes import config as disk_config
from prometheus_client.parser import text_string_to_metric_families
from redis_servers import RedisServer, wait_until
from stores import NodeProcess, in_loop
from test_daemon import KEYS, MIB, Talker

import kvstore
from kvstore.core.outgoing.watched import AGE_BOUNDS_S, Ages
from kvstore.core.report import stats
from kvstore.errors import IndexUnavailableError, UsageError
from kvstore.index.memory import MemoryIndex
from kvstore.node import Node, NodeConfig, metrics
from kvstore.node.metrics import (
    DISK_FAMILIES,
    DISK_SKIPPED,
    FAMILIES,
    HISTOGRAMS,
    PREFIX,
    NodeMetrics,
)
from kvstore.protocol.control import Op, packed
from kvstore.testing.ports import held_ports

HOST = "127.0.0.1"


def metrics_of(node: Node) -> NodeMetrics:
    assert node._metrics is not None
    return node._metrics


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
    with closing(http.client.HTTPConnection(HOST, metrics_of(node).port, timeout=10)) as connection:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


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


def test_what_engines_found_and_missed_adds_up_to_what_they_asked_for(node: Node) -> None:
    talker = Talker(node)
    names = ["asked_tokens", "engine_tokens", "hit_tokens", "missed_tokens:evicted"]
    talker.socket.sendall(packed([Op.REPORT, 0, names, [100, 30, 50, 19]]))
    talker.socket.sendall(packed([Op.REPORT, 0, ["missed_tokens:last-token"], [1]]))
    assert talker.stat()["asked_tokens"] == 100
    _, body = ask(node, "/metrics")
    samples = [
        sample
        for family in text_string_to_metric_families(body)
        for sample in family.samples
        if sample.name.endswith("_tokens_total")
    ]
    asked = sum(sample.value for sample in samples if "asked" in sample.name)
    assert asked == sum(sample.value for sample in samples if "asked" not in sample.name) == 100
    reasons = {sample.labels["reason"] for sample in samples if "missed" in sample.name}
    assert reasons == {"evicted", "last-token"}
    talker.lease.release()


def test_ages_are_histograms_and_the_version_is_told(node: Node) -> None:
    _, body = ask(node, "/metrics")
    families = {family.name: family for family in text_string_to_metric_families(body)}
    for family in HISTOGRAMS:
        shown = families[PREFIX + family.name]
        assert shown.type == "histogram"
        bounds = [sample.labels["le"] for sample in shown.samples if "le" in sample.labels]
        assert bounds[-1] == "+Inf"
        assert len(bounds) == len(AGE_BOUNDS_S) + 1
    (info,) = families["kvstore_node_info"].samples
    assert info.labels["version"] == kvstore.__version__


def counted_by(node: Node) -> set[str]:
    """Return what a node counts, without the curve that `kvstore plan` asks for."""
    names = stats(node.core, 0.0).keys() | {"clients", "ready", "index_away"}
    return {name for name in names if not name.startswith("reuse_")}


def test_nothing_that_a_node_counts_is_left_out(node: Node) -> None:
    counted = counted_by(node)
    of_ages = {name for family in HISTOGRAMS for name in Ages().numbers(family.of)}
    assert {family.of for family in FAMILIES} | of_ages == counted
    assert len(FAMILIES) + len(of_ages) == len(counted)


def test_of_disks_too_nothing_that_a_node_counts_is_left_out(tmp_path: Path) -> None:
    with DiskNode(disk_config(tmp_path, metrics=(HOST, 0))) as disk_node:
        disk_node.save(KEYS[0], size=100)
        node = disk_node.node
        counted = {name for name in stats(node.core, 0.0) if name.startswith("disk_")}
        reasons = {name for name in counted if name.startswith(f"{DISK_SKIPPED}_")}
        assert {family.of for family in DISK_FAMILIES} == counted - reasons
        found = told(node)
        assert found["disk_devices"] == 1
        assert found["disk_closed"] == found["disk_bytes"] == 0
        assert 0 < found["disk_capacity_bytes"] < DISK_BYTES
        _, body = ask(node, "/metrics")
        for reason in reasons:
            assert f'reason="{reason.removeprefix(f"{DISK_SKIPPED}_")}"' in body


def test_each_name_is_as_prometheus_wants_it(node: Node) -> None:
    """Base units, and `_total` for what only grows."""
    names = [family.name for family in (*FAMILIES, *DISK_FAMILIES)]
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

    in_loop(node, stop)
    assert stuck.wait(10)
    try:
        status, body = ask(node, path)
    finally:
        on.set()
    assert status == 503
    assert "has not answered" in body
    wait_until(lambda: ask(node, path)[0] == 200, "the loop answers again")


@pytest.mark.parametrize(("path", "status"), [("/", 404), ("/metrics/../etc", 404), ("/x", 404)])
def test_what_is_not_there_is_told_with_what_is(node: Node, path: str, status: int) -> None:
    assert ask(node, path) == (status, "try /metrics, /live or /ready\n")


def test_who_says_nothing_keeps_nobody_waiting(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    with connected(node):
        assert ask(node, "/live") == (200, "yes\n")
    assert not capfd.readouterr().err, "a scan of ports fills no log"


def connected(node: Node | int) -> socket.socket:
    """To a node of this process, or to a port."""
    if isinstance(node, Node):
        node = metrics_of(node).port
    return socket.create_connection((HOST, node), timeout=10)


def ended(one: socket.socket) -> bool:
    """Whether the node has hung up."""
    one.setblocking(False)
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


class Crowd:
    """Connections that say nothing, or a byte of a request now and then, and come again when they
    are hung up on."""

    def __init__(self, port: int, silent: int, dripping: int) -> None:
        self._port = port
        self._over = threading.Event()
        self._members = [(False, connected(port)) for _ in range(silent)]
        self._members += [(True, connected(port)) for _ in range(dripping)]
        self._thread = threading.Thread(target=self._stay)

    def _stay(self) -> None:
        while not self._over.wait(0.05):
            for i, (drips, one) in enumerate(self._members):
                gone = ended(one)
                if drips and not gone:
                    with suppress(OSError):
                        one.send(b"G")
                if gone:
                    one.close()
                    self._members[i] = drips, connected(self._port)

    def __enter__(self) -> Crowd:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join(30)
        for _, one in self._members:
            one.close()


def answered_s(port: int, for_s: float) -> list[float]:
    """How long `/live` took each time, asked again and again."""
    taken_s, over = list[float](), time.monotonic() + for_s
    while time.monotonic() < over or len(taken_s) < 3:
        began = time.monotonic()
        with connected(port) as probe:
            probe.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert probe.recv(15) == b"HTTP/1.1 200 OK"
        taken_s.append(time.monotonic() - began)
        time.sleep(0.02)
    return taken_s


def late_in_a_row(taken_s: list[float]) -> int:
    """The longest run of answers that a kubelet would not have waited for."""
    return max(len(list(late)) * slow for slow, late in groupby(one >= 1.0 for one in taken_s))


@pytest.mark.parametrize(
    "for_s",
    [
        pytest.param(4.0, id="seconds"),
        pytest.param(120.0, id="minutes", marks=[pytest.mark.long, pytest.mark.timeout(600)]),
    ],
)
def test_a_crowd_of_slow_clients_delays_no_probe(redis_server: RedisServer, for_s: float) -> None:
    """One connection that sent a byte now and then, or four silent ones, did: the kubelet killed
    the node, which it does after three late answers. A machine may stand still for one."""
    with held_ports(1) as (port,):
        options = ("--metrics", f"{HOST}:{port}")
        with (
            NodeProcess(redis_server, size=8 * MIB, options=options),
            Crowd(port, silent=200, dripping=200),
        ):
            assert late_in_a_row(answered_s(port, for_s)) < 2


def test_a_request_has_its_time_as_a_whole(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "REQUEST_TIMEOUT_S", 0.5)
    with connected(node) as one:
        began = time.monotonic()
        while not ended(one):
            with suppress(OSError):
                one.send(b"G")
            time.sleep(0.05)
            assert time.monotonic() < began + 10


def test_an_answer_that_is_not_read_has_its_time_too(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "REQUEST_TIMEOUT_S", 0.5)
    monkeypatch.setattr(NodeMetrics, "_response", lambda *_: bytes(64 * MIB))
    guests = metrics_of(node)._guests
    with connected(node) as one:
        one.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        wait_until(lambda: guests, "it is answered", 10)
        wait_until(lambda: not guests, "it is hung up on", 10)


def test_when_there_is_no_room_the_oldest_of_those_who_have_most_goes(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "REQUEST_TIMEOUT_S", 600.0)
    monkeypatch.setattr(metrics, "CONNECTIONS_MAX", 3)
    at = (HOST, metrics_of(node).port)
    other = socket.create_connection(at, timeout=10, source_address=("127.0.0.2", 0))
    crowd = [connected(node) for _ in range(3)]
    wait_until(lambda: ended(crowd[0]), "the first of the crowd is hung up on", 10)
    assert not any(ended(one) for one in (other, *crowd[1:]))
    assert ask(node, "/live") == (200, "yes\n")
    for one in (other, *crowd):
        one.close()


@pytest.mark.parametrize("line", ["Accept: " + "x;" * 2000, "Accept: a/b;version=\xff", ":", "x"])
def test_odd_headers_end_no_service(node: Node, line: str) -> None:
    with connected(node) as odd:
        odd.sendall(f"GET /metrics?name[]=\xff&%zz HTTP/1.1\r\n{line}\r\n\r\n".encode("latin-1"))
        while odd.recv(65536):
            pass
    assert ask(node, "/live") == (200, "yes\n")


def test_a_fault_of_ours_ends_one_connection_alone(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(NodeMetrics, "_response", lambda *_: 1 / 0)
        with connected(node) as one:
            one.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert one.recv(1) == b""
    assert ask(node, "/live") == (200, "yes\n")


@pytest.mark.parametrize("path", ["/live", "/ready"])
def test_a_probe_may_ask_for_the_head_alone(node: Node, path: str) -> None:
    assert ask(node, path, "HEAD") == (200, "")


@pytest.mark.parametrize(
    "said", [b"\xff\xfe\x00\n\n", b"GET\n\n", b"GET /metrics" + b"x" * 70_000 + b"\n\n"]
)
def test_what_is_no_request_ends_its_connection_alone(
    node: Node, said: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with connected(node) as odd, suppress(OSError):  # it may hang up before all is said
        odd.sendall(said)
        odd.shutdown(socket.SHUT_WR)
        while odd.recv(65536):
            pass
    assert ask(node, "/live") == (200, "yes\n")
    assert not capfd.readouterr().err


def test_it_ends_with_its_node(tmp_path: Path) -> None:
    with made(tmp_path, MemoryIndex()) as node:
        assert ask(node, "/live")[0] == 200
        port = metrics_of(node).port

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
