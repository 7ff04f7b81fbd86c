"""Finds and repairs what the index lost without its incarnation telling."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstore.core.node import NodeCore
from kvstore.core.scrub import Scrub
from kvstore.errors import IndexUnavailableError
from kvstore.index.base import Index

log = logging.getLogger("kvstore.node")

SCRUB_EVERY_S = 0.25
SCRUB_KEYS = 512
"""A look at as many takes 0.2 ms of Redis; 100,000 blocks are gone through in 50 s."""


async def scrub(
    core: NodeCore, index: Index, away: Callable[[], bool], publish: Callable[[], None]
) -> None:
    """Look up a few keys now and then, unless the index is `away`; `publish` what it has lost."""
    scrubbing = Scrub(core)
    while True:
        await asyncio.sleep(SCRUB_EVERY_S)
        keys = [] if away() else scrubbing.next(SCRUB_KEYS)
        try:
            lost = scrubbing.found(keys, index.lookup(keys)) if keys else 0
        except IndexUnavailableError:
            continue
        if lost:
            log.info("the index had lost %d blocks of %d: publishing them", lost, len(keys))
            publish()
