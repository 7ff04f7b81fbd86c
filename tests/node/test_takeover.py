"""What a start finds of the former one. An orderly end with `keep` leaves what a kill leaves."""

import dataclasses
import socket
from pathlib import Path

import pytest
from redis_servers import wait_until
from test_daemon import KEYS, MIB, Talker

from kvstore.errors import NoSpaceError, UsageError
from kvstore.index.memory import MemoryIndex
from kvstore.machine import Machine
from kvstore.node import Node, NodeConfig, daemon, takeover
from kvstore.nodedir import NodeDir
from kvstore.segment.header import HEADER_BYTES, SUPERBLOCK_BYTES


@pytest.fixture
def index():
    return MemoryIndex()


def config(tmp_path, **options) -> NodeConfig:
    shm = tmp_path / "shm"
    shm.mkdir(exist_ok=True)
    return NodeConfig(
        run_dir=tmp_path, shm_dir=shm, **{"keep": True, "size_bytes": 4 * MIB, **options}
    )


def filled(tmp_path, index, **options) -> Node:
    """A node that has ended and left every key."""
    with Node(config(tmp_path, **options), index) as node:
        talker = Talker(node)
        for key in KEYS:
            talker.put(key)
        talker.lease.release()
    return node


def head_of(node: Node) -> Path:
    return Path(node.announcement.head_path)


def test_what_was_kept_is_there_again_under_a_new_epoch_and_in_the_index(tmp_path, index):
    former = filled(tmp_path, index)
    old = index.lookup(KEYS)
    assert index.nodes() == {}
    with Node(config(tmp_path), index) as node:
        assert node.core.blocks.counts["recovered"] == len(KEYS)
        assert node.announcement.head_path == former.announcement.head_path
        assert node.announcement.epoch > former.announcement.epoch
        wait_until(lambda: not node.core.blocks.outbox.publications_pending, "the publication", 5)
        assert not set(index.lookup(KEYS)) & set(old)
        assert Talker(node).put(KEYS[0])[1:] == [True, [1]]


@pytest.mark.parametrize(
    ("options", "why"),
    [({"key_prefix": "kv:other"}, "key_prefix"), ({"size_bytes": 2 * MIB}, "size_bytes")],
)
def test_under_another_prefix_or_in_another_shape_it_starts_empty_and_says_why(
    tmp_path, index, caplog, options, why
):
    former = filled(tmp_path, index)
    with Node(config(tmp_path, **options), index) as node:
        assert node.core.blocks.counts["recovered"] == 0
        assert f"its {why} is" in caplog.text
        assert not head_of(former).exists()


@pytest.mark.parametrize(
    ("offset", "why"),
    [(0, "superblock"), (SUPERBLOCK_BYTES + HEADER_BYTES, "slot 1")],
    ids=["superblock", "header"],
)
def test_a_segment_that_cannot_be_trusted_is_left_for_an_empty_one(
    tmp_path, index, caplog, offset, why
):
    former = filled(tmp_path, index)
    with head_of(former).open("r+b") as head:
        head.seek(offset)
        head.write(b"\x77")
    with Node(config(tmp_path), index) as node:
        assert node.core.blocks.counts["recovered"] == 0
        assert why in caplog.text
        assert Talker(node).put(KEYS[0])[1:] == [True, [0]]
    assert len(list((tmp_path / "shm").iterdir())) == 2  # the former one's files are gone


def test_what_was_reserved_is_held_until_the_lease_of_then_is_free(tmp_path, index):
    with Node(config(tmp_path), index) as node:
        talker = Talker(node)
        talker.reserve(KEYS[:3])
    with Node(config(tmp_path), index) as node:
        other = Talker(node)
        assert other.stat()["quarantined"] == 3
        other.lease.release()
        talker.lease.release()
        wait_until(lambda: node.stats()["quarantined"] == 0, "the slots are free", 5)


def taken_port() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def refused_for_its_size(tmp_path, monkeypatch):
    def too_much(segment_bytes, limit):
        raise UsageError("size_bytes", segment_bytes, "more than the container may have")

    monkeypatch.setattr(daemon, "check_limit", too_much)
    return config(tmp_path)


def refused_for_its_address(tmp_path, monkeypatch):
    taken = taken_port()
    monkeypatch.setattr(daemon, "_held_by_the_test", taken, raising=False)
    return config(tmp_path, listen=taken.getsockname(), open_to_all=True)


def refused_for_its_rights(tmp_path, monkeypatch):
    def no_group(*args):
        raise UsageError("group", 7, "is not one of this user's")

    monkeypatch.setattr(daemon, "share_files", no_group)
    return config(tmp_path)


