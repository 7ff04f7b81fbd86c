"""A full disk under the run directory: what needs no room there goes on, all else says why."""

import errno
from pathlib import Path

import pytest
from redis_servers import wait_until
from stores import PATIENT

from kvstore import Client
from kvstore.client.nodes.lease import Lease
from kvstore.errors import NodeUnavailableError, NoSpaceError
from kvstore.index.memory import MemoryIndex
from kvstore.machine import REAL
from kvstore.node import Node, NodeConfig, epoch
from kvstore.node.publishing.heartbeat import HEARTBEAT_S, Heartbeat
from kvstore.nodedir import NodeDir

MIB = 1 << 20
FULL = OSError(errno.ENOSPC, "No space left on device")


def full(*args, **kwargs):
    raise FULL


def test_resets_are_confirmed_and_heartbeats_go_on(tmp_path, monkeypatch, caplog):
    index = MemoryIndex()
    beaten = []
    real = Heartbeat.beat
    monkeypatch.setattr(Heartbeat, "beat", lambda self: (real(self), beaten.append(1)))
    with Node(NodeConfig(run_dir=tmp_path, size_bytes=4 * MIB), index) as node:
        assert node.dir.resets_path.exists()
        monkeypatch.setattr(NodeDir, "keep_resets", full)
        count = len(beaten)
        wait_until(lambda: len(beaten) > count + 1, "it beats")
        assert node.stats()["tasks_failed"] == 0
        assert not node.dir.resets_path.exists(), "what is there would hide a reset"
        told = [r for r in caplog.records if "No space left on device" in r.getMessage()]
        assert len(told) == 1, f"one warning in {HEARTBEAT_S} s and more"
        assert str(node.dir.resets_path) in told[0].getMessage()


def test_a_reset_that_cannot_be_written_is_answered(node, monkeypatch):
    resets = NodeDir(node.run_dir, node.name).resets_path
    resets.with_suffix(".new").mkdir()  # it can be written to as little
    with Client(**node.client_options) as client:
        assert client.put("k", b"v")
        assert client.clear(timeout_s=10.0)
        assert client.get("k") is None
    resets.with_suffix(".new").rmdir()


def test_a_node_that_finds_no_room_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(epoch.os, "fsync", full)
    node = Node(NodeConfig(run_dir=tmp_path, size_bytes=4 * MIB), MemoryIndex())
    with pytest.raises(NoSpaceError, match=f"run_dir='{tmp_path}'.*free bytes and inodes.*run-dir"):
        node.start()


def test_a_client_without_room_for_its_lease_says_so_each_time_and_reads(node, monkeypatch):
    with Client(**{**node.client_options, "limits": PATIENT}) as writer:
        assert writer.put("k", b"v")
        monkeypatch.setattr(type(REAL), "lock_file", full)
        with Client(**{**node.client_options, "limits": PATIENT}) as client:
            assert client.get("k") == b"v"
            for _ in range(3):
                result = client.put("other", b"v")
                assert "No space left on device; free bytes and inodes there" in result.reason
        assert writer.put("more", b"v")


def test_a_lease_that_is_refused_for_another_reason_is_given_no_remedy(tmp_path: Path) -> None:
    with pytest.raises(NodeUnavailableError, match=r"No such file or directory$"):
        Lease(tmp_path / "absent")
