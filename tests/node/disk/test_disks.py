"""A node with real disks: what it evicts is there, after a restart too, and what was dropped is
not."""

import errno
import os
import threading
import time
from copy import copy
from dataclasses import replace

import pytest
from disk_nodes import (
    DISK_BYTES,
    KEYS,
    MIB,
    NAMESPACE,
    NODE_BYTES,
    SIZE_BYTES,
    DiskNode,
    config,
    payload_of,
)
from mounts import error_in, ext4, needs_mounts
from redis_servers import wait_until
from stores import NodeThread, node_stats

from kvstore import Client
from kvstore.core.disk.base import DISK_PAGE
from kvstore.errors import PeerError, UsageError
from kvstore.node import Node, NodeConfig
from kvstore.node.config import DiskConfig
from kvstore.node.control.local_session import LocalSessions
from kvstore.node.disk import disks
from kvstore.types import Kind

COUNT = 60
"""Blocks that are saved: about twice what the memory holds."""


def found(node, keys=KEYS[:COUNT]):
    """The keys that a disk has, each with the right bytes."""
    there = {key: node.read(key) for key in keys}
    right = {key for key, raw in there.items() if raw is not None}
    assert all(there[key] == payload_of(key) for key in right)
    return right


def test_what_is_evicted_is_on_a_disk_and_there_again_after_a_restart(tmp_path):
    with DiskNode(config(tmp_path)) as node:
        node.fill(KEYS[:COUNT])
        stats = node.stats()
        assert stats["evicted"] > COUNT // 3
        assert stats["disk_skipped_late"] == 0
        before = found(node)
        assert len(before) >= stats["evicted"]
    with DiskNode(config(tmp_path)) as node:
        assert node.stats()["blocks"] == 0
        # The writer may have been at it when the node ended.
        assert found(node) >= before
        assert node.stats()["disk_adopted"] == len(found(node))


def test_several_disks_share_the_blocks_and_any_of_them_is_found_at_its_place(tmp_path):
    with DiskNode(config(tmp_path, disks=3)) as node:
        node.fill(KEYS[:COUNT])
        before = found(node)
        used = {node.on_disk(key).place.device for key in before}
        assert used == {0, 1, 2}
    turned = config(tmp_path, disks=3)
    turned = type(turned)(**{**fields(turned), "disks": turned.disks[::-1]})
    with DiskNode(turned) as node:
        assert found(node) >= before


def fields(config):
    return {name: getattr(config, name) for name in NodeConfig.__dataclass_fields__}


@pytest.mark.parametrize("how", ["drop", "clear", "reset", "replace"])
def test_what_was_dropped_is_not_there_after_a_restart(tmp_path, how):
    kind = Kind.BYTES if how == "replace" else Kind.BLOCK
    with DiskNode(config(tmp_path)) as node:
        for key in KEYS[:COUNT]:
            node.save(key, kind=kind)
            node.settle()
        on_disk = sorted(found(node) - set(node.node.core.blocks.by_key))
        key = on_disk[0]
        if how == "drop":
            assert node.drop(key) == [True]
        elif how == "clear":
            node.clear()
        elif how == "reset":
            node.reset(1 << 30, NAMESPACE.id)
        else:
            node.save(key, version=1, kind=kind)
        assert node.on_disk(key) is None
        left = found(node) if how in ("drop", "replace") else set()
        assert key not in left
    with DiskNode(config(tmp_path)) as node:
        assert node.on_disk(key) is None
        assert found(node) >= left
        assert left or not found(node)


def test_what_is_saved_after_a_reset_is_there_after_a_restart(tmp_path):
    with DiskNode(config(tmp_path)) as node:
        node.fill(KEYS[:COUNT])
        node.reset(1 << 30)
        node.fill(KEYS[100 : 100 + COUNT])
        before = found(node, KEYS)
        assert before
        assert before <= set(KEYS[100 : 100 + COUNT])
    for _ in range(2):
        with DiskNode(config(tmp_path)) as node:
            assert before <= found(node, KEYS) <= set(KEYS[100 : 100 + COUNT])


