"""Decides what of a prompt an engine may be promised: blocks that nothing takes away again.

TensorRT-LLM has no way to say that a load failed (docs/decisions/0076). So a block is offered only
once every tensor-parallel shard of it is pinned on the node of this host; what only other hosts
have is brought here in the background, for whoever asks next.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from connector.limits import (
    LOCKED_KEYS_MAX,
    PREFETCH_BATCH_BLOCKS,
    PREFETCH_QUEUE_MAX,
    SHUTDOWN_TIMEOUT_S,
)
from connector.pages.pages import Pages
from connector.scheduler.prefetching import PrefetchBlock, bring
from connector.work_thread import WorkThread
from kvstore import KVStoreError
from kvstore.spi import BlockRef, BlockStore, Key, Tier, in_batches

log = logging.getLogger(f"kvstore.{__name__}")

PIN_BATCH_KEYS = 1024
"""Blocks that are pinned in one request."""


class Promises:
    """Pins blocks until they are loaded; each promise has a number. Used by the engine's thread."""

    def __init__(self, store: BlockStore, shards: Sequence[Pages]) -> None:
        self._store = store
        self._shards = shards
        self._held: dict[int, list[BlockRef]] = {}
        self._count = 0
        self._fetching: WorkThread[list[bytes]] | None = None

    def make(self, number: int, names: Sequence[bytes]) -> list[tuple[BlockRef, ...]]:
        """Pin the leading blocks of `names` of which this host's node has every shard, and return
        where these are: for each shard, block after block. What comes after them is looked for on
        other hosts, in the background."""
        names = names[: (LOCKED_KEYS_MAX - self._count) // len(self._shards)]
        if not names:
            return [() for _ in self._shards]
        pinned = self._pin([key for pages in self._shards for key in pages.keys(names)])
        count = len(names)
        rows = [pinned[i * count : (i + 1) * count] for i in range(len(self._shards))]
        run = next((i for i in range(count) if any(row[i] is None for row in rows)), count)
        kept = [tuple(ref for ref in row[:run] if ref is not None) for row in rows]
        self._unpin([ref for row in rows for ref in row[run:] if ref is not None])
        if run:
            self._held[number] = [ref for row in kept for ref in row]
            self._count += run * len(rows)
        if run < count:
            self._fetch_later(list(names[run:]))
        return kept

    def end(self, number: int) -> None:
        """Let a promise's blocks go; one that has none is passed over."""
        held = self._held.pop(number, [])
        self._count -= len(held)
        self._unpin(held)

    def _pin(self, keys: list[Key]) -> list[BlockRef | None]:
        pinned: list[BlockRef | None] = []
        for batch in in_batches(keys, PIN_BATCH_KEYS):
            try:
                pinned += self._store.pin(batch)
            except KVStoreError as e:
                log.warning("nothing is promised: %s", e)
                pinned += [None] * (len(keys) - len(pinned))
                break
        return pinned

    def _unpin(self, found: list[BlockRef]) -> None:
        if found:
            self._store.unpin(found)

    def close(self) -> None:
        if self._fetching is not None:
            self._fetching.end()
            self._fetching.join(SHUTDOWN_TIMEOUT_S)
        for number in list(self._held):
            self.end(number)

    def _fetch_later(self, names: list[bytes]) -> None:
        if self._fetching is None:
            self._fetching = WorkThread("kvstore-fetch", self._fetch, PREFETCH_QUEUE_MAX)
            self._fetching.start()
        self._fetching.put(names)  # a full queue: the next request asks again

    def _fetch(self, names: list[bytes]) -> None:
        results: Counter[str] = Counter()
        try:
            if not self._store.mappings():
                return  # no node here to bring it to
            found = [list(self._store.match(pages.keys(names))) for pages in self._shards]
            run = min(map(len, found))
            refs = [
                (pages, ref)
                for pages, row in zip(self._shards, found, strict=True)
                for ref in row[:run]
            ]
            tiers = self._store.tiers([ref for _, ref in refs])
            wanted = [
                PrefetchBlock(ref, pages.namespace.id)
                for (pages, ref), tier in zip(refs, tiers, strict=True)
                if tier is Tier.OTHER_HOST
            ]
            for batch in in_batches(wanted, PREFETCH_BATCH_BLOCKS):
                bring(batch, self._store, results)
        except KVStoreError as e:
            log.warning("blocks of other hosts were not brought here: %s", e)
