"""A disk of a node and its table, written as plainly as can be: for tests of who reads them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from stores import NodeThread

from kvstore.core.disk.base import DISK_PAGE
from kvstore.nodedir import TABLE
from kvstore.record import disk_location
from kvstore.segment.disk.attached import announced
from kvstore.segment.disk.format import DiskSuperblock, pack_superblock
from kvstore.segment.disk.table import DiskTable
from kvstore.types import DiskBlock, DiskPlace, Key, Kind, Location

if TYPE_CHECKING:
    from redis_servers import RedisServer

REGION_BYTES = 1 << 20


def pages_of(size_bytes: int) -> int:
    return -(-size_bytes // DISK_PAGE)


class PlainDisk:
    """A device of a node: blocks are written one behind the other, or where others have gone."""

    def __init__(self, path: Path, number: int, table: DiskTable, size_bytes: int) -> None:
        self.path, self.number, self.table = path, number, table
        self.uuid = os.urandom(16)
        self._next = 2
        self._free: list[tuple[int, int]] = []
        self._lap = 0
        with path.open("wb") as file:
            file.truncate(size_bytes)
        self.write(0, pack_superblock(DiskSuperblock(self.uuid, 1, REGION_BYTES, 0, 1, 0, 0)) * 2)

    def write(self, page: int, raw: bytes) -> None:
        """Through to the disk, as a node does."""
        with self.path.open("r+b", buffering=0) as file:
            file.seek(page * DISK_PAGE)
            file.write(raw)
            os.fdatasync(file.fileno())

    def save(
        self, payload: bytes, key: Key | None = None, kind: Kind = Kind.BLOCK, meta: int = 0
    ) -> DiskBlock:
        """Write a payload, then its entry in the table."""
        pages = pages_of(len(payload))
        fits = [one for one in self._free if one[1] == pages]
        if fits:
            self._free.remove(fits[0])
            page = fits[0][0]
        else:
            page, self._next = self._next, self._next + pages
        self._lap += 1
        place = DiskPlace(self.number, page, self._lap)
        self.write(page, payload)
        checksum = xxhash.xxh3_64_intdigest(payload)
        key = key or os.urandom(32)
        block = DiskBlock(key, place, len(payload), int(kind), meta, checksum, 7)
        self.table.put(block)
        return block

    def drop(self, key: Key) -> None:
        """Take it out of the table; what is written next goes where it was."""
        block = self.table.get(key)
        assert block is not None
        self.table.remove(key)
        self._free.insert(0, (block.place.page, pages_of(block.length)))


class DiskNode(NodeThread):
    """A node in a thread of this process that announces disks, whose blocks the test writes."""

    def __init__(self, redis: RedisServer, folder: Path, disks: int = 2, **settings: Any) -> None:
        super().__init__(redis, **settings)
        word = self.node.announcement
        assert word is not None
        self.name, self.start = word.name, (word.node_id, word.epoch)
        self.table = DiskTable(Path(word.data_path).with_suffix(TABLE), *self.start, 1000)
        self.disks = [
            PlainDisk(folder / f"{number}.disk", number, self.table, 64 << 20)
            for number in range(disks)
        ]
        said = announced({disk.number: (disk.uuid, str(disk.path)) for disk in self.disks})
        self.node.dir.announce(replace(word, disks=said))

    def location(self, key: Key) -> Location:
        block = self.table.get(key)
        assert block is not None
        return disk_location(*self.start, block)

    def stop(self) -> None:
        super().stop()
        self.table.path.unlink(missing_ok=True)