def test_a_second_use_brings_a_block_back_into_memory(tmp_path):
    with DiskNode(config(tmp_path)) as node:
        node.fill(KEYS[:COUNT])
        key = next(key for key in KEYS if key not in node.node.core.blocks.by_key)
        node.touch(key)
        node.touch(key)
        wait_until(lambda: key in node.node.core.blocks.by_key, "the block", 5)
        wait_until(lambda: node.stats()["disk_promoted"] == 1, "its count", 5)
        slot = node.node.core.blocks.by_key[key]
        raw = bytes(node.shm.payload[slot.offset : slot.offset + slot.length])
        assert raw == payload_of(key)


class BrokenFile:
    """A device's file, some of whose calls fail."""

    def __init__(self, file):
        self._file = file
        self.fail = set()

    def __getattr__(self, name):
        if name in self.fail:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return getattr(self._file, name)


@pytest.fixture
def files(monkeypatch):
    """The files that nodes open from here on, in their order."""
    opened = []
    real = disks.open_file

    def open_file(*args, **options):
        opened.append(BrokenFile(real(*args, **options)))
        return opened[-1]

    monkeypatch.setattr(disks, "open_file", open_file)
    return opened


def test_a_delete_that_cannot_be_made_durable_says_so_and_its_block_stays_away(
    tmp_path, files, caplog
):
    with DiskNode(config(tmp_path)) as node:
        node.fill(KEYS[:COUNT])
        key = sorted(found(node))[0]
        files[0].fail = {"sync"}
        with pytest.raises(PeerError, match="not confirmed"):
            node.drop(key)
        wait_until(lambda: node.stats()["disk_closed"] == 1, "it is told", 5)
        assert node.stats()["disk_devices"] == 0
        assert node.on_disk(key) is None
        assert node.drop(KEYS[399]) == [False]
    with DiskNode(config(tmp_path)) as node:
        assert "closed for good" in caplog.text
        assert node.stats()["disk_devices"] == 0
        assert found(node) == set()


def test_with_another_disk_a_delete_is_confirmed_once_the_broken_one_is_closed(tmp_path, files):
    with DiskNode(config(tmp_path, disks=2)) as node:
        node.fill(KEYS[:COUNT])
        one, other = sorted(found(node))[:2]
        files[0].fail = {"sync"}
        with pytest.raises(PeerError, match="not confirmed"):
            node.drop(one)
        assert node.drop(other) == [True]
    with DiskNode(config(tmp_path, disks=2)) as node:
        assert node.stats()["disk_devices"] == 1
        assert not found(node) & {one, other}


def test_a_disk_that_was_closed_for_good_and_cannot_be_written_is_remembered(tmp_path, files):
    with DiskNode(config(tmp_path)) as node:
        node.fill(KEYS[:COUNT])
        key = sorted(found(node))[0]
        files[0].fail = {"sync", "write"}
        with pytest.raises(PeerError, match="not confirmed"):
            node.drop(key)
    for _ in range(2):
        with DiskNode(config(tmp_path)) as node:
            assert node.stats()["disk_devices"] == 0
            assert node.on_disk(key) is None


def test_a_disk_that_cannot_be_written_costs_misses_and_nothing_else(tmp_path, files, caplog):
    with DiskNode(config(tmp_path)) as node:
        files[0].fail = {"write"}
        node.save(*KEYS[:COUNT])
        wait_until(lambda: node.stats()["disk_devices"] == 0, "the device is left alone", 10)
        assert node.stats()["disk_closed"] == 1
        node.save(*KEYS[100:110])
        assert node.stats()["disk_skipped_no_device"] > 0
        assert "is left alone" in caplog.text
        assert found(node) == set()


