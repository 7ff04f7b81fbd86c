import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from redis_servers import wait_until

from kvstore import Client, DeadlineError, Limits, Namespace
from kvstore.client.nodes.directory import HERE_BELIEVED_S
from kvstore.client.nodes.saving import embedded_node, host_writer
from kvstore.client.nodes.saving.embedded_node import embedded_name, start_embedded_node
from kvstore.index.embedded_redis.server import EmbeddedRedis
from kvstore.limits import PATIENT_TIMEOUT_S
from kvstore.machine import Machine
from kvstore.nodedir import NodeDir
from kvstore.rundir import listens
from kvstore.spi import BlockSession, NodeUnavailableError
from kvstore.testing.stopping import stop
from kvstore.types import STORED

sleep = time.sleep
PATIENT = Limits(redis_timeout_s=5.0, request_timeout_s=10.0)

OTHER = """
import sys
from pathlib import Path
from kvstore import Client, Limits, Namespace
from kvstore.spi import BlockSession, NodeUnavailableError
patient = Limits(redis_timeout_s=5.0, request_timeout_s=10.0)
with Client(run_dir=Path(sys.argv[1]), limits=patient) as client:
    print(client.get("k"), client.put("from the other", b"2").status, flush=True)
"""


@pytest.fixture(autouse=True)
def no_url(monkeypatch):
    monkeypatch.delenv("KVSTORE_URL", raising=False)


def test_without_a_url_clients_of_one_machine_share_one_store_and_nothing_is_left(tmp_path):
    run_dir = tmp_path / "run"
    with Client(run_dir=run_dir, node_size_bytes=16 << 20, limits=PATIENT) as client:
        assert client.put("k", b"1")
        segment = Path(NodeDir(run_dir, embedded_name("kv:default")).announcement().data_path)
        assert segment.exists()
        other = subprocess.run(
            [sys.executable, "-c", OTHER, str(run_dir)], capture_output=True, text=True, timeout=60
        )
        assert other.stdout == "b'1' stored\n", other.stderr
        assert client.get("from the other") == b"2"
    wait_until(lambda: not list((run_dir / "nodes").iterdir()), "the node ends", 15)
    wait_until(lambda: not (run_dir / "redis" / "redis.sock").exists(), "Redis ends", 15)
    assert not segment.exists()


def test_the_store_outlives_the_client_that_started_it_while_another_uses_it(tmp_path):
    run_dir = tmp_path / "run"
    first = Client(run_dir=run_dir, node_size_bytes=16 << 20, limits=PATIENT)
    first.put("k", b"1")
    with Client(run_dir=run_dir, limits=PATIENT) as second:
        assert second.put("mine", b"2")
        first.close()
        time.sleep(2.0)
        assert second.get("k") == b"1"


def pid_of_node(run_dir: Path) -> int:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"node" in words and os.fsencode(run_dir) in words:
                return int(path.parent.name)
    raise AssertionError("there is no node")


def test_a_client_that_comes_while_the_node_of_the_last_one_ends_starts_the_next(tmp_path):
    """Scripts that run one after the other had all that they put rejected for a second."""
    run_dir = tmp_path / "run"
    made = {"run_dir": run_dir, "node_size_bytes": 16 << 20, "limits": PATIENT}
    with Client(**made) as first:
        assert first.put("k", b"1")
        directory, pid = NodeDir(run_dir, embedded_name("kv:default")), pid_of_node(run_dir)
        stop(pid)
    going = directory.announcement()
    for name in (directory.socket, going.data_path, going.head_path):  # in the order of its end
        Path(name).unlink()
    ends = threading.Timer(1.0, os.kill, (pid, signal.SIGKILL))
    ends.start()
    with Client(**made) as client:
        result = client.put("k", b"2")
        assert result, result.reason
        assert client.get("k") == b"2"
    ends.join()


def name_its_index_otherwise(run_dir: Path) -> None:
    """Then only the index itself can say that the node is one of its own."""
    directory = NodeDir(run_dir, embedded_name("kv:default"))
    directory.announce(dataclasses.replace(directory.announcement(), index=""))


def test_each_key_prefix_has_an_embedded_node_beside_those_of_others(tmp_path):
    """Also when the first's is still there for a client that may come back."""
    made = {"run_dir": tmp_path / "run", "node_size_bytes": 16 << 20, "limits": PATIENT}
    with Client(key_prefix="a", **made) as client:
        assert client.put("k", b"1")
    with Client(key_prefix="b", **made) as client:
        result = client.put("k", b"2")
        assert result, result.reason
        with Client(key_prefix="c", **made) as other:
            result = other.put("k", b"3")
            assert result, result.reason
            assert client.get("k") == b"2"
            assert other.get("k") == b"3"
    with Client(key_prefix="b", **made) as client:
        assert client.get("k") == b"2"


def test_the_first_put_waits_for_a_redis_that_is_late(tmp_path, monkeypatch):
    """A busy machine answers late just when a process, Redis and a node start together."""
    run_dir = tmp_path / "run"
    with EmbeddedRedis.acquire(run_dir) as redis:

        def start_and_stall(*args, **kwargs):
            start_embedded_node(*args, **kwargs)
            name_its_index_otherwise(run_dir)
            stop(redis.pid)
            threading.Timer(0.5, os.kill, (redis.pid, signal.SIGCONT)).start()

        monkeypatch.setattr(embedded_node, "start_embedded_node", start_and_stall)
        quick = Limits(request_timeout_s=10.0)
        with Client(run_dir=run_dir, node_size_bytes=16 << 20, limits=quick) as client:
            result = client.put("k", b"1")
            assert result, result.reason
            assert client.get("k") == b"1"


