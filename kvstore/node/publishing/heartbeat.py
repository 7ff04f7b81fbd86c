"""Announces a node in the index every second, and notices an index that lost keys (rule 7)."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import Callable, Iterable

from kvstore.errors import IndexBreakerOpenError, IndexRefusedError, IndexUnavailableError
from kvstore.index.announced import announced_nodes
from kvstore.index.base import Index
from kvstore.limits import INDEX_WARNED_EVERY_S, NODE_BELIEVED_S, NODE_TTL_S
from kvstore.machine import REAL, Machine
from kvstore.nodedir import Announcement
from kvstore.record import RecordSigner

log = logging.getLogger("kvstore.node")

HEARTBEAT_S = 1.0
JITTER = 0.2
"""Share of the period by which nodes drift apart, so that they do not beat together."""
UNREACHED = "node %s cannot reach the index, only its own host finds its blocks: %s"
RENEWED = "node %s cannot tell the index anything new, other hosts find what it was told before: %s"
ANNOUNCEMENT_TTL_S = NODE_TTL_S - NODE_BELIEVED_S
"""Life of an announcement in the index; a client that read it just before the end believes it for
`NODE_BELIEVED_S` more."""


class Heartbeat:
    """Announces the node every `HEARTBEAT_S`; calls `on_lost` when the index lost keys."""

    def __init__(
        self,
        index: Index,
        announcement: Announcement,
        on_lost: Callable[[], None],
        free_bytes: Callable[[], int],
        signer: RecordSigner | None = None,
        news: Callable[[Iterable[Announcement]], str] = lambda _: "",
        announced: Callable[[str], None] = lambda _: None,
        counts: Callable[[], dict[str, int]] = dict,
        on_beat: Callable[[IndexUnavailableError | None], None] = lambda error: None,
        *,
        machine: Machine = REAL,
    ) -> None:
        """With `signer`, the announcement is signed. The rest are called in each beat: `on_lost`
        when the index lost keys; `free_bytes` and `counts` for what is announced; `news` with
        what all nodes announce, for the resets that this one knows of then; `announced` with the
        index's incarnation, once the announcement is there; `on_beat` at the end, with what kept
        the beat from the index or None."""
        self._news = news
        self._announced = announced
        self._index = index
        self._announcement = announcement
        self._on_lost = on_lost
        self._free_bytes = free_bytes
        self._signer = signer
        self._counts = counts
        self._on_beat = on_beat
        self._incarnation = ""
        self._first = True
        """True until the first beat: nothing can have been published yet."""
        self._has_announced = False
        """Whether the index has had an announcement of this start."""
        self._reachable = True
        self._now = machine.monotonic
        self._started_at = self._now()
        self._warn_at = 0.0

    def _renewed(self, error: IndexUnavailableError) -> bool:
        """Renew the announcement in an index that refuses a new one: it may be full. Return whether
        the old announcement stays."""
        cause = error.__cause__ if isinstance(error, IndexBreakerOpenError) else error
        if not self._has_announced or not isinstance(cause, IndexRefusedError):
            return False  # one that hangs would keep the event loop a second time
        try:
            return self._index.renew(self._announcement.node_id, ANNOUNCEMENT_TTL_S)
        except IndexUnavailableError:
            return False

    async def run(self) -> None:
        while True:
            self.beat()
            await asyncio.sleep(HEARTBEAT_S * random.uniform(1 - JITTER, 1 + JITTER))

    def beat(self) -> None:
        """Announce the node once; returns within the index's deadlines whatever happens."""
        first, self._first = self._first, False
        try:
            incarnation = self._index.incarnation()
            resets = self._news(announced_nodes(self._index, self._signer).values())
            announcement = dataclasses.replace(
                self._announcement,
                index="",
                disks={},
                free_bytes=self._free_bytes(),
                up_s=int(self._now() - self._started_at),
                resets=resets,
                counts=self._counts(),
            )
            raw = (
                announcement.pack()
                if self._signer is None
                else self._signer.announcement(announcement.pack())
            )
            self._index.announce(announcement.node_id, raw, ANNOUNCEMENT_TTL_S)
            self._has_announced = True
        except IndexUnavailableError as e:
            text = RENEWED if self._renewed(e) else UNREACHED
            self._news(())
            now = self._now()
            if self._reachable or now >= self._warn_at:
                self._warn_at = now + INDEX_WARNED_EVERY_S
                log.warning(text, self._announcement.name, e)
            self._reachable = False
            self._on_beat(e)
            return
        self._announced(incarnation)
        if not self._reachable:
            log.info("node %s reaches the index again", self._announcement.name)
        self._reachable = True
        # After a first beat that failed, publications may have reached another incarnation.
        lost = not first and incarnation != self._incarnation
        self._incarnation = incarnation
        if lost:
            self._on_lost()
        self._on_beat(None)