@pytest.mark.parametrize(
    ("how", "devices"), [("in one part", 1), ("with good ones between", 1), ("in a row", 0)]
)
def test_a_disk_is_left_alone_for_reads_that_fail_in_three_parts_in_a_row(
    tmp_path, files, how, devices
):
    """Nothing is written between: a disk has bad places, and may be read for a long time."""
    with DiskNode(config(tmp_path, disk_write="through")) as node:
        for i in range(0, 96, 8):
            node.save(*KEYS[i : i + 8])
            wait_until(lambda: node.stats()["disk_blocks"] == i + 8, "they are written", 10)  # noqa: B023
        memory = node.node.core.blocks.by_key
        there = [node.on_disk(key) for key in KEYS[:96] if key not in memory]
        parts: dict[int, list] = {}
        for block in there:
            parts.setdefault(block.place.lap, []).append(block)
        first, *others = parts.values()
        bad = first[:3] if how == "in one part" else [first[0], *(part[0] for part in others[:2])]
        good = [block for block in there if block not in bad]
        for block in bad:
            if how == "with good ones between":
                promote(node, good.pop(), "disk_promoted")
            files[0].fail = {"read"}
            promote(node, block, "disk_damaged")
            files[0].fail = set()
        promote(node, good.pop(), "disk_promoted" if devices else "disk_closed")
        assert node.stats()["disk_devices"] == devices


def promote(node, block, until):
    """Have a block read back, until that is counted."""
    before = node.stats()[until]
    node.touch(block.key, block.key)
    is_told = until == "disk_closed" and before
    wait_until(lambda: is_told or node.stats()[until] > before, until, 10)


def test_one_region_that_cannot_be_begun_is_passed_over(tmp_path, files):
    with DiskNode(config(tmp_path)) as node:
        real, bad = files[0]._file.write, []
        first = node.node._disks.devices[0].geometry.start(0) * DISK_PAGE

        def write(offset, parts):
            if offset >= first and not bad:
                bad.append(offset)
            if offset in bad:
                raise OSError(errno.EIO, "bad")
            real(offset, parts)

        files[0].write = write
        node.fill(KEYS[:COUNT])
        assert found(node)
        assert node.stats()["disk_devices"] == 1


def test_two_nodes_do_not_use_one_disk(tmp_path):
    with DiskNode(config(tmp_path)), pytest.raises(UsageError, match="one node a disk"):
        Node(config(tmp_path, name="other"), DiskNode(config(tmp_path)).node.index).start()


def test_a_node_without_disks_tells_nothing_of_them(tmp_path):
    from kvstore.index.memory import MemoryIndex

    with Node(NodeConfig(run_dir=tmp_path, size_bytes=4 << 20), MemoryIndex()) as node:
        assert not any(name.startswith("disk") for name in node.stats())
        assert node.announcement.disks == {}


def test_the_table_is_part_of_the_size(tmp_path):
    with DiskNode(config(tmp_path)) as node:
        word = node.node.announcement
        table_bytes = node.node._disks.table.path.stat().st_size
        assert word.size_bytes + table_bytes <= config(tmp_path).size_bytes
        assert node.node._disks.table.path.exists()
    assert not node.node._disks.table.path.exists()
    with pytest.raises(UsageError, match="size_bytes"):
        config(tmp_path, size_bytes=64 << 10)


def test_blocks_with_a_bounded_life_and_small_ones_stay_in_memory(tmp_path):
    with DiskNode(config(tmp_path, disk_write="through")) as node:
        node.save(KEYS[0], size=8 << 10)
        node.save(KEYS[1])
        wait_until(lambda: node.on_disk(KEYS[1]) is not None, "the larger one", 5)
        assert node.on_disk(KEYS[0]) is None


