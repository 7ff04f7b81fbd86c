"""Retains blocks for requests that ask for it: those that were found, and those that they save.

A wish comes with a request (request_settings.py). Blocks of its prompt that a lookup finds on
this host are retained then; blocks that it saves, once every worker has stored them. A wish of 0
seconds is a release. Who retains is the node (docs/decisions/0058): nothing is kept up from
here, and an engine that ends changes nothing.

The scheduling thread only queues; a thread of its own, begun with the first wish, asks the nodes.
What becomes of the wishes is counted, and said in the history of the request while it lives.

Must never happen: a wait in the scheduling thread, or an exception in it, because of a wish.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from connector import metrics
from connector.limits import RETAIN_QUEUE_MAX, SHUTDOWN_TIMEOUT_S
from connector.metrics import NO_NODE, Counts
from connector.work_thread import WorkThread
from kvstore import KVStoreError
from kvstore.spi import Key

if TYPE_CHECKING:
    from connector.messages import SaveJob
    from connector.scheduler.lazy_store import LazyStore
    from connector.scheduler.lookup import Lookup
    from connector.scheduler.request_settings import Wish


class _Asked(NamedTuple):
    request_id: str
    wish: Wish
    keys: Sequence[Key]


class Retainer:
    """Asks nodes to retain. The scheduling thread alone may call; `note` is called on ours."""

    def __init__(self, store: LazyStore, counts: Counts, note: Callable[[str, str], None]) -> None:
        """Start without wishes. `note` is called with a request's id and what became of its wish,
        in words."""
        self._store = store
        self._counts = counts
        self._note = note
        self._saving: dict[int, tuple[Wish, SaveJob]] = {}
        self._thread: WorkThread[_Asked] | None = None

    def found(self, request_id: str, wish: Wish | None, lookup: Lookup) -> None:
        """Retain what the answered lookup of a request found; once for each lookup."""
        if wish is None or lookup.retained or not lookup.run:
            return
        lookup.retained = True
        ours = [
            shard[block]
            for block in range(lookup.run)
            for group in lookup.keys
            for shard in group
            if shard[block] in lookup.found
        ]
        # Those of writers that split their KV otherwise; their order is not known.
        others = lookup.found.difference(ours)
        self._ask(_Asked(request_id, wish, [*ours, *others]))

    def saving(self, wish: Wish | None, job: SaveJob) -> None:
        """Note that a save of blocks of a request was planned."""
        if wish is not None:
            self._saving[job.job_id] = (wish, job)

    def saved(self, job_id: int, stored: Iterable[int]) -> None:
        """Note that the job has ended; all shards of the blocks at `stored` are there."""
        wish, job = self._saving.pop(job_id, (None, None))
        if wish is not None and job is not None:
            keys = [key for position in sorted(stored) for key in job.blocks[position].keys]
            self._ask(_Asked(job.request_id, wish, keys))

    def close(self) -> None:
        """Stop the thread; waits at most `SHUTDOWN_TIMEOUT_S`."""
        if self._thread is not None:
            self._thread.end()
            self._thread.join(SHUTDOWN_TIMEOUT_S)

    def _ask(self, asked: _Asked) -> None:
        if not asked.keys:
            return
        if self._thread is None:
            self._thread = WorkThread("kvstore-retain", self._retain, RETAIN_QUEUE_MAX)
            self._thread.start()
        if not self._thread.put(asked):
            self._count({metrics.TOO_BUSY: len(asked.keys)})

    def _retain(self, asked: _Asked) -> None:
        store = self._store.get()
        results = Counter({NO_NODE: len(asked.keys)})
        why = ""
        if store is not None:
            try:
                answers = store.retain(asked.keys, *asked.wish)
                results = Counter(metrics.RESULT_OF[answer] for answer in answers)
            except KVStoreError as e:  # also a node that cannot be asked
                why = f" ({e})"
        self._count(results)
        summary = ", ".join(f"{count} {result}" for result, count in results.items())
        for_s = asked.wish.for_s
        what = f"retained for {for_s} s" if for_s else "released"
        self._note(asked.request_id, f"{what}: {summary}{why}")

    def _count(self, results: dict[str, int]) -> None:
        for result, count in results.items():
            self._counts.add(metrics.RETAINED_BLOCKS, count, result)
