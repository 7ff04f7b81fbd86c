"""Nodes of this host as files and locks, and an index that may be away, to test `NodeDirectory`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stores import announcement

from kvstore.client.nodes.directory import NodeDirectory
from kvstore.errors import IndexUnavailableError
from kvstore.index.memory import MemoryIndex
from kvstore.machine import REAL
from kvstore.nodedir import Announcement, NodeDir
from kvstore.segment.header import Superblock
from kvstore.segment.shm import OwnedShm
from kvstore.system.filelock import FileLock, try_lock

OURS = "redis://ours"


class Index(MemoryIndex):
    away = False

    def identity(self) -> str:
        return OURS

    def node(self, node_id: int) -> bytes | None:
        if self.away:
            raise IndexUnavailableError("away")
        return super().node(node_id)


class Spied:
    """The machine; sweeps are counted, and locks and directories may be others."""

    def __init__(self) -> None:
        self.sweeps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(REAL, name)

    def sweep(self, run_dir: Path) -> list[str]:
        self.sweeps += 1
        return []


class Node:
    """The directory, the segment and the lock of a node."""

    def __init__(self, run_dir: Path, node_id: int, **changes: Any) -> None:
        self.directory = NodeDir(run_dir, f"n{node_id}")
        self.directory.path.mkdir(parents=True)
        self._lock: FileLock | None = try_lock(self.directory.lock)
        self.segment = OwnedShm(run_dir / f"s{node_id}", Superblock(node_id, 1, 0, 128 << 10))
        self.say(
            node_id=node_id,
            data_path=str(self.segment.data_path),
            head_path=str(self.segment.head_path),
            **changes,
        )

    def say(self, **changes: Any) -> None:
        self.word: Announcement = announcement(name=self.directory.name, **changes)
        self.directory.announce(self.word)

    def restart(self) -> None:
        self.word = dataclasses.replace(self.word, epoch=self.word.epoch + 1)
        self.directory.announce(self.word)

    def die(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def close(self) -> None:
        self.die()
        self.segment.close()


NodeOf = Callable[..., Node]


def ids(attached: Any) -> list[int]:
    return [one.announcement.node_id for one in attached]


def free_for_others(nodes: NodeDirectory) -> bool:
    """Whether another thread can have the lock."""

    def taken() -> bool:
        got = nodes._lock.acquire(blocking=False)
        if got:
            nodes._lock.release()
        return got

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(taken).result()