def test_what_rots_on_a_disk_is_never_given_out_and_gone_once_it_was_seen(tmp_path):
    with DiskNode(config(tmp_path)) as node:
        node.fill(KEYS[:COUNT])
        key = next(key for key in KEYS if key not in node.node.core.blocks.by_key)
        place = node.on_disk(key).place
        with (tmp_path / "disk0" / "kvstore.disk").open("r+b", buffering=0) as file:
            file.seek(place.page * DISK_PAGE + 5000)
            file.write(b"rot")
        for _ in range(2):
            node.touch(key)
        wait_until(lambda: node.stats()["disk_damaged"] == 1, "it is seen", 5)
        assert node.on_disk(key) is None
        assert key not in node.node.core.blocks.by_key


def test_a_client_hears_that_a_delete_is_not_confirmed(tmp_path, redis_server, files):
    where = tmp_path / "disk"
    where.mkdir()
    options = {"disks": [DiskConfig(where, DISK_BYTES)], "disk_write": "through"}
    with (
        NodeThread(redis_server, size_bytes=NODE_BYTES, **options) as node,
        Client(**node.client_options) as client,
    ):
        assert client.put("k", payload_of(KEYS[0]))
        wait_until(lambda: node_stats(client)["disk_blocks"] == 1, "it is on the disk", 10)
        files[0].fail = {"sync"}
        with pytest.raises(PeerError, match="not confirmed"):
            client.delete("k")
        assert client.get("k") is None


def test_a_disk_that_hangs_costs_misses_and_nobody_waits_for_it(tmp_path, files, monkeypatch):
    monkeypatch.setattr(disks, "STOP_TIMEOUT_S", 0.2)
    goes_on = threading.Event()
    with DiskNode(config(tmp_path)) as node:
        real = files[0]._file.write

        def write(offset, parts):
            goes_on.wait(30)
            real(offset, parts)

        files[0].write = write
        began = time.monotonic()
        node.save(*KEYS[:COUNT])
        assert node.stats()["disk_skipped_late"] > 0
        assert time.monotonic() - began < 10
        began = time.monotonic()
    assert time.monotonic() - began < 10
    goes_on.set()


@pytest.mark.parametrize("call", ["write", "read"])
def test_a_disk_that_hangs_keeps_no_other_from_its_work(tmp_path, files, monkeypatch, call):
    how = config(tmp_path, disks=2, disk_write="through")
    with DiskNode(how) as node:
        node.save(*KEYS[:16])
        wait_until(lambda: node.stats()["disk_blocks"] == 16, "they are written", 10)
        device_of = {key: node.on_disk(key).place.device for key in KEYS[:16]}
        assert set(device_of.values()) == {0, 1}
    monkeypatch.setattr(disks, "STOP_TIMEOUT_S", 0.2)
    goes_on, hangs = threading.Event(), threading.Event()
    with DiskNode(how) as node:
        real = getattr(files[2]._file, call)

        def stalled(*what):
            hangs.set()
            goes_on.wait(60)
            return real(*what)

        setattr(files[2], call, stalled)
        if call == "read":
            node.touch(*[key for key, device in device_of.items() if device == 0] * 2)
        else:
            node.save(*KEYS[100:116])
        assert hangs.wait(10)
        before = node.stats()["disk_blocks"]
        for i in range(200, 400, 2):  # no faster than memory evicts them
            node.save(*KEYS[i : i + 2])
            time.sleep(0.1)
            if node.stats()["disk_blocks"] >= before + 5:
                break
        assert node.stats()["disk_blocks"] >= before + 5, "the other writes"
        other = next(key for key, device in device_of.items() if device == 1)
        node.touch(other, other)
        wait_until(lambda: node.stats()["disk_promoted"] == 1, "the other is read", 10)
    goes_on.set()


