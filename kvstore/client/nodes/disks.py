"""Reads from the disks of nodes of this host, and tells those nodes of what is damaged there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvstore.batches import in_batches
from kvstore.client.nodes.directory import NodeDirectory
from kvstore.client.nodes.known import Attached
from kvstore.limits import STREAM_BLOCKS_MAX
from kvstore.nodedir import Announcement, NodeDir
from kvstore.record import disk_location
from kvstore.segment.copying import copy
from kvstore.transport.base import Outcome, Wanted
from kvstore.types import Key, Location

if TYPE_CHECKING:
    from kvstore.segment.disk.attached import AttachedDisks
    from kvstore.transport.disk import DiskTransport

log = logging.getLogger("kvstore.client")


class OwnDisks:
    """Thread-safe. Never raises for a disk's fault: what cannot be read is FAILED or a MISS."""

    def __init__(
        self, nodes: NodeDirectory, report: Callable[[NodeDir, Announcement, Key], None]
    ) -> None:
        """`report` tells a node of a block that is not as it was saved."""
        self._nodes = nodes
        self._report = report
        self._transport: DiskTransport | None = None
        """Made when it is first needed: few clients have nodes with disks."""

    def holder(self, at: Location, now: float) -> Attached | None:
        """Return the node of a block on a disk, if it is one of this host."""
        here = self._nodes.segment(at.node_id, at.epoch, now)
        return None if here is None or here.disks is None else here

    def streams(self, node: Attached, at: Location) -> bool:
        """Return whether a block is on a disk that this process cannot open, though its node
        can."""
        device = at.segment - 1
        return (
            node.disks is not None
            and not node.disks.reads(device)
            and bool(node.disks.unopened(device))
        )

    def there(self, node: Attached, blocks: Sequence[tuple[Key, Location]]) -> list[bool]:
        """Return whether each of `blocks` is where and as long as its location says."""
        assert node.disks is not None
        found = [(at, node.disks.find(key)) for key, at in blocks]
        return [block is not None and disk_location(*at[:2], block) == at for at, block in found]

    def read(self, node: Attached, wanted: Sequence[Wanted], deadline: float) -> list[Outcome]:
        """Return one outcome for each block."""
        from kvstore.transport.disk import SUSPECT_REASONS, DiskTransport

        if self._transport is None:
            self._transport = DiskTransport(self._disks_of, copy)
        outcomes: list[Outcome] = []
        for batch in in_batches(wanted, STREAM_BLOCKS_MAX):
            outcomes += self._transport.read(node.announcement, batch, deadline)
        reasons = [outcome.reason for outcome in outcomes]
        suspects = [w.key for w, why in zip(wanted, reasons, strict=True) if why in SUSPECT_REASONS]
        if suspects:
            name = node.announcement.name
            log.warning("%d blocks on disks of node %s are damaged: misses", len(suspects), name)
        for key in suspects:
            self._report(node.directory, node.announcement, key)
        return outcomes

    def _disks_of(self, word: Announcement) -> AttachedDisks | None:
        here = self._nodes.segment(word.node_id, word.epoch, self._nodes.machine.monotonic())
        return None if here is None else here.disks

    def close(self) -> None:
        """See `Transport.close`."""
        if self._transport is not None:
            self._transport.close()
