"""Lookups off the engine's thread: one helper thread, a bounded queue, one deadline each.

How long a request waits is decided by who asked (patience.py); here `timeout_s` bounds what the
store is given. An answer that comes later than its request waited is good for the next to ask.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from connector.layout.block_plan import Placed, usable_run
from connector.limits import LOOKUP_QUEUE_MAX, MATCH_BLOCKS_MAX, SHUTDOWN_TIMEOUT_S, Clock
from kvstore import BlockRef, BlockStore, Key, LookupResult, Missing, MissReason

if TYPE_CHECKING:
    from connector.layout.geometry import StoreLayout
    from connector.scheduler.lazy_store import LazyStore

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Lookup:
    """One question. The thread fills it in, then sets `done`; it writes nothing afterwards."""

    hashes: Sequence[bytes]
    submitted_at: float
    wanted_at: float | None = None
    """Since when its request waits for it and for nothing else."""
    given_up: bool = False
    """Set by who asked, when the request does not wait any longer."""
    done: threading.Event = field(default_factory=threading.Event)
    answered_at: float = 0.0
    keys: tuple[tuple[list[Key], ...], ...] = ()
    """Keys of every full store block in the engine's own split, per group and shard."""
    placement: tuple[tuple[Placed | None, ...], ...] = ()
    """What is present, per group and block; empty when nothing is."""
    run: int = 0
    """Leading store blocks that every group has what it needs of."""
    short: MissReason | None = None
    """Why `run` ends before the keys do; None when it does not."""
    why: Missing | None = None
    """What the store says about the first missing block, when it was asked; set after `done`."""

    def first_missing(self) -> tuple[int, int]:
        """(group, shard) in the engine's own split of the first key that is not there."""
        for group, shards in enumerate(self.keys):
            row = self.placement[group] if group < len(self.placement) else ()
            if self.run >= len(row) or row[self.run] is None:
                there = self.found
                for shard, keys in enumerate(shards):
                    if self.run < len(keys) and keys[self.run] not in there:
                        return group, shard
        return 0, 0

    found: frozenset[Key] = frozenset()
    """Keys that the index had, of whichever writer."""


class Lookups:
    """Answers lookups in order. One that was given up in the queue is answered "nothing"."""

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
                lookup.placement = ()
                lookup.run = 0
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
                store.match([self._layout.groups[0].namespaces[0].value_key("warm-up")])
        except Exception:
            log.exception("warm-up failed")

    def _answer(self, lookup: Lookup) -> None:
        deadline = self._clock() + self._timeout_s
        layout = self._layout
        per_key = layout.hashes_per_key
        blocks = min(len(lookup.hashes) // per_key, MATCH_BLOCKS_MAX)
        hashes = lookup.hashes[: blocks * per_key]
        keys = [
            [[ns.engine_keys(hashes, per_key) for ns in split.namespaces] for split in group.splits]
            for group in layout.groups
        ]
        lookup.keys = tuple(tuple(group[0]) for group in keys)
        store = self._store.get()
        if store is None:
            lookup.short = MissReason.NO_STORE
            return
        if blocks == 0:
            return
        if lookup.given_up:
            lookup.short = MissReason.DEADLINE
            return
        asked: list[LookupResult] = []

        def ask(wanted: Sequence[Key]) -> LookupResult:
            asked.append(_ask(store, wanted, deadline, self._clock))
            return asked[-1]

        finder = Finder(keys, ask)
        lookup.placement = finder()
        lookup.found = finder.found_keys
        tokens = len(lookup.hashes) * layout.hash_block_tokens + 1
        lookup.run = usable_run(lookup.placement, {}, layout, tokens)
        if lookup.run < blocks:
            trouble = [answers.short for answers in asked if answers.short is not None]
            lookup.short = trouble[0] if trouble else MissReason.ABSENT


def _ask(store: BlockStore, keys: Sequence[Key], deadline: float, clock: Clock) -> LookupResult:
    left_s = deadline - clock()
    if left_s <= 0:
        return LookupResult([None] * len(keys), short=MissReason.DEADLINE)
    return store.lookup(keys, timeout_s=left_s)


class Finder:
    """Where each store block is, whoever saved it, in one question to the index or two.

    The first asks for all shards of the engine's own split and for the first
    shard of every other: a writer whose first shard is missing has nothing to
    give. Only when another writer may fill a gap, its other shards are asked for.
    """

    def __init__(
        self,
        keys: Sequence[Sequence[Sequence[Sequence[Key]]]],
        ask: Callable[[Sequence[Key]], Sequence[BlockRef | None]],
    ) -> None:
        """`keys` are per group, split, shard and block; the first split is preferred."""
        self._keys = keys
        self._ask_store = ask
        self._found: dict[Key, BlockRef] = {}

    def __call__(self) -> tuple[tuple[Placed | None, ...], ...]:
        self._ask(
            key
            for group in self._keys
            for split, shards in enumerate(group)
            for shard in (shards if split == 0 else shards[:1])
            for key in shard
        )
        placement = self._placement()
        more = [
            shard[index]
            for group, row in zip(self._keys, placement, strict=True)
            for shards in group[1:]
            for index, placed in enumerate(row)
            if placed is None and shards[0][index] in self._found
            for shard in shards[1:]
        ]
        if not more:
            return placement
        self._ask(more)
        return self._placement()

    @property
    def found_keys(self) -> frozenset[Key]:
        return frozenset(self._found)

    def _ask(self, keys: Iterable[Key]) -> None:
        for found in self._ask_store(list(keys)):
            if found is not None:
                self._found[found.key] = found

    def _placement(self) -> tuple[tuple[Placed | None, ...], ...]:
        return tuple(
            tuple(self._placed(group, index) for index in range(len(group[0][0])))
            for group in self._keys
        )

    def _placed(self, group: Sequence[Sequence[Sequence[Key]]], index: int) -> Placed | None:
        for split, shards in enumerate(group):
            found = [self._found.get(shard[index]) for shard in shards]
            if None not in found:
                return Placed(split, tuple(one for one in found if one is not None))
        return None
