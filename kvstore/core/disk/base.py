"""Defines the index of what lies on a node's disks, and what must never come back from them.

A node's writer thread (node/disk/) asks `Spill` (events.py): what is to be written, and which
region is to be begun for it. It copies each block out of its slot, makes sure that the slot still
has that generation, writes, and tells `Spilled`. Nothing is pinned for it: an eviction never waits
for a disk. Only what `Spilled` names is entered in the index, and only if nobody has dropped it
meanwhile.

Every place on a device has an order number (`order_of`) that grows with each block that is given
a place there. What must never come back is told with the number that was given out last: of a
deleted key, or of a cleared namespace, all that was written up to then is forbidden.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvstore.types import DiskBlock, DiskPlace, Key

DEVICES_MAX = 16
DISK_PAGE = 4096
EVERYTHING: tuple[int, ...] = ()
"""Namespaces of a `Forbid` that drops all blocks."""


def order_of(place: DiskPlace) -> int:
    """Return the number of a block in the order in which its device was written: an entry's
    `seq`."""
    return place.lap << 32 | place.page


def is_later(block: DiskBlock, there: DiskBlock) -> bool:
    """Return whether a block was put on the same device as another, after it."""
    same_device = block.place.device == there.place.device
    return same_device and order_of(block.place) > order_of(there.place)


class DiskIndex(Protocol):
    """What lies on the disks of a node, by key. The node alone changes it; readers of its host
    read it meanwhile (segment/disk/table.py). One block a key: the one that was put last."""

    @property
    def blocks(self) -> int:
        """How many blocks it holds."""
        ...

    @property
    def block_bytes(self) -> int:
        """The length of all of them."""
        ...

    def put(self, block: DiskBlock) -> DiskBlock | None:
        """Enter a block, unused yet; returns the one that had to go for it: the same key's, or
        where its window is full another one's, of the oldest lap."""
        ...

    def adopt(
        self, blocks: Sequence[DiskBlock], keys: Collection[Key], namespace_ids: Collection[int]
    ) -> tuple[Sequence[DiskBlock], Sequence[DiskBlock]]:
        """Enter blocks that a former start wrote, but none of these keys and namespaces. Of several
        of one key and device the latest stays; of those on several devices, none of which was
        forbidden, one is as right as the other. Returns what had to go, and what is not needed
        since another device has its key."""
        ...

    def get(self, key: Key) -> DiskBlock | None:
        """Return the block of that key."""
        ...

    def remove(self, key: Key) -> bool:
        """Take a block out; False when there is none."""
        ...

    def mark_used(self, key: Key) -> bool:
        """Note that a block was used since it was put; returns whether that was noted before."""
        ...

    def is_used(self, key: Key) -> bool:
        """Return whether that was noted."""
        ...

    def clear(
        self, namespace_ids: Sequence[int], start: int, at_most: int
    ) -> tuple[list[DiskBlock], int]:
        """Take out the blocks of these namespaces, of all when there are none, among `at_most`
        places from number `start` on; returns them, and where to go on (0: that was all)."""
        ...

    def device_closed(self, device: int) -> None:
        """Have no reader look for blocks on that device any more. `get` still has them."""
        ...

    def walk(self, start: int, at_most: int) -> tuple[list[DiskBlock], int]:
        """Return the blocks at `at_most` places from number `start` on, and where to go on (0: that
        was all)."""
        ...


def adopt_each(
    index: DiskIndex,
    blocks: Sequence[DiskBlock],
    keys: Collection[Key],
    namespace_ids: Collection[int],
) -> tuple[list[DiskBlock], list[DiskBlock]]:
    """Do what `DiskIndex.adopt` says, block by block."""
    gone: list[DiskBlock] = []
    left_out: list[DiskBlock] = []
    for block in blocks:
        if block.namespace_id in namespace_ids or block.key in keys:
            continue
        there = index.get(block.key)
        if there is None or is_later(block, there):
            former = index.put(block)
            gone += [] if former is None else [former]
        elif there.place.device != block.place.device:
            left_out.append(block)
    return gone, left_out


class RegionState(NamedTuple):
    """What the header of a region says."""

    region: int
    lap: int
    """0: it was never begun."""


class Forbid(NamedTuple):
    """What must not come back at any later start. It is durable on the devices before the answers
    to the event that brought it about leave."""

    serial: int
    """Its number among those of this start, from 1."""
    keys: Sequence[Key]
    """Deleted or replaced blocks; empty: it notes only that values were saved in this run, which
    a device that is away may have others of."""
    namespace_ids: Sequence[int] | None
    """Cleared namespaces, all when it is empty; None: `keys` are meant."""
    reset_number: int
    """The number of the reset; 0 where it is none."""
    up_to: Mapping[int, int]
    """By device: what was written up to this order number is meant. Of other devices, all."""
