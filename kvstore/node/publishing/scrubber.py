"""Finds blocks whose records the index lost, though its incarnation is the same, and publishes
them again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstore.core.node import NodeCore
from kvstore.core.scrub import Scrub
from kvstore.errors import IndexUnavailableError
from kvstore.index.base import Index
from kvstore.limits import SCRUB_KEYS_MAX
from kvstore.node.publishing.publisher import Publisher

log = logging.getLogger("kvstore.node")

SCRUB_EVERY_S = 0.25


class Scrubber:
    """Looks up some keys every `SCRUB_EVERY_S`, and has those published that are lost."""

    def __init__(
        self,
        core: NodeCore,
        index: Index,
        publisher: Publisher,
        beat: Callable[[], None],
    ) -> None:
        """`beat` asks the index at once whether its incarnation is the same."""
        self._scrub = Scrub(core)
        self._index = index
        self._publisher = publisher
        self._beat = beat

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SCRUB_EVERY_S)
            self.step()

    def step(self) -> None:
        keys = self._scrub.next(SCRUB_KEYS_MAX)
        if not keys:
            return
        try:
            records = self._index.lookup(keys)
            elsewhere = self._publisher.elsewhere(keys, records)
        except IndexUnavailableError:
            return
        lost = self._scrub.found(keys, records, elsewhere)
        if lost:
            log.info("the index had lost %d blocks of %d: publishing them", lost, len(keys))
            self._publisher.schedule()
        if lost == len(keys):
            self._beat()  # very likely all is gone: do not wait for the next heartbeat
