"""A node with disks in a process of its own, and stories of what is done to it, whose end finds
right bytes or misses."""

from __future__ import annotations

import random
import shutil
import threading
from pathlib import Path

from redis_servers import RedisServer, wait_until
from stores import MIB, NodeProcess, node_stats

from kvstore import Client
from kvstore.errors import KVStoreError
from kvstore.nodedir import TABLE

SIZE_BYTES = 64 << 10
NODE_BYTES = 4 * MIB
SOON_S = 20.0


class DiskNode(NodeProcess):
    """A node with a small memory and a disk."""

    def __init__(
        self,
        redis: RedisServer,
        disk: Path,
        *options: str,
        size: int = NODE_BYTES,
        disk_size: int = 32 * MIB,
    ) -> None:
        self.disk = disk
        disk.mkdir(exist_ok=True)
        where = ("--disk", str(disk), "--disk-size", str(disk_size), "--disk-force", *options)
        super().__init__(redis, size=size, options=where)

    def lose_memory(self) -> None:
        """Do to a dead node what a reboot does: /dev/shm, the run directory and Redis are empty."""
        for path in self.segment_files():
            path.unlink(missing_ok=True)
            path.with_suffix(TABLE).unlink(missing_ok=True)
        shutil.rmtree(self.run_dir / "nodes", ignore_errors=True)
        self.redis.admin().flushall()


def value_of(name: str, version: int = 0) -> bytes:
    return random.Random(f"{name} {version}").randbytes(SIZE_BYTES)


def filled(client: Client, names: list[str]) -> None:
    """Save values, no faster than they are written."""
    for count, name in enumerate(names):
        assert client.put(name, value_of(name))
        if count % 8 == 0:
            wait_until(lambda: written(client) >= count, f"{name} is on the disk")  # noqa: B023
    wait_until(lambda: written(client) == len(names), "all are on the disk")


def written(client: Client) -> int:
    return int(node_stats(client)["disk_blocks"])


class Story:
    """Saves, reads, replaces and drops at random, while the node is killed at random moments."""

    def __init__(self, node: DiskNode, seed: int) -> None:
        self.node, self.seed = node, seed
        self.rng = random.Random(seed)
        self.right: dict[str, set[bytes]] = {}
        """What may be found under each name; a miss always may."""
        self.version = 0
        self.names = [f"n{i}" for i in range(2 * NODE_BYTES // SIZE_BYTES)]
        self.hits = 0

    def life(self) -> None:
        """Let a node live for a while, and kill it."""
        killer = threading.Timer(self.rng.uniform(0.1, 1.0), self.node.process.kill)
        with Client(**self.node.client_options) as client:
            killer.start()
            while self.node.process.poll() is None:
                self.act(client)
        killer.join()
        self.node.kill()
        if self.rng.random() < 0.6:
            self.node.lose_memory()
        self.node.start()
        self.look_at_all()

    def act(self, client: Client) -> None:
        self.rng.choice([*[self.put] * 6, *[self.get] * 5, self.delete, self.clear])(client)

    def look_at_all(self) -> None:
        with Client(**self.node.client_options) as client:
            for name in self.names:
                self.look(client, name)

    def look(self, client: Client, name: str) -> None:
        found = client.get(name)
        if found is not None:
            self.hits += 1
            assert found in self.right.get(name, ()), f"{name}, seed {self.seed}"

    def get(self, client: Client) -> None:
        self.look(client, self.rng.choice(self.names))

    def put(self, client: Client) -> None:
        name = self.rng.choice(self.names)
        self.version += 1
        value = value_of(name, self.version)
        self.right.setdefault(name, set()).add(value)
        try:
            if client.put(name, value, replace=True):
                self.right[name] = {value}
        except KVStoreError:
            pass

    def delete(self, client: Client) -> None:
        name = self.rng.choice(self.names)
        try:
            client.delete(name)
            self.right.pop(name, None)
        except KVStoreError:
            pass

    def clear(self, client: Client) -> None:
        if self.rng.random() < 0.9:
            return
        try:
            if client.clear(timeout_s=2.0):
                self.right.clear()
        except KVStoreError:
            pass


def lives(node: DiskNode, seed: int, count: int) -> Story:
    story = Story(node, seed)
    for _ in range(count):
        story.life()
    assert story.hits > count
    return story
