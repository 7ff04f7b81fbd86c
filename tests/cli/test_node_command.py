from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from places import REPOSITORY, Place, clean_env, wait_until

from kvstore import Client, Limits
from kvstore.client.nodes.saving.embedded_node import embedded_name
from kvstore.nodedir import NodeDir

PATIENT = Limits(request_timeout_s=10.0)
EMBEDDED = embedded_name("kv:default")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it_and_leaves_nothing_in_dev_shm(
    place: Place, number: int, code: int
) -> None:
    node = place.node()
    assert len(place.segments("node")) == 2
    assert node.end(number) == code
    assert place.segments("node") == []
    assert "Traceback" not in node.output
    wait_until(lambda: place.files() == [], f"an empty run directory: {place.files()}")


def test_a_service_manager_hears_of_its_start_though_redis_is_away(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        node = place.start("node", "--size", "4MiB", "--url", "redis://127.0.0.1:1")
        assert manager.recv(100) == b"READY=1"
        assert NodeDir(place.run_dir, "node").alive()
        assert "ready" not in node.output
        assert node.end(signal.SIGTERM) == 0


def test_who_starts_nodes_alone_tells_the_service_manager(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `kvstore up` it hears once, of the embedded node of an engine's client nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.delenv("KVSTORE_URL", raising=False)
        with Client(run_dir=place.run_dir, limits=PATIENT, node_size_bytes=16 << 20) as client:
            assert client.put("k", b"v")
        with pytest.raises(BlockingIOError):
            manager.recv(100)
        up = place.start("up", "--nodes", "2", "--size", "4MiB")
        up.wait_for("Ctrl-C ends it")
        wait_until(lambda: select.select([manager], [], [], 0)[0], "it hears of `up`")
        assert manager.recv(100) == b"READY=1"
        with pytest.raises(BlockingIOError):
            manager.recv(100)
        assert up.end(signal.SIGTERM) == 0


def test_its_end_takes_its_records_out_of_redis(place: Place, redis_server) -> None:
    store = ("--url", redis_server.url, "--key-prefix", "kv:cli-records")
    node = place.node(*store)
    assert place.kv("put", "a", *store, stdin=b"1").returncode == 0
    keys = lambda: [k for k in redis_server.admin().keys("*cli-records*") if b"epoch" not in k]  # noqa: E731
    assert len(keys()) == 3  # its block, its announcement, and its place among the nodes
    assert node.end(signal.SIGTERM) == 0
    assert keys() == []


def test_what_a_killed_node_leaves_waits_for_its_next_start_until_it_is_cleaned(
    place: Place, redis_server
) -> None:
    store = ("--url", redis_server.url)
    place.node("--name", "one", *store).end(signal.SIGKILL)
    ran = place.kv("put", "a", *store, stdin=b"1")
    assert ran.returncode == 1
    assert b"no memory node" in ran.stderr
    place.node("--name", "two", *store)
    assert len(place.segments("one")) == 2
    assert place.kv("node", "--clean").returncode == 0
    assert place.segments("one") == []
    assert len(place.segments("two")) == 2


def test_a_second_node_of_the_same_name_says_who_is_in_the_way(place: Place) -> None:
    place.node()
    second = place.kv("node", "--size", "4MiB")
    assert second.returncode == 2
    runs = f"a node of this name runs in {place.run_dir}/nodes/node"
    said = f"kvstore: name='node': {runs}: stop it, or choose another name\n"
    assert second.stderr.decode() == said
    assert len(place.segments("node")) == 2


@pytest.mark.parametrize(
    ("options", "policy"),
    [((), "default"), (("--numa", "0"), "bind:0"), (("--numa", "interleave"), "interleave:")],
)
def test_its_memory_is_on_the_numa_nodes_that_were_asked_for(
    place: Place, options: tuple[str, ...], policy: str
) -> None:
    """The kernel shows the policy of each mapping, and where its pages are."""
    place.node(*options)
    announcement = NodeDir(place.run_dir, "node").announcement()
    assert announcement is not None
    maps = Path(f"/proc/{announcement.pid}/numa_maps").read_text().splitlines()
    mine = [line.split() for line in maps if "/dev/shm/" in line and ".data" in line]
    assert mine
    assert all(words[1].startswith(policy) for words in mine), mine


def test_a_numa_node_that_is_not_there_is_refused(place: Place) -> None:
    ran = place.kv("node", "--size", "4MiB", "--numa", "77")
    assert ran.returncode == 2
    assert ran.stderr.startswith(b"kvstore: numa='77': must be a NUMA node with memory")
    ran = place.kv("node", "--size", "4MiB", "--numa", "left")
    assert ran.returncode == 2
    assert b"must be none, interleave or the number of a NUMA node" in ran.stderr
    assert place.segments("node") == []


def test_more_memory_than_there_is_is_refused_and_leaves_nothing(place: Place) -> None:
    ran = place.kv("node", "--size", "15TiB")
    assert ran.returncode == 1
    assert ran.stderr.startswith(b"kvstore: /dev/shm: 1")
    assert b"use a smaller --size or enlarge it" in ran.stderr
    assert place.segments("node") == []
    wait_until(lambda: place.files() == [], "an empty run directory")


PATIENT = Limits(redis_timeout_s=5.0, request_timeout_s=10.0)
"""A machine that runs other tests too may take longer than an engine would wait."""


def embedded_client(place: Place) -> Client:
    return Client(run_dir=place.run_dir, node_size_bytes=4 << 20, limits=PATIENT)


CLIENT = """
import sys, time
from pathlib import Path
from kvstore import Client, Limits
patient = Limits(redis_timeout_s=5.0, request_timeout_s=10.0)
client = Client(run_dir=Path(sys.argv[1]), node_size_bytes=4 << 20, limits=patient)
print(client.get("a"), client.put("a", b"1").status.value, flush=True)
if sys.argv[2] == "stay":
    time.sleep(60)
client.close()
"""


def client_process(place: Place, then: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(place.run_dir), then],
        cwd=REPOSITORY,
        env=clean_env(PYTHONPATH=str(REPOSITORY)),
        stdout=subprocess.PIPE,
        text=True,
    )


def test_clients_without_a_url_share_a_node_that_ends_with_the_last_of_them(place: Place) -> None:
    first = client_process(place, "stay")
    assert first.stdout.readline() == "None stored\n"
    out, _ = client_process(place, "end").communicate(timeout=20)
    assert out == "b'1' exists\n"
    time.sleep(1.5)
    assert NodeDir(place.run_dir, EMBEDDED).alive()
    first.kill()  # no goodbye: its lease tells
    first.communicate(timeout=10)
    wait_until(lambda: not place.processes(), f"no process left: {place.processes()}", 5)
    assert place.segments(EMBEDDED) == []
    assert place.files() == []


def test_a_client_that_comes_while_the_embedded_node_lingers_finds_everything(
    place: Place,
) -> None:
    with embedded_client(place) as client:
        assert client.put("a", b"1")
    with embedded_client(place) as client:
        assert client.get("a") == b"1"
        assert client.put("b", b"2")


def test_a_client_that_comes_while_the_embedded_node_ends_gets_a_new_one(place: Place) -> None:
    for _ in range(2):
        with embedded_client(place) as client:
            assert client.put("a", b"1")
            word = NodeDir(place.run_dir, EMBEDDED).announcement()
            os.kill(word.pid, signal.SIGTERM)
            wait_until(lambda: not NodeDir(place.run_dir, EMBEDDED).socket.exists(), "hidden")
            assert client.put("b", b"2")
            assert NodeDir(place.run_dir, EMBEDDED).announcement().epoch > word.epoch


def test_a_node_whose_starter_is_gone_ends_at_once(place: Place) -> None:
    ran = place.kv("node", "--size", "4MiB", "--end-with-parent", "1")
    assert ran.returncode == 0
    assert ran.stdout == b""
