"""A node with disks in this process, and a client of it that speaks to its loop directly."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from redis_servers import wait_until

from kvstore.core.answers import Grant
from kvstore.core.events import Clear, Commit, Drop, Request, Reserve, Reset, Stat, Touch
from kvstore.index.memory import MemoryIndex
from kvstore.keys import Namespace
from kvstore.node import Node, NodeConfig
from kvstore.node.config import DiskConfig
from kvstore.node.control.local_session import LocalSessions
from kvstore.segment.attached import AttachedShm
from kvstore.types import DiskBlock, Key, Kind

KIB, MIB = 1 << 10, 1 << 20
SIZE_BYTES = 64 * KIB
DISK_BYTES = 16 * MIB
NODE_BYTES = 2 * MIB
NAMESPACE = Namespace.named("test")
KEYS = NAMESPACE.block_keys(range(400), 1)


def payload_of(key: Key, size_bytes: int = SIZE_BYTES, version: int = 0) -> bytes:
    """Return what is saved under a key."""
    return random.Random(key + bytes([version])).randbytes(size_bytes)


def config(tmp_path: Path, disks: int = 1, **options: Any) -> NodeConfig:
    """Return the configuration of a node with its own disks."""
    shm = tmp_path / "shm"
    shm.mkdir(exist_ok=True)
    named = [tmp_path / f"disk{i}" for i in range(disks)]
    for directory in named:
        directory.mkdir(exist_ok=True)
    how = {"size_bytes": NODE_BYTES, "disk_write": "eviction", **options}
    configured = [DiskConfig(directory, DISK_BYTES) for directory in named]
    how = {"disk_forced": True, **how}  # wherever the tests' files lie
    return NodeConfig(run_dir=tmp_path / "run", shm_dir=shm, disks=configured, **how)


class DiskNode:
    """`with DiskNode(config) as node`: a node that serves."""

    def __init__(self, config: NodeConfig, index: MemoryIndex | None = None) -> None:
        self.node = Node(config, index or MemoryIndex())

    def __enter__(self) -> DiskNode:
        self.node.start()
        node = self.node
        assert node.announcement is not None
        assert node._loop is not None
        word = node.announcement
        self.shm = AttachedShm(Path(word.data_path), Path(word.head_path), writable=True)
        self.session = LocalSessions(node._loop, node.sessions, node.act).open()
        wait_until(lambda: not self.stats()["disk_adopting"], "adoption", 10)
        return self

    def __exit__(self, *exc: object) -> None:
        self.session.close()
        self.node.stop()
        self.shm.close()

    def ask(self, what: Request) -> Any:
        return self.session.ask(what, time.monotonic() + 10)

    def stats(self) -> dict[str, int | float]:
        return self.ask(Stat(0, 0))

    def save(
        self, *keys: Key, version: int = 0, kind: Kind = Kind.BLOCK, size: int = SIZE_BYTES
    ) -> None:
        """Save one by one, each once the disk has what it evicts, as far as that goes."""
        for key in keys:
            described = ([kind], [0], [None], [0])
            (grant,) = self.ask(Reserve(0, 0, [key], [size], NAMESPACE.id, *described))
            assert isinstance(grant, Grant), grant
            payload = payload_of(key, size, version)
            self.shm.payload[grant.offset : grant.offset + size] = payload
            self.ask(Commit(0, 0, [(grant.slot_id, grant.generation, 0)]))

    def fill(self, keys: list[Key]) -> None:
        """Save more than memory has room for, so slowly that nothing is evicted unwritten."""
        for key in keys:
            self.save(key)
            self.settle()

    def settle(self) -> None:
        """Wait until what is the next to be evicted is on a disk."""
        core = self.node.core

        def is_done() -> bool:
            plan = list(core.blocks.allocator.coldest())[:2]
            return core.blocks.allocator.free_bytes > SIZE_BYTES or all(s.on_disk for s in plan)

        wait_until(is_done, "the writer", 10)

    def drop(self, *keys: Key) -> list[bool]:
        return self.ask(Drop(0, 0, keys))

    def clear(self) -> int:
        return self.ask(Clear(0, 0, NAMESPACE.id))

    def reset(self, number: int, *namespace_ids: int) -> None:
        self.ask(Reset(0, 0, number, namespace_ids))

    def touch(self, *keys: Key) -> None:
        self.node._loop.call_soon_threadsafe(self.node.act, Touch(0, keys))

    def on_disk(self, key: Key) -> DiskBlock | None:
        return self.node._disks.table.find(key)

    def read(self, key: Key) -> bytes | None:
        """Return what is on a disk under that key."""
        block = self.on_disk(key)
        if block is None:
            return None
        return self.node._disks.devices[block.place.device].read(block)
