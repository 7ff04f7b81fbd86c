"""A real node's disk is on a file system that loses power, fails and hangs (`LossyMount`): what is
found is right or a miss, and nothing that was dropped is back."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_stories import NODE_BYTES, SIZE_BYTES, DiskNode, Story, filled, value_of
from lossy_mount import LossyMount, Op, lossy_mount
from redis_servers import RedisServer, wait_until
from stores import MIB, node_stats

from kvstore import Client
from kvstore.errors import KVStoreError, PeerError

DISK_BYTES = 16 * MIB
NAMES = [f"k{i}" for i in range(2 * NODE_BYTES // SIZE_BYTES)]
KEPT, DROPPED, CHANGED = NAMES[:-9], NAMES[-9:-3], NAMES[-3:]
PAGES = range(DISK_BYTES)


class LossyStory(Story):
    """A story in which the power fails, often in the middle of a write."""

    def __init__(self, mount: LossyMount, node: DiskNode, seed: int) -> None:
        super().__init__(node, seed)
        self.mount = mount

    def life(self) -> None:
        rng, disk = self.rng, self.mount.disk
        self.mount.power_failed = self.node.process.kill
        disk.power_fails_in = rng.randrange(1500)
        until = time.monotonic() + rng.uniform(0.3, 1.5)
        with Client(**self.node.client_options) as client:
            while self.node.process.poll() is None and time.monotonic() < until:
                self.act(client)
        self.node.kill()
        self.mount.power_loss()
        self.node.lose_memory()
        self.node.start()
        wait_until(self.adopted, "adoption", 20)
        self.look_at_all()

    def adopted(self) -> bool:
        with Client(**self.node.client_options) as client:
            return not node_stats(client)["disk_adopting"]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[LossyMount]:
    with lossy_mount(tmp_path / "disk", DISK_BYTES, seed=1) as mount:
        yield mount


@pytest.fixture
def node(mount: LossyMount, redis_server: RedisServer) -> Iterator[DiskNode]:
    options = ("--disk-write", "through")
    with DiskNode(redis_server, mount.where, *options, disk_size=DISK_BYTES) as node:
        yield node


def lose_power(mount: LossyMount, node: DiskNode) -> None:
    node.kill()
    mount.power_loss()
    node.lose_memory()
    node.start()
    with Client(**node.client_options) as client:
        wait_until(lambda: not node_stats(client)["disk_adopting"], "adoption", 20)


def drop_some(client: Client) -> None:
    assert client.delete_many(DROPPED) == [True] * len(DROPPED)
    for name in CHANGED:
        assert client.put(name, value_of(name, 1), replace=True)


def test_after_a_power_loss_nothing_is_back_that_was_dropped(mount, node):
    with Client(**node.client_options) as client:
        filled(client, NAMES)
        drop_some(client)
    lose_power(mount, node)
    with Client(**node.client_options) as client:
        assert client.get_many(DROPPED) == [None] * len(DROPPED)
        for name in CHANGED:
            assert client.get(name) in (None, value_of(name, 1))
        # Their entries and bytes were synced with what was dropped.
        assert client.get_many(KEPT) == [value_of(name) for name in KEPT]


@pytest.mark.long
def test_a_drive_that_syncs_nothing_brings_it_back_and_so_would_a_node(mount, node):
    """Unless this is so the test above shows nothing."""
    with Client(**node.client_options) as client:
        filled(client, NAMES)
        assert client.delete(DROPPED[0])
        wait_until(lambda: mount.disk.syncs > 0, "a sync")
        mount.disk.skipped_syncs = 1 << 30
        assert client.delete_many(DROPPED[1:]) == [True] * len(DROPPED[1:])
        for name in DROPPED[1:]:
            assert client.get(name) is None
    mount.disk.pending.clear()
    mount.disk.skipped_syncs = 0
    lose_power(mount, node)
    with Client(**node.client_options) as client:
        assert client.get(DROPPED[0]) is None
        assert client.get_many(DROPPED[1:]) == [value_of(name) for name in DROPPED[1:]]


def stories(redis: RedisServer, where: Path, seed: int, lives: int) -> None:
    for mode in ("through", "eviction"):
        with (
            lossy_mount(where / f"{seed}-{mode}", DISK_BYTES, seed) as mount,
            DiskNode(redis, mount.where, "--disk-write", mode, disk_size=DISK_BYTES) as node,
        ):
            story = LossyStory(mount, node, seed)
            for _ in range(lives):
                story.life()
            assert story.hits > lives


@pytest.mark.long
@pytest.mark.timeout(300)
def test_whenever_the_power_fails_what_is_found_is_right_or_a_miss(redis_server, tmp_path):
    stories(redis_server, tmp_path, int(time.time()), lives=6)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_however_often_the_power_fails_what_is_found_is_right_or_a_miss(redis_server, tmp_path):
    for seed in range(20):
        stories(redis_server, tmp_path, seed, lives=25)


@pytest.mark.long
def test_reads_that_fail_cost_misses_and_later_reads_are_right(mount, node):
    right = [value_of(name) for name in NAMES]
    with Client(**node.client_options) as client:
        filled(client, NAMES)
        mount.disk.unreadable = PAGES
        began = time.monotonic()
        found = client.get_many(NAMES)
        assert time.monotonic() - began < 10
        assert set(found) <= {None, *right}
        assert None in found
        assert any(found), "memory goes on"
    mount.disk.unreadable = set()
    lose_power(mount, node)
    with Client(**node.client_options) as client:
        assert set(client.get_many(NAMES)) <= {None, *right}


@pytest.mark.long
def test_a_sync_that_fails_is_told_and_the_disk_is_closed_for_good(mount, node):
    with Client(**node.client_options) as client:
        filled(client, NAMES)
        mount.disk.failing_syncs = 1
        with pytest.raises(PeerError, match="not confirmed"):
            client.delete(NAMES[0])
        wait_until(lambda: node_stats(client)["disk_closed"] == 1, "it is closed", 10)
        assert client.put("later", value_of("later"))
        assert client.get("later") == value_of("later")
    lose_power(mount, node)
    with Client(**node.client_options) as client:
        assert node_stats(client)["disk_devices"] == 0
        assert client.get_many(NAMES) == [None] * len(NAMES)


def test_a_read_that_hangs_ends_at_its_deadline_and_writes_nowhere_when_it_goes_on(mount, node):
    with Client(**node.client_options) as client:
        filled(client, NAMES)
        cold = [name for name in NAMES if client.get(name) is not None][:8]
        mount.stalled = {Op.READ}
        out = bytearray(os.urandom(SIZE_BYTES))
        before = bytes(out)
        began = time.monotonic()
        found = client.get_many(cold)
        assert client.get(cold[0], out=out) is None
        assert time.monotonic() - began < 10
        assert set(found) <= {None, *map(value_of, cold)}
        wait_until(lambda: mount.waiting, "a read hangs")
        mount.go_on()
        wait_until(lambda: not mount.waiting, "it goes on")
        assert out == before
        assert client.put("later", value_of("later"))


@pytest.mark.long
def test_writes_that_fail_leave_the_disk_alone_and_memory_goes_on(mount, node):
    with Client(**node.client_options) as client:
        filled(client, NAMES[:8])
        mount.disk.failing_writes = 1 << 30

        def is_left_alone() -> bool:
            try:
                client.put(f"other {time.monotonic()}", value_of("other"))
            except KVStoreError:
                return False
            return node_stats(client)["disk_devices"] == 0

        wait_until(is_left_alone, "it is left alone", 20)
        assert client.put("later", value_of("later"))
        assert client.get("later") == value_of("later")


@pytest.mark.long
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_file_system_that_vanishes_costs_misses_and_nobody_ends_of_it(mount, node):
    lose_file_system(mount, node)
    gc.collect()  # closes the client's files
    node.process.terminate()
    assert node.process.wait(20) == 0


def lose_file_system(mount: LossyMount, node: DiskNode) -> None:
    with Client(**node.client_options) as client:
        filled(client, NAMES)
        cold = [name for name in NAMES if client.get(name) is not None][:8]
        mount.close()
        assert set(client.get_many(cold)) <= {None, *map(value_of, cold)}
        wait_until(lambda: node_stats(client)["disk_devices"] == 0, "the node leaves it alone", 10)
        assert client.put("later", value_of("later"))


@pytest.mark.long
def test_a_sync_that_hangs_is_told_and_other_keys_are_served(mount, node):
    with Client(**node.client_options) as client:
        filled(client, NAMES)
        mount.stalled = {Op.FSYNC}
        began = time.monotonic()
        with pytest.raises(KVStoreError):
            client.delete(NAMES[0])
        assert time.monotonic() - began < 11
        assert client.get(NAMES[0]) is None
        assert client.get(NAMES[-1]) == value_of(NAMES[-1])
        mount.go_on()
        assert client.delete(NAMES[1])
        assert client.get(NAMES[1]) is None
