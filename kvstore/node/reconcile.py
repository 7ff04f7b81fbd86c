"""A node's own blocks compared with the index, a few a second (core/audit.py decides)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from kvstore.core.audit import Audit
from kvstore.errors import IndexUnavailableError
from kvstore.index.base import Index
from kvstore.nodedir import Announcement

RECONCILE_S = 1.0
RECONCILE_KEYS = 1024
"""One command to Redis, about a millisecond of the node's time: 100,000 blocks in 100 s."""
JITTER = 0.2


class Reconciler:
    """Calls `on_repair` when there is something to publish again."""

    def __init__(self, index: Index, audit: Audit, on_repair: Callable[[], None]) -> None:
        self._index = index
        self._audit = audit
        self._on_repair = on_repair

    async def run(self) -> None:
        while True:
            await asyncio.sleep(RECONCILE_S * random.uniform(1 - JITTER, 1 + JITTER))
            self.step()

    def step(self) -> None:
        """One batch; returns within a few deadlines of the index whatever happens."""
        slots = self._audit.take(RECONCILE_KEYS)
        if not slots:
            return
        try:
            records = self._index.lookup([slot.key for slot in slots])
            owners = self._audit.owners(slots, records)
            epochs = {owner: self._epoch_of(owner) for owner in owners}
        except IndexUnavailableError:
            return
        if self._audit.compare(slots, records, epochs):
            self._on_repair()

    def _epoch_of(self, node_id: int) -> int | None:
        raw = self._index.node(node_id)
        word = Announcement.unpack(raw) if raw is not None else None
        return word.epoch if word is not None else None