@pytest.mark.parametrize(
    "refused", [refused_for_its_size, refused_for_its_address, refused_for_its_rights]
)
@pytest.mark.parametrize("keep", [True, False])
def test_what_waits_for_a_start_outlives_one_that_is_refused(
    tmp_path, index, monkeypatch, refused, keep
):
    """Whoever mistypes a setting starts again with it right, and with the blocks."""
    filled(tmp_path, index)
    with monkeypatch.context() as patch:
        wrong = dataclasses.replace(refused(tmp_path, patch), keep=keep)
        with pytest.raises((UsageError, OSError)):
            Node(wrong, index).start()
    assert index.nodes() == {}
    with Node(config(tmp_path), index) as node:
        assert node.core.blocks.counts["recovered"] == len(KEYS)


def test_a_first_start_that_is_refused_leaves_nothing(tmp_path, index, monkeypatch):
    with pytest.raises((UsageError, OSError)):
        Node(refused_for_its_address(tmp_path, monkeypatch), index).start()
    assert not NodeDir(tmp_path, "node").path.exists()
    assert list((tmp_path / "shm").iterdir()) == []


def test_nothing_stays_of_what_was_given_up_for_an_empty_segment_that_had_no_room(
    tmp_path, index, monkeypatch
):
    monkeypatch.setattr(takeover, "ROOM_WAIT_S", 0.1)
    filled(tmp_path, index)
    with pytest.raises(NoSpaceError, match="0 free"):
        Node(config(tmp_path, size_bytes=2 * MIB), index, machine=Crowded(lambda: True)).start()
    assert not NodeDir(tmp_path, "node").path.exists()
    assert list((tmp_path / "shm").iterdir()) == []


def test_an_embedded_nodes_segment_waits_for_nobody(tmp_path, index):
    with Node(config(tmp_path, keep=False, end_with_last_client=True), index) as node:
        assert node.dir.kept_for_s() == 0
    with Node(config(tmp_path, keep=False), index) as node:
        assert node.dir.kept_for_s() > 0
    assert list((tmp_path / "shm").iterdir()) == []


class Crowded(Machine):
    """Others have all of /dev/shm for as long as `full` says so."""

    def __init__(self, full):
        self.full = full

    def room(self, where):
        real = super().room(where)
        return real._replace(free_bytes=0) if self.full() else real


def test_a_node_that_lacks_memory_takes_that_of_dead_ones_that_wait(tmp_path, index):
    filled(tmp_path, index, name="dead")
    dead = NodeDir(tmp_path, "dead").path
    machine = Crowded(dead.exists)
    with Node(config(tmp_path, name="new"), index, machine=machine) as node:
        assert Talker(node).put(KEYS[0])[1:] == [True, [0]]
    assert not dead.exists()


def test_a_node_that_still_lacks_memory_says_so(tmp_path, index, monkeypatch):
    monkeypatch.setattr(takeover, "ROOM_WAIT_S", 0.1)
    with pytest.raises(NoSpaceError, match="0 free"):
        Node(config(tmp_path), index, machine=Crowded(lambda: True)).start()
    assert list((tmp_path / "shm").iterdir()) == []


def test_a_node_waits_a_moment_for_memory_that_a_killed_one_had(tmp_path, index):
    """Clients map it until they notice."""
    looks = iter([True] * 6)
    with Node(config(tmp_path), index, machine=Crowded(lambda: next(looks, False))) as node:
        assert Talker(node).put(KEYS[0])[1:] == [True, [0]]
    assert next(looks, None) is None


def test_a_node_larger_than_all_of_shm_does_not_wait(tmp_path, index, monkeypatch):
    monkeypatch.setattr(takeover, "ROOM_WAIT_S", 3600.0)
    with pytest.raises(NoSpaceError, match="asked for"):
        Node(config(tmp_path, size_bytes=1 << 43), index).start()


def test_a_start_under_another_host_name_goes_on_with_what_was_kept(tmp_path, index, monkeypatch):
    """A pod's host name is its own, and the pod that follows it has another."""
    former = filled(tmp_path, index)
    monkeypatch.setattr(socket, "gethostname", lambda: "kvstore-node-x7k2p")
    with Node(config(tmp_path), index) as node:
        assert node.core.blocks.counts["recovered"] == len(KEYS)
        assert node.core.node_id == former.core.node_id
        assert node.announcement.host == "kvstore-node-x7k2p"
        wait_until(lambda: not node.core.blocks.outbox.publications_pending, "the publication", 5)
        assert list(index.nodes()) == [former.core.node_id]


def test_an_empty_start_under_another_host_name_is_another_node(tmp_path, index, monkeypatch):
    """Hosts may have the same run directory and name."""
    former = filled(tmp_path, index, keep=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "other")
    with Node(config(tmp_path), index) as node:
        assert node.core.node_id != former.core.node_id
