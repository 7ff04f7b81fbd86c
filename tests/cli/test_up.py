from __future__ import annotations

import json
import os
import re
import shlex
import signal
from pathlib import Path

import pytest
from places import Place, wait_until
from redis_servers import RedisServer

from kvstore.cli import fleet
from kvstore.cli.commands import up
from kvstore.errors import NodeUnavailableError
from kvstore.nodedir import NodeDir
from kvstore.system import numa

NAMES = ("node-0", "node-1")


def nothing_left(place: Place) -> None:
    wait_until(lambda: not place.processes(), f"no process left: {place.processes()}")
    assert place.segments(*NAMES) == []
    assert place.files() == []


def test_ctrl_c_leaves_no_process_no_segment_and_no_file(place: Place) -> None:
    up = place.start("up", "--nodes", "2", "--size", "4MiB")
    up.wait_for("Ctrl-C ends it.")
    assert len(place.segments(*NAMES)) == 4
    assert up.end(signal.SIGINT) == 130
    assert place.processes() == []
    nothing_left(place)


def test_it_prints_what_clients_and_vllm_need(place: Place) -> None:
    output = place.start("up", "--size", "4MiB", "--key-prefix", "kv:x").wait_for("Ctrl-C ends it.")
    url = f"unix://{place.run_dir}/redis/redis.sock"
    assert f"export KVSTORE_URL={url}\n" in output
    assert f"export KVSTORE_RUN_DIR={place.run_dir}\n" in output
    words = shlex.split(re.search(r"vllm serve.*?\n\n", output, re.DOTALL)[0])
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    extra = {"url": url, "run_dir": str(place.run_dir), "key_prefix": "kv:x"}
    assert transfer["kv_connector_extra_config"] == extra
    assert transfer["kv_load_failure_policy"] == "recompute"


def test_each_node_is_on_one_numa_node_in_turn(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "nodes_with_memory", lambda: [0, 3])
    assert up._numa_of_each("each", 3) == ["0", "3", "0"]
    monkeypatch.undo()
    two = place.start("up", "--size", "4MiB", "--nodes", "2", "--numa", "each")
    two.wait_for("Ctrl-C ends it.")
    there = numa.nodes_with_memory()
    for i in range(2):
        announcement = NodeDir(place.run_dir, f"node-{i}").announcement()
        assert announcement is not None
        maps = Path(f"/proc/{announcement.pid}/numa_maps").read_text().splitlines()
        mine = [line.split()[1] for line in maps if "/dev/shm/" in line]
        assert set(mine) == {f"bind:{there[i % len(there)]}"}


def test_a_node_that_dies_is_started_again(place: Place) -> None:
    up = place.start("up", "--size", "4MiB")
    up.wait_for("Ctrl-C ends it.")
    directory = NodeDir(place.run_dir, "node-0")
    first = directory.announcement()
    os.kill(first.pid, signal.SIGKILL)
    up.wait_for("ended (signal 9); restart 1 of 5 in 0.5 s")

    def again() -> bool:
        word = directory.announcement()
        return directory.socket.exists() and word is not None and word.epoch > first.epoch

    wait_until(again, "a new start with a larger epoch")
    assert up.end(signal.SIGTERM) == 0
    nothing_left(place)


def test_nodes_and_redis_end_with_an_up_that_is_killed(place: Place) -> None:
    up = place.start("up", "--size", "4MiB")
    up.wait_for("Ctrl-C ends it.")
    up.end(signal.SIGKILL)
    nothing_left(place)


def test_without_room_in_shared_memory_it_says_so_and_leaves_nothing(place: Place) -> None:
    ran = place.kv("up", "--size", "8TiB")
    assert ran.returncode == 1
    assert re.fullmatch(rb"kvstore: /dev/shm: \d+ bytes asked for, \d+ free, .*\n", ran.stderr)
    nothing_left(place)


def test_a_node_that_cannot_start_ends_the_others(place: Place) -> None:
    taken = place.start(
        "node", "--size", "4MiB", "--name", "node-1", "--url", "redis://127.0.0.1:1"
    )
    wait_until(NodeDir(place.run_dir, "node-1").socket.exists, "it serves its host")
    ran = place.kv("up", "--nodes", "2", "--size", "4MiB")
    assert ran.returncode == 1
    assert b"a node of this name runs" in ran.stderr
    assert b"kvstore: node node-1 did not start" in ran.stderr
    assert place.segments("node-0") == []
    assert taken.end(signal.SIGTERM) == 0
    nothing_left(place)


def test_restarts_in_a_row_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "BACKOFF_S", 0.0)
    child = fleet.Child("node-0", ["false"], {"PATH": os.environ["PATH"]})
    said: list[str] = []
    child.start()

    def tended() -> bool:
        child.tend(said.append)
        return False

    with pytest.raises(NodeUnavailableError, match="after 5 restarts in a row"):
        wait_until(tended, "the limit")
    assert len(said) == fleet.RESTARTS_MAX


def test_nodes_that_redis_refuses_are_said_to_be_not_ready_soon_and_why(place: Place) -> None:
    """And when the reason changes; then they are ready, and it goes on."""
    with RedisServer("--requirepass", "hunter2") as redis:
        admin = redis.admin(password="hunter2")
        up = place.start("up", "--size", "4MiB", "--url", f"unix://:wrong-word@{redis.socket}")
        not_ready = f"kvstore up: node node-0 is not ready yet: Redis at unix:{redis.socket}: "
        up.wait_for(f"{not_ready}wrong user name or password")
        admin.acl_setuser(
            "default", enabled=True, passwords=["+wrong-word"], commands=["-@all", "+acl"]
        )
        up.wait_for(f"{not_ready}this user lacks a right")
        admin.acl_setuser("default", enabled=True, commands=["+@all"])
        admin.close()
        output = up.wait_for("Ctrl-C ends it.")
        assert output.count(f"{not_ready}wrong") == 1
        assert up.end(signal.SIGTERM) == 0
    assert "wrong-word" not in output
    nothing_left(place)


def test_a_password_in_the_url_is_not_shown(place: Place) -> None:
    with RedisServer("--requirepass", "hunter2") as redis:
        up = place.start("up", "--size", "4MiB", "--url", f"unix://:hunter2@{redis.socket}")
        output = up.wait_for("Ctrl-C ends it.")
        nodes = [line for line in place.processes() if " node " in line]
        assert up.end(signal.SIGTERM) == 0
    assert "hunter2" not in output
    assert nodes
    assert not any("hunter2" in line for line in nodes)