def test_a_redis_that_stays_away_is_waited_for_once(tmp_path, monkeypatch):
    """Where only Redis can tell that the node is ours."""
    # Beyond what the first contact with an index may take.
    monkeypatch.setattr(host_writer, "FIRST_NODE_WAIT_S", 2 * PATIENT_TIMEOUT_S)
    slept = []
    monkeypatch.setattr(host_writer, "POLL_S", 0.0123)  # told from what other threads sleep
    monkeypatch.setattr(Machine, "sleep", staticmethod(lambda s: (slept.append(s), sleep(s))))
    run_dir = tmp_path / "run"
    with EmbeddedRedis.acquire(run_dir) as redis:

        def start_and_hang(*args, **kwargs):
            start_embedded_node(*args, **kwargs)
            name_its_index_otherwise(run_dir)
            stop(redis.pid)

        monkeypatch.setattr(embedded_node, "start_embedded_node", start_and_hang)
        with Client(run_dir=run_dir, node_size_bytes=16 << 20) as client:
            client.session.index.identity = lambda: "another name of it"
            assert "the index cannot be asked" in client.put("k", b"1").reason
            assert 0.0123 in slept
            slept.clear()
            sleep(HERE_BELIEVED_S)
            assert "the index cannot be asked" in client.put("k", b"1").reason
            assert 0.0123 not in slept
        os.kill(redis.pid, signal.SIGCONT)


def test_a_session_of_a_connector_starts_the_node_too_when_nobody_else_did(tmp_path):
    namespace = Namespace.named("engine")
    session = BlockSession(run_dir=tmp_path / "run", limits=PATIENT, node_size_bytes=16 << 20)
    (reservation,) = session.reserve([namespace.value_key("k")], 1000, namespace.id)
    assert session.commit([reservation]) == [STORED]
    session.close()


def test_with_a_url_no_node_is_started(redis_server, tmp_path):
    session = BlockSession(
        redis_server.url, run_dir=tmp_path / "run", limits=PATIENT, node_size_bytes=16 << 20
    )
    with pytest.raises(NodeUnavailableError, match="kvstore node"):
        session.reserve([bytes(32)], 1000, 0)
    session.close()


def test_a_node_is_not_ready_while_nobody_can_connect_to_its_socket(tmp_path):
    directory = NodeDir(tmp_path, "node")
    directory.path.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(directory.socket))
        assert directory.socket.exists()
        assert not listens(directory.socket)
        bound.listen(1)
        assert listens(directory.socket)
        assert listens(directory.socket)
        assert listens(directory.socket), "a full queue is no closed door"


@pytest.mark.parametrize(("again_after_s", "starts"), [(600.0, 1), (0.0, 3)])
def test_a_node_that_cannot_start_is_not_started_by_every_put(
    tmp_path, monkeypatch, again_after_s, starts
):
    """Each start is a process of a second; what it said is the reason of every put."""
    monkeypatch.setattr(host_writer, "START_AGAIN_AFTER_S", again_after_s)
    start, started = embedded_node.start_in_background, []

    def ends_at_once(command, **options):
        started.append(command)
        return start([sys.executable, "-S", "-c", "raise SystemExit('no room')"], **options)

    monkeypatch.setattr(embedded_node, "start_in_background", ends_at_once)
    with Client(run_dir=tmp_path / "run", node_size_bytes=16 << 20, limits=PATIENT) as client:
        for i in range(3):
            assert "ended at once: no room" in client.put(f"k{i}", b"1").reason
    assert len(started) == starts


def slowly(monkeypatch, what: str) -> list[int]:
    """Have the node do something else first; the processes that are started for it."""
    monkeypatch.setattr(embedded_node, "START_TIMEOUT_S", 1.0)
    start, pids = embedded_node.start_in_background, []

    def started(command, **options):
        program = f"import os, sys, time; {what}; os.execv(sys.argv[1], sys.argv[1:])"
        process = start([sys.executable, "-S", "-c", program, *command], **options)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(embedded_node, "start_in_background", started)
    return pids


def test_a_start_that_is_late_is_waited_for_by_the_next_save_and_not_repeated(
    tmp_path, monkeypatch
):
    go = tmp_path / "go"
    pids = slowly(monkeypatch, f"any(iter(lambda: os.path.exists({str(go)!r}), True))")
    start = {"key_prefix": "kv:default", "size_bytes": 16 << 20}
    for _ in range(2):
        with pytest.raises(DeadlineError, match="not ready within"):
            start_embedded_node(tmp_path / "run", **start)
    assert len(pids) == 1
    go.touch()
    monkeypatch.setattr(embedded_node, "START_TIMEOUT_S", 60.0)
    start_embedded_node(tmp_path / "run", **start)
    assert len(pids) == 1
    directory = NodeDir(tmp_path / "run", embedded_name("kv:default"))
    assert directory.announcement().pid == pids[0]
    os.kill(pids[0], signal.SIGTERM)
    wait_until(lambda: not directory.alive(), "its end")


def test_a_start_that_never_ends_is_given_up_by_the_last_save_that_waits(tmp_path, monkeypatch):
    pids = slowly(monkeypatch, "time.sleep(600)")
    for _ in range(embedded_node.START_SAVES):
        assert not pids or Path(f"/proc/{pids[0]}").exists()
        with pytest.raises(DeadlineError, match="not ready within"):
            start_embedded_node(tmp_path, key_prefix="kv:default", size_bytes=16 << 20)
    assert len(pids) == 1
    wait_until(lambda: not Path(f"/proc/{pids[0]}").exists(), "its end")
