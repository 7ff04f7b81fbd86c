"""The contract suite over blocks on a disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from contract.transport import Place, TransportContract
from disks import PlainDisk

from kvstore.record import disk_location
from kvstore.segment.copying import copy
from kvstore.segment.disk.attached import DiskFile
from kvstore.segment.disk.table import AttachedTable, DiskTable
from kvstore.transport.disk import DiskTransport
from kvstore.types import Key, Kind, Location


class Attached:
    """Implements `kvstore.transport.disk.Disks`."""

    def __init__(self, table: DiskTable, disk: PlainDisk, owner: int, node: tuple[int, int]):
        self.find = AttachedTable(table.path, *node).find
        self.files = {disk.number: DiskFile(str(disk.path), disk.uuid.hex(), owner)}


class Saved(Place):
    """Saves to the second disk of a node."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "run", lambda _: DiskTransport(self._disks, copy))
        node = self.word.node_id, self.word.epoch
        self.table = DiskTable(folder / "t.table", *node, 1000)
        self.disk = PlainDisk(folder / "kvstore.disk", 1, self.table, 64 << 20)
        self._attached = Attached(self.table, self.disk, folder.stat().st_uid, node)
        self.writer.close()
        self.writer = self  # type: ignore[assignment]

    def _disks(self, word: object) -> Attached | None:
        there = self.nodes.segment(self.word.node_id, self.word.epoch, 0.0)
        return None if there is None else self._attached

    def save(
        self, payload: bytes, key: Key | None = None, kind: Kind = Kind.BLOCK, meta: int = 0
    ) -> tuple[Key, Location]:
        block = self.disk.save(payload, key, kind, meta)
        return block.key, disk_location(self.word.node_id, self.word.epoch, block)

    def drop(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.disk.drop(key)

    def close(self) -> None:
        self.transport.close()
        self.nodes.close()
        self.node.stop()
        self.table.close()


class TestDisk(TransportContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[Place]:
        place = Saved(tmp_path)
        yield place
        place.close()
