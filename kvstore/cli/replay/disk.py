"""Does for a replay what the thread of a node's disks does, at once: what the core asks for is
written to an empty device, and read back from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from kvstore.core.answers import Answer, Begin, Grant, PutAnswer, SpillBlock, SpillPlan
from kvstore.core.disk.base import DISK_PAGE
from kvstore.core.disk.tier import DiskTier
from kvstore.core.events import (
    Begun,
    DiskAdopted,
    DiskFound,
    DiskRequest,
    Promoted,
    Reserve,
    Spill,
    Spilled,
    Vacate,
)
from kvstore.core.node import NodeCore
from kvstore.segment.disk.table import DiskTable
from kvstore.types import DiskBlock, Key

SPILL_BYTES = 16 << 20
REGIONS_WANTED, REGION_BYTES_MIN, REGION_BYTES_MAX = 16, 1 << 20, 256 << 20
"""A device is cut into so many regions, of a size between these, as by a node."""
CHECKSUM = 1
"""Stands for that of every payload: there are none."""


class ReplayedDisk:
    """One device of a core."""

    def __init__(
        self, core: NodeCore, size_bytes: int, table: DiskTable, writes_per_day: float
    ) -> None:
        self._core = core
        self._tier = DiskTier(table, [0], bytes_per_day=int(size_bytes * writes_per_day))
        core.use_disks(self._tier)
        wanted = 1 << max(size_bytes // REGIONS_WANTED, 1).bit_length() - 1
        pages = min(max(wanted, REGION_BYTES_MIN), REGION_BYTES_MAX) // DISK_PAGE
        regions = size_bytes // (pages * DISK_PAGE)
        self._regions: list[list[DiskBlock]] = [[] for _ in range(regions)]
        self._pages = pages
        firsts = range(0, regions * pages, pages)
        self._ask(DiskFound(0, 0, 0, bytes(16), firsts, pages, pages, [0] * regions, 1), 0.0)
        self._ask(DiskAdopted(0, 0, 0, (), last=True), 0.0)

    def holds(self, key: Key) -> bool:
        return self._tier.there(key) is not None

    @property
    def written_bytes(self) -> int:
        return self._tier.counts["written_bytes"]

    @property
    def again_bytes(self) -> int:
        """Of them, those of blocks that were on the disk since they were saved."""
        return self._tier.counts["again_bytes"]

    def work(self, now: float) -> None:
        """Do all that is to be done."""
        while True:
            plan = cast("SpillPlan", self._ask(Spill(0, 0, SPILL_BYTES), now))
            self.write(plan.blocks, now)
            if plan.begin is not None:
                self._begin(plan.begin, now)
            if plan.promote:
                self._promote(plan, now)
            if not plan.blocks and not plan.promote and plan.begin is None:
                return

    def _ask(self, event: DiskRequest, now: float) -> Answer:
        return self._core.handle(event, now).replies[0].body

    def write(self, asked: Sequence[SpillBlock], now: float) -> None:
        written = [one.block._replace(checksum=CHECKSUM) for one in asked]
        for block in written:
            self._regions[block.place.page // self._pages].append(block)
        if asked:
            self._ask(Spilled(0, 0, asked, written), now)

    def _begin(self, begin: Begin, now: float) -> None:
        former, self._regions[begin.region] = self._regions[begin.region], []
        again = cast("list[SpillBlock]", self._ask(Vacate(0, 0, begin, former), now))
        self._ask(Begun(0, 0, begin), now)
        self.write(again, now)

    def _promote(self, plan: SpillPlan, now: float) -> None:
        for block in plan.promote:
            room = Reserve(0, 0, [block.key], [block.length], block.namespace_id,
                           [block.kind], [block.meta_length], [None], [0])  # fmt: skip
            answers = cast("list[PutAnswer]", self._core.handle(room, now).replies[0].body)
            grant = answers[0]
            if isinstance(grant, Grant):
                item = (grant.slot_id, grant.generation, CHECKSUM)
                self._core.handle(Promoted(0, 0, [item], plan.clears), now)


@contextmanager
def disk_of(
    core: NodeCore, size_bytes: int, blocks: int, writes_per_day: float
) -> Iterator[ReplayedDisk]:
    """A context with a disk of that size, for so many blocks, of which so many times its size is
    written in a day; 0: as much as there is to write."""
    with TemporaryDirectory(prefix="kvreplay-") as folder:
        table = DiskTable(Path(folder) / "table", 1, 1, blocks)
        yield ReplayedDisk(core, size_bytes, table, writes_per_day)