def test_a_block_that_is_evicted_while_it_is_written_is_a_miss_and_no_damage(tmp_path, files):
    """Its slot has another block's bytes by then, and those are on the disk."""
    with DiskNode(config(tmp_path)) as node:
        real, first = files[0]._file.write, node.node._disks.devices[0].geometry.first_page(0)
        other, evicted = copy(node), []
        other.session = LocalSessions(node.node._loop, node.node.sessions, node.node.act).open()

        def write(offset, parts):
            if offset >= first * DISK_PAGE and not evicted:
                evicted.append(offset)
                other.save(*KEYS[100 : 100 + COUNT])
            real(offset, parts)

        files[0].write = write
        node.save(*KEYS[:COUNT])
        wait_until(lambda: node.stats()["disk_written_bytes"] > 4 * SIZE_BYTES, "writes", 10)
        node.settle()
        assert evicted
        other.session.close()
        entered = {key for key in KEYS if node.on_disk(key) is not None}
        assert entered == found(node, KEYS) != set()
    with DiskNode(config(tmp_path)) as node:
        there = {key for key in KEYS if node.on_disk(key) is not None}
        assert there == found(node, KEYS)
        assert node.stats()["disk_adopted"] == len(there) >= len(entered)


def test_what_is_deleted_while_its_disk_is_smaller_is_not_back_when_it_is_larger(tmp_path):
    """The region that the smaller size cuts has its header, and part of its blocks, still."""
    large = config(tmp_path)
    (disk,) = large.disks
    small = replace(large, disks=[disk._replace(size_bytes=DISK_BYTES - MIB)])
    with DiskNode(large) as node:
        node.fill(KEYS[:270])
        shape = node.node._disks.devices[0].geometry
        last = shape.first_page(shape.regions - 1)
        cut = [key for key in sorted(found(node, KEYS)) if node.on_disk(key).place.page >= last]
    assert len(cut) > 5
    for _ in range(2):
        with DiskNode(small) as node:
            assert node.node._disks.devices[0].geometry.regions == shape.regions - 1
            assert not found(node, cut)
            node.drop(*cut)
    for _ in range(2):
        with DiskNode(large) as node:
            assert node.stats()["disk_adopted"] > 100
            assert [key for key in cut if node.on_disk(key) is not None] == []


@pytest.mark.parametrize("how", ["removed", "replaced", "cut"])
def test_a_node_says_that_its_disk_file_is_gone_and_leaves_it_alone(tmp_path, caplog, how):
    """Without a write that fails: nobody would find there what it writes on."""
    path = tmp_path / "disk0" / "kvstore.disk"
    with DiskNode(config(tmp_path)) as node:
        node.fill(KEYS[:COUNT])
        if how == "cut":
            os.truncate(path, MIB)
        else:
            path.unlink()
        if how == "replaced":
            path.write_bytes(bytes(DISK_BYTES))
        wait_until(lambda: node.stats()["disk_devices"] == 0, "it is noticed", 10)
        wait_until(lambda: f"was {how}" in caplog.text or "removed or replaced" in caplog.text, how)
        node.save(*KEYS[100:110])


@needs_mounts
def test_a_file_system_that_becomes_read_only_costs_the_disk_and_is_told(tmp_path, caplog):
    """For good: what its log cannot say any more would be back."""
    with ext4(tmp_path, 64 * MIB, "errors=remount-ro") as where:
        on_it = replace(config(tmp_path), disks=[DiskConfig(where, DISK_BYTES)])
        with DiskNode(on_it) as node:
            node.fill(KEYS[:COUNT])
            there = found(node)
            error_in(where).write_text("1")
            with pytest.raises(PeerError, match="not confirmed"):
                node.drop(*there)
            wait_until(lambda: node.stats()["disk_devices"] == 0, "it is left alone", 10)
            assert "is closed for good: [Errno 30] Read-only file system" in caplog.text
            node.save(*KEYS[100 : 100 + COUNT])
            assert node.stats()["blocks"] > 0
        with DiskNode(on_it) as node:
            assert node.stats()["disk_closed"] == 1
            assert not node.stats()["disk_blocks"]
