"""Lookups off the engine's thread: one helper thread, a bounded queue, one deadline each."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from connector.limits import LOOKUP_QUEUE_MAX, MATCH_BLOCKS_MAX, SHUTDOWN_TIMEOUT_S, Clock
from kvstore import Found, Key, Missing, MissReason, Run

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
    short: MissReason | None = None
    """Why `runs` ends before the keys do; None when it does not."""
    short_shard: int = 0
    """The shard that is why."""
    why: Missing | None = None
    """What the store says about the first missing block, when it was asked; set after `done`."""

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
        on_answer: Callable[[Lookup], None] | None = None,
    ) -> None:
        """`on_answer` is called on the lookup thread after `done` is set; it must not wait."""
        self._store = store
        self._wants_warm_up = warm_up
        self._on_answer = on_answer
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
                lookup.short = MissReason.INDEX_ERROR
            lookup.answered_at = self._clock()
            lookup.done.set()
            if self._on_answer is not None:
                self._on_answer(lookup)

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
            lookup.short = MissReason.NO_STORE
            return
        runs: list[Run] = []
        for shard, keys in enumerate(lookup.keys):
            left_s = deadline - self._clock()
            if blocks == 0:
                return
            if left_s <= 0:
                lookup.short = MissReason.DEADLINE
                return
            run = store.match(keys[:blocks], timeout_s=left_s)
            if run.short is not None:
                lookup.short, lookup.short_shard = run.short, shard
            runs.append(run)
            blocks = len(run)
        lookup.runs = tuple(run[:blocks] for run in runs)
