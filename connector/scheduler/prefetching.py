"""Brings blocks of a prompt from other hosts to this host's node, before the prompt is computed.

A wish comes with a request (request_settings.py), while the request may still wait for its turn.
What the store has of its prompt, as far as a load would need it, and only other hosts have, is
copied into the node of this host, as a save would be: under the same keys, sealed by the node, and
a miss if it changed on the way. The load then reads it here.

The scheduling thread only queues; a thread of its own, begun with the first wish, copies some
blocks at a time, one prompt after the other. What becomes of the blocks is counted, and said in
the history of the request while it lives.

Must never happen: a wait in the scheduling thread, or an exception in it, because of a wish; a
block sealed here whose bytes were not checked after they were read (rule 1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from connector import metrics
from connector.layout.block_plan import usable_run
from connector.limits import (
    MATCH_BLOCKS_MAX,
    PREFETCH_BATCH_BLOCKS,
    PREFETCH_QUEUE_MAX,
    PREFETCH_TIMEOUT_S,
    SHUTDOWN_TIMEOUT_S,
)
from connector.metrics import NO_NODE, TOO_BUSY, Counts
from connector.scheduler.lookup import Finder
from connector.work_thread import WorkThread
from kvstore import KVStoreError, PutResult, PutStatus
from kvstore.spi import BlockRef, BlockStore, Key, Reservation, Tier, copy_bytes, in_batches

if TYPE_CHECKING:
    from connector.layout.geometry import Split, StoreLayout
    from connector.messages import EngineRequest
    from connector.scheduler.lazy_store import LazyStore


class _Asked(NamedTuple):
    request_id: str
    hashes: Sequence[bytes]


class PrefetchBlock(NamedTuple):
    """Names a block of another host, and the namespace that it is to be saved in."""

    found: BlockRef
    namespace_id: int


class Prefetcher:
    """Copies blocks to this host. The scheduling thread alone may call; `note` is called on
    ours."""

    def __init__(
        self,
        store: LazyStore,
        layout: StoreLayout,
        counts: Counts,
        note: Callable[[str, str], None],
    ) -> None:
        """Start without a thread. `note` is called with a request's id and what became of its wish,
        in words."""
        self._store = store
        self._layout = layout
        self._counts = counts
        self._note = note
        self._closing = False
        self._thread: WorkThread[_Asked] | None = None

    def ask(self, request: EngineRequest, tokens_max: int) -> None:
        """Bring the full blocks of the request's first `tokens_max` tokens here."""
        layout = self._layout
        blocks = min(
            len(request.block_hashes) // layout.hashes_per_key,
            tokens_max // layout.block_tokens,
            MATCH_BLOCKS_MAX,
        )
        if not blocks:
            return
        if self._thread is None:
            self._thread = WorkThread("kvstore-prefetch", self._fetch, PREFETCH_QUEUE_MAX)
            self._thread.start()
        hashes = tuple(request.block_hashes[: blocks * layout.hashes_per_key])
        if not self._thread.put(_Asked(request.request_id, hashes)):
            self._counts.add(metrics.PREFETCHED_BLOCKS, blocks, TOO_BUSY)

    def close(self) -> None:
        """Stop the thread; waits at most `SHUTDOWN_TIMEOUT_S`."""
        self._closing = True
        if self._thread is not None:
            self._thread.end()
            self._thread.join(SHUTDOWN_TIMEOUT_S)

    def _fetch(self, asked: _Asked) -> None:
        store = self._store.get()
        if store is None:
            return
        results: Counter[str] = Counter()
        why = ""
        wanted = self._elsewhere(asked.hashes, store)
        try:
            # Without a node here a save would go to another host, where the blocks are.
            if wanted and not store.mappings():
                results[NO_NODE] += len(wanted)
                wanted = []
            for batch in in_batches(wanted, PREFETCH_BATCH_BLOCKS):
                if self._closing:
                    return
                bring(batch, store, results)
        except KVStoreError as e:
            results[NO_NODE] += len(wanted) - results.total()
            why = f" ({e})"
        for result, count in results.items():
            self._counts.add(metrics.PREFETCHED_BLOCKS, count, result)
        summary = ", ".join(f"{count} {result}" for result, count in results.items())
        self._note(asked.request_id, f"prefetched: {summary or 'nothing is on other hosts'}{why}")

    def _elsewhere(self, hashes: Sequence[bytes], store: BlockStore) -> list[PrefetchBlock]:
        """Return what a load of the longest prefix there is would read from other hosts."""
        layout, per_key = self._layout, self._layout.hashes_per_key

        def keys_of(split: Split) -> list[list[Key]]:
            return [ns.engine_keys(hashes, per_key) for ns in split.namespaces]

        placement = Finder([group.splits for group in layout.groups], keys_of)(store.lookup)
        tokens = len(hashes) * layout.hash_block_tokens + 1
        run = usable_run(placement, {}, layout, tokens)
        wanted: list[PrefetchBlock] = []
        for group, row in zip(layout.groups, placement, strict=True):
            first = group.needed_from(run * layout.block_tokens) if group.forgetful else 0
            for placed in row[first // layout.block_tokens : run]:
                if placed is not None:
                    names = group.splits[placed.split].namespaces
                    wanted += [
                        PrefetchBlock(found, name.id)
                        for found, name in zip(placed.found, names, strict=True)
                    ]
        tiers = store.tiers([one.found for one in wanted])
        return [one for one, tier in zip(wanted, tiers, strict=True) if tier is Tier.OTHER_HOST]


def bring(wanted: Sequence[PrefetchBlock], store: BlockStore, results: Counter[str]) -> None:
    """Copy these blocks to this host's node; counts in `results` what became of each.

    Raises `KVStoreError` when the node does not answer; what it has granted is given back then.
    """
    views = store.views([one.found for one in wanted], None, PREFETCH_TIMEOUT_S)
    for one, view in zip(wanted, views, strict=True):
        if view is None or not isinstance(view.buffer, memoryview):
            results["lost"] += 1
            continue
        (slot,) = store.reserve([one.found.key], len(view.buffer), one.namespace_id)
        if isinstance(slot, PutResult):
            here = slot.status in (PutStatus.EXISTS, PutStatus.IN_PROGRESS)
            results["here" if here else "rejected"] += 1
            continue
        if not isinstance(slot, Reservation):  # on a device: where it would not be read from
            store.abort([slot])
            results["rejected"] += 1
            continue
        with ExitStack() as undo:
            undo.callback(store.abort, [slot])
            copy_bytes(slot.buffer, view.buffer)
            right = view.valid()
            undo.pop_all()
        if not right:
            store.abort([slot])
            results["lost"] += 1
            continue
        (stored,) = store.commit([slot])
        results["yes" if stored else "rejected"] += 1
