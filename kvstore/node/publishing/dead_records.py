"""Removes from the index the records of nodes that are gone for good.

The one exception to "a node alone writes its records" (docs/decisions/0097). The living node with
the lowest id goes round over all records, and removes those of a start of a node that it has not
seen announced for `UNSEEN_S`. A node that comes back after that publishes them again (scrubber.py).
"""

from __future__ import annotations

import asyncio
import logging

from kvstore.errors import IndexRefusedError, IndexUnavailableError
from kvstore.index.base import Index, Place
from kvstore.machine import REAL, Machine
from kvstore.nodedir import Announcement
from kvstore.record import unpack_record

log = logging.getLogger("kvstore.node")

LOOK_EVERY_S = 2.0
REFUSED_S = 3600.0
"""Pause before a node that may not list records asks again."""
UNSEEN_S = 24 * 3600.0
LOOKED_AWAY_S = 60.0
"""After this time without a look all counts start again, because others may have lived
meanwhile."""
STARTS_MAX = 4096
"""Starts that are counted at a time; more wait until these are removed."""


class DeadRecords:
    """Looks at some records every `LOOK_EVERY_S`, where it is this node's turn."""

    def __init__(self, index: Index, node_id: int, *, machine: Machine = REAL) -> None:
        self._index = index
        self._node_id = node_id
        self._now = machine.monotonic
        self._place: Place = (0, 0)
        self._looked_at = float("-inf")
        self._unseen: dict[tuple[int, int], float] = {}
        """(node id, epoch) -> since when this start, which records name, is not announced."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.step())

    def step(self) -> float:
        """Look at some records; returns for how long to wait until the next look."""
        try:
            self._look(self._now())
        except IndexRefusedError as e:
            log.info("records of dead nodes stay in the index (kvstore acl --sweep): %s", e)
            return REFUSED_S
        except IndexUnavailableError:
            pass  # another time
        return LOOK_EVERY_S

    def _look(self, now: float) -> None:
        announcements = {i: Announcement.unpack(raw) for i, raw in self._index.nodes().items()}
        if self._node_id != min(
            (i for i, announcement in announcements.items() if announcement), default=None
        ):
            return

        def lives(node_id: int, epoch: int) -> bool:
            # Of a node of another version nobody can tell which start it is.
            announcement = announcements.get(node_id)
            return node_id in announcements and (
                announcement is None or announcement.epoch == epoch
            )

        goes_on = now <= self._looked_at + LOOKED_AWAY_S
        kept = [(s, at) for s, at in self._unseen.items() if goes_on and not lives(*s)]
        self._unseen = dict(kept[:STARTS_MAX])
        self._place, records = self._index.scan(self._place)
        self._looked_at = now
        dead = []
        for key, record in records:
            at = unpack_record(key, record)
            if at is None or lives(at.node_id, at.epoch):
                continue
            if now >= self._unseen.setdefault((at.node_id, at.epoch), now) + UNSEEN_S:
                dead.append((key, record))
        self._index.remove(dead)
