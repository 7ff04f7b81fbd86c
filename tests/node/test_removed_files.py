"""Files of a living node are removed by a cleaner of /tmp, or by hand: it puts them back."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_servers import RedisServer, wait_until
from stores import MIB, NodeProcess, NodeThread

from kvstore import Client
from kvstore.cli.checks.base import Context, Level
from kvstore.cli.checks.machine import leftovers
from kvstore.node.vram import VramNode  # noqa: F401  # its files are the same, and one more
from kvstore.nodedir import NodeDir

VALUE = b"v" * 100_000


@pytest.fixture
def node(redis_server: RedisServer) -> Iterator[NodeProcess]:
    with NodeProcess(redis_server, size=8 * MIB) as node:
        yield node


def put_by_a_new_client(node: NodeProcess, key: str) -> bool:
    with Client(**node.client_options) as client:
        return bool(client.put(key, VALUE))


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


NEEDED = ["control.sock", "node.json", "leases", "ready", "room"]


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("name", NEEDED[:2])
def test_new_clients_save_again_once_the_file_is_there_again(
    node: NodeProcess, name: str, replaced: bool
) -> None:
    with Client(**node.client_options) as old:
        assert old.put("old", VALUE)
        path = node.directory.path / name
        remove(path)
        if replaced:
            path.touch()
        wait_until(lambda: put_by_a_new_client(node, "new"), "a new client saves")
        assert old.put("older", VALUE)
        assert old.get("new") == VALUE
    assert path.stat().st_mode & 0o777 == (0o600 if name == "control.sock" else 0o644)


@pytest.mark.parametrize("name", NEEDED)
def test_every_file_is_put_back(node: NodeProcess, name: str) -> None:
    path = node.directory.path / name
    wait_until(path.exists, "it is there at first")
    remove(path)
    wait_until(path.exists, "it is there again")
    assert put_by_a_new_client(node, "k")
    if name == "ready":
        assert node.directory.why_not_ready() == ""


def test_all_files_but_the_lock_are_put_back(node: NodeProcess) -> None:
    with Client(**node.client_options) as old:
        assert old.put("old", VALUE)
        for path in node.directory.path.iterdir():
            if path.name != "lock":
                remove(path)
        shutil.rmtree(node.run_dir / "epochs")
        wait_until(lambda: put_by_a_new_client(node, "new"), "a new client saves")
        assert old.put("older", VALUE)
        wait_until((node.run_dir / "epochs" / node.name).exists, "its epoch is on record again")
    assert node.process.poll() is None


@pytest.mark.parametrize("file", ["data", "head"])
def test_memory_that_was_removed_is_said_and_those_who_have_it_go_on(
    node: NodeProcess, file: str
) -> None:
    """A file without a name gets none again: new clients have misses until a restart."""
    word = node.directory.announcement()
    assert word is not None
    with Client(**node.client_options) as old:
        assert old.put("old", VALUE)
        assert old.health()
        path = word.data_path if file == "data" else word.head_path
        remove(Path(path))
        wait_until(lambda: not old.health(), "its own client says so")
        assert old.get("old") == VALUE
        assert old.put("older", VALUE)
        with Client(**node.client_options) as new:
            assert new.get("old") is None
            assert not new.put("new", VALUE)
            for client in (old, new):
                why = client.health().nodes[node.name]
                assert path in why
                assert "restart it" in why
    found = leftovers(Context(node.redis.url, node.key_prefix, node.run_dir))
    (said,) = [one for one in found if one.level is Level.FAIL]
    assert f"{path} of node {node.name} was removed" in said.found
    node.kill()
    node.start()
    assert put_by_a_new_client(node, "new")


def test_a_node_that_lost_its_lock_puts_nothing_back(node: NodeProcess) -> None:
    remove(node.directory.lock)
    remove(node.directory.socket)
    wait_until(lambda: node.process.poll() is not None, "it ends")
    assert not node.directory.socket.exists()


def test_after_the_lease_of_a_living_writer_was_removed_the_next_start_is_empty(
    node: NodeProcess,
) -> None:
    """It could not tell when that writer ends, and who writes into its memory (rule 5)."""
    with Client(**node.client_options) as old:
        assert old.put("old", VALUE)
        remove(node.directory.leases)
        wait_until(node.directory.unwatched.exists, "the node notes it")
        node.kill()
        node.start()
        wait_until(lambda: old.get("old") is None, "the former memory is let go of")
        wait_until(lambda: old.put("k", VALUE), "the node is found")
        assert not node.directory.unwatched.exists()


def test_once_that_writer_has_gone_the_next_start_is_warm(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.node.upkeep.SIGN_OF_LIFE_S", 0.05)
    with NodeThread(redis_server, size_bytes=8 * MIB) as node:
        directory = NodeDir(node.run_dir, "node")
        with Client(**node.client_options) as old:
            assert old.put("old", VALUE)
            remove(directory.leases)
            wait_until(directory.unwatched.exists, "the node notes it")
        wait_until(lambda: not directory.unwatched.exists(), "the writer has gone")


# --- cleaners by age -----------------------------------------------------------------


def test_nothing_that_a_living_node_needs_grows_old(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.node.upkeep.SIGN_OF_LIFE_S", 0.05)
    with NodeThread(redis_server, size_bytes=8 * MIB) as node, Client(**node.client_options) as one:
        assert one.put("k", VALUE)
        directory = NodeDir(node.run_dir, "node")
        word = directory.announcement()
        assert word is not None
        wait_until(directory.ready_path.exists, "it is ready")
        files = [node.run_dir, *node.run_dir.rglob("*"), Path(word.data_path), Path(word.head_path)]
        mine = [path for path in files if "redis" not in path.parts and path.name != "silent"]
        names = {path.name for path in mine}
        assert names >= {"lock", "node.json", "control.sock", "leases", "keep", "epochs", "nodes"}
        for path in mine:
            os.utime(path, (1, 1))
        wait_until(lambda: not [p for p in mine if p.lstat().st_mtime == 1], "all are as of now")


def test_a_lease_that_is_gone_and_that_nobody_holds_costs_no_warm_start(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client is dead, and the node has not heard so yet: nobody writes any more."""
    monkeypatch.setattr("kvstore.node.upkeep.SIGN_OF_LIFE_S", 0.05)
    monkeypatch.setattr("kvstore.node.upkeep.fd_is_locked", lambda fd: False)
    with NodeThread(redis_server, size_bytes=8 * MIB) as node, Client(**node.client_options) as one:
        assert one.put("k", VALUE)
        directory = NodeDir(node.run_dir, "node")
        remove(directory.leases)
        wait_until(directory.leases.is_dir, "the directory is there again")
        looked_at = time.monotonic()
        wait_until(lambda: time.monotonic() > looked_at + 0.2, "several looks more")
        assert not directory.unwatched.exists()
