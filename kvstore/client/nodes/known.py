"""Defines what a client knows of one start of one node."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.circuit_breaker import Breaker, BreakerState
from kvstore.client.base import BlockRef
from kvstore.client.explanation import Unreadable
from kvstore.nodedir import Announcement, NodeDir
from kvstore.record import node_start
from kvstore.segment.attached import AttachedShm
from kvstore.transport.base import Transport

if TYPE_CHECKING:
    from kvstore.segment.disk.attached import AttachedDisks

HURRIED_MAX = 3
"""So many failures in a row of reads that had too little time, and the node is left alone for a
while, as after one that had its time."""
RETRY_AFTER_S = 0.25
RETRY_AFTER_MAX_S = 5.0
VRAM_RETRY_AFTER_MAX_S = 60.0
"""To open memory of a node that hangs keeps the client's housekeeper from its other work."""


class NodeState(enum.StrEnum):
    UNHEARD = "unheard"
    """Neither the run directory nor the index has named it, or neither could be asked."""
    REACHABLE = "reachable"
    SILENT = "silent"
    """It did not answer lately, and is left alone until its breaker lets a probe through."""
    GONE = "gone"
    """It was named, and is not any more, or it offers nothing that this client may use."""


class Attached:
    """One node's segment in this process."""

    __slots__ = ("announcement", "directory", "disks", "gone", "ours", "records", "shm", "start")

    def __init__(
        self,
        announcement: Announcement,
        shm: AttachedShm,
        directory: NodeDir,
        *,
        ours: bool,
        disks: AttachedDisks | None = None,
    ) -> None:
        self.announcement = announcement
        self.shm = shm
        self.directory = directory
        self.ours = ours
        """Of the client's own index, for certain: what it holds was not reset there."""
        self.disks = disks
        """What it has on disk; None where it has none, or this client reads none."""
        self.start = node_start(announcement.node_id, announcement.epoch)
        """As records name it."""
        self.records: dict[int, tuple[bytes, BlockRef]] = {}
        """By slot its header and what was made of that: the same bytes in the same slot say the
        same (client/block_lookup.py)."""
        self.gone = False
        """The node is dead or restarted: every location in here is a miss."""


class KnownNode:
    """One start of one node. `NodeDirectory` alone changes it, but for what is said below."""

    __slots__ = (
        "absent_until",
        "announced",
        "announcement",
        "attached",
        "believed_until",
        "breaker",
        "confirmed_at",
        "epoch",
        "heard_at",
        "in_vram",
        "in_vram_until",
        "looked_at",
        "loop",
        "offered",
        "ours",
        "sent_bytes",
        "unmapped",
        "vram_breaker",
        "vram_failed",
        "vram_failure",
    )

    def __init__(self, epoch: int | None = None) -> None:
        self.epoch = epoch
        """None until it was heard of."""
        # Of the run directory.
        self.attached: Attached | None = None
        """Its memory, while that is mapped here."""
        self.absent_until = float("-inf")
        """It is believed not to be on this host."""
        self.unmapped: Unreadable | None = None
        """Why its memory could not be opened when that was last tried."""
        self.ours = False
        """The index knew it."""
        # Of the index.
        self.announcement: Announcement | None = None
        self.announced: Announcement | None = None
        """The same, also where it offers nothing that this client may use."""
        self.offered: Sequence[Transport] = ()
        """Those by which this client can reach it, the nearest first."""
        self.believed_until = float("-inf")
        """The index need not be asked."""
        self.confirmed_at = float("-inf")
        self.heard_at = float("-inf")
        """When the announcement was another one than before."""
        self.sent_bytes = 0
        """Since then; who saves there counts it."""
        # Of what it was asked; `RemoteNodes` alone changes these, under its lock.
        self.looked_at = float("-inf")
        """When its idle connections were looked at."""
        # One failure costs a whole deadline: the next calls must not.
        self.breaker, self.loop, self.vram_breaker = (
            Breaker(failures_max=HURRIED_MAX, retry_after_s=RETRY_AFTER_S, retry_after_max_s=max_s)
            for max_s in (RETRY_AFTER_MAX_S, RETRY_AFTER_MAX_S, VRAM_RETRY_AFTER_MAX_S)
        )
        """Of reads, of what its event loop has to answer, and of its VRAM, which `VramNodes` feeds
        as it does the following."""
        self.in_vram: Announcement | None = None
        """It, where its VRAM could be read from here at the last look."""
        self.in_vram_until = float("-inf")
        """That is believed."""
        self.vram_failure = ""
        """Why it cannot be read; empty when it did not fail, or was opened since."""
        self.vram_failed = False
        """It has, and the log says so."""

    @property
    def indexed(self) -> bool:
        """Return whether the index has named it."""
        return self.announced is not None

    @property
    def state(self) -> NodeState:
        if self.announcement is None:
            if self.attached is not None:
                return NodeState.REACHABLE
            heard = self.confirmed_at != float("-inf")
            return NodeState.GONE if heard else NodeState.UNHEARD
        closed = self.breaker.state is BreakerState.CLOSED
        return NodeState.REACHABLE if closed else NodeState.SILENT
