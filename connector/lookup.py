"""Lookups off the engine's thread: one helper thread, a bounded queue, one deadline each."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from connector.limits import LOOKUP_QUEUE_MAX, MATCH_BLOCKS_MAX, SHUTDOWN_TIMEOUT_S, Clock
from kvstore import Found, Key

if TYPE_CHECKING:
    from connector.geometry import StoreLayout
    from connector.lazy_store import LazyStore

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Lookup:
    """One question. The thread fills it in, then sets `done`; nobody writes it afterwards."""

    hashes: Sequence[bytes]
    submitted_at: float
    done: threading.Event = field(default_factory=threading.Event)
    answered_at: float = 0.0
    keys: tuple[list[Key], ...] = ()
    """Keys of every full store block, one list per shard."""
    runs: tuple[list[Found], ...] = ()
    """What is present, one list per shard, all equally long: the shortest shard's run."""

    @property
    def run(self) -> int:
        return len(self.runs[0]) if self.runs else 0


class Lookups:
    """Answers lookups in order. One that waited past its deadline is answered "nothing"."""

    def __init__(
        self,
        store: LazyStore,
        layout: StoreLayout,
        timeout_s: float,
        clock: Clock = time.monotonic,
        *,
        warm_up: bool = True,
    ) -> None:
        self._store = store
        self._wants_warm_up = warm_up
        self._layout = layout
        self._timeout_s = timeout_s
        self._clock = clock
        self._queue: queue.Queue[Lookup | None] = queue.Queue(LOOKUP_QUEUE_MAX)
        self._thread = threading.Thread(target=self._run, name="kvstore-lookup", daemon=True)
        self._thread.start()

    def submit(self, hashes: Sequence[bytes]) -> Lookup | None:
        """Ask for the leading run of `hashes`; None when too many are waiting."""
        lookup = Lookup(hashes, self._clock())
        try:
            self._queue.put_nowait(lookup)
        except queue.Full:
            return None
        return lookup

    def close(self) -> None:
        """Stop the thread; waits at most `SHUTDOWN_TIMEOUT_S`."""
        try:
            self._queue.put(None, timeout=SHUTDOWN_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(SHUTDOWN_TIMEOUT_S)

    def _run(self) -> None:
        if self._wants_warm_up:
            self._warm_up()
        while (lookup := self._queue.get()) is not None:
            try:
                self._answer(lookup)
            except Exception:
                # A lookup may cost its own hit, never the thread that all others need.
                log.exception("lookup failed")
                lookup.runs = ()
            lookup.answered_at = self._clock()
            lookup.done.set()

    def _warm_up(self) -> None:
        """Connect before the first request: its deadline is short and would be missed."""
        try:
            store = self._store.get()
            if store is not None:
                store.match([self._layout.namespaces[0].value_key("warm-up")])
        except Exception:
            log.exception("warm-up failed")

    def _answer(self, lookup: Lookup) -> None:
        deadline = lookup.submitted_at + self._timeout_s
        per_key = self._layout.blocks_per_key
        blocks = min(len(lookup.hashes) // per_key, MATCH_BLOCKS_MAX)
        hashes = lookup.hashes[: blocks * per_key]
        lookup.keys = tuple(ns.engine_keys(hashes, per_key) for ns in self._layout.namespaces)
        store = self._store.get()
        if store is None:
            return
        runs: list[list[Found]] = []
        for keys in lookup.keys:
            left_s = deadline - self._clock()
            if left_s <= 0 or blocks == 0:
                return
            runs.append(store.match(keys[:blocks], timeout_s=left_s))
            blocks = len(runs[-1])
        lookup.runs = tuple(run[:blocks] for run in runs)
