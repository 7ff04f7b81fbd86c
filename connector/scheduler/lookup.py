"""Looks up how much of a prompt the store has, off the engine's thread.

A `Lookup` goes through two stages, each with a thread, a bounded queue and its own order:

    submitted -> searched on this host -> [asked of the index] -> answered: `done` is set

    this host    makes the keys and searches this host's segments, without a wait. What it finds
                 in full is answered, as is what was given up, or finds no store or no room in
                 the second queue. What it finds in part is left in `Lookup.here`. Whoever submits
                 does it, at once, unless the store is not open yet or the keys are many
    the index    asks the store once more, the index and blocks of other splits included, within
                 `timeout_s` from the beginning of this stage

So a lookup that is all on this host never waits behind one that asks the index. How long a request
waits is decided by who asked (patience.py); an answer that comes later than its request waited is
good for the next to ask. A request that waits no longer gets what this host has (`Lookups.here`).

Whoever carries out a stage writes a lookup; who asked writes `wanted_at` and `given_up` alone.
After `done` only `why` is added, by explain.py.

Must never happen:

- a wait in the engine's thread: `submit` and `here` only search memory or put into a queue;
- a lookup taken by `submit` that nobody answers while this is open;
- a thread that ends by a lookup which raised: that one finds nothing, the next are served.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from connector.layout.block_plan import Placed, usable_run
from connector.limits import (
    LOOKUP_AT_ONCE_KEYS,
    LOOKUP_QUEUE_MAX,
    MATCH_BLOCKS_MAX,
    SHUTDOWN_TIMEOUT_S,
    Clock,
)
from connector.work_thread import WorkThread
from kvstore import MissReason
from kvstore.spi import BlockRef, BlockStore, Key, LookupResult, Missing

if TYPE_CHECKING:
    from connector.layout.geometry import Split, StoreLayout
    from connector.scheduler.lazy_store import LazyStore

log = logging.getLogger(f"kvstore.{__name__}")

Ask = Callable[[Sequence[Key]], Sequence[BlockRef | None]]


@dataclass(slots=True, eq=False)
class Lookup:
    """Holds one question and its answer. The stages write it, then set `done`; see the module's
    head."""

    hashes: Sequence[bytes]
    submitted_at: float
    name: str = ""
    """What log lines call its request."""
    wanted_at: float | None = None
    """Time since which its request waits for this lookup only."""
    given_up: bool = False
    """Set by whoever asked, when the request does not wait any longer."""
    done: threading.Event = field(default_factory=threading.Event)
    answered_at: float = 0.0
    keys: tuple[tuple[list[Key], ...], ...] = ()
    """Keys of every full store block in the engine's own split, per group and shard."""
    placement: tuple[tuple[Placed | None, ...], ...] = ()
    """Which blocks are present, per group and block; empty when none is."""
    part: bytes | None = None
    """Hash of the partial block behind the prompt's last full one, when that is looked up too."""
    part_placement: tuple[Placed | None, ...] = ()
    """Where the partial block is, per group; empty when it is not looked up."""
    run: int = 0
    """Leading store blocks of which every group has what it needs."""
    short: MissReason | None = None
    """Why `run` ends before the keys do; None when it does not."""
    why: Missing | None = None
    """The store's reason for the first missing block, when it was asked; set after `done`."""

    @property
    def placed(self) -> tuple[tuple[Placed | None, ...], ...]:
        """Return `placement` and the partial block behind it."""
        if not self.part_placement:
            return self.placement
        return tuple(
            (*row, part) for row, part in zip(self.placement, self.part_placement, strict=True)
        )

    def first_missing(self) -> tuple[int, int]:
        """Return (group, shard) in the engine's own split of the first key that is missing."""
        for group, shards in enumerate(self.keys):
            row = self.placement[group] if group < len(self.placement) else ()
            if self.run >= len(row) or row[self.run] is None:
                there = self.found
                for shard, keys in enumerate(shards):
                    if self.run < len(keys) and keys[self.run] not in there:
                        return group, shard
        return 0, 0

    found: frozenset[Key] = frozenset()
    """Keys that were found, whoever wrote them."""
    here: Lookup | None = None
    """A lookup of what this host alone holds, when that is something but not all. It is for a
    request that cannot wait for the index any longer, and `done` from the start."""
    retained: bool = False
    """Whether a wish to retain what it found was sent; set by whoever asked."""
    looked_here: bool = False
    """Whether `here` is final."""


@dataclass(slots=True)
class _Question:
    """Carries a lookup of which this host does not have everything."""

    lookup: Lookup
    store: BlockStore
    finder: Finder
    blocks: int
    """Number of full blocks; with a partial one there is one more."""


class Lookups:
    """Answers lookups in two stages with a thread each. `submit`, `here` and `close` are for one
    thread, the engine's."""

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
        """`on_answer` is called after `done` is set, on a lookup thread or by `submit`; it must not
        wait."""
        self._store = store
        self._on_answer = on_answer
        self._layout = layout
        self._timeout_s = timeout_s
        self._clock = clock
        keys_a_block = sum(len(group.namespaces) for group in layout.groups)
        self._hashes_at_once = LOOKUP_AT_ONCE_KEYS // keys_a_block * layout.hashes_per_key
        self._looking = WorkThread("kvstore-lookup", self._look_here, LOOKUP_QUEUE_MAX)
        self._asking = WorkThread("kvstore-lookup-index", self._ask_index, LOOKUP_QUEUE_MAX)
        self._looking.start()
        first = partial(store.warm_up, layout.groups[0].namespaces[0])
        self._asking.start(first if warm_up else None)

    def submit(
        self, hashes: Sequence[bytes], part: bytes | None = None, name: str = ""
    ) -> Lookup | None:
        """Ask for the leading run of `hashes`, and for the `part` of a block behind them; None when
        too many are waiting. `name` is the request's in log lines."""
        if self._asking.full:
            return None
        lookup = Lookup(hashes, self._clock(), name, part=part)
        store = self._store.opened
        if store is not None and len(hashes) <= self._hashes_at_once:
            # To wake a thread, and to wait for it, takes longer than to look.
            self._look(lookup, store)
            return lookup
        return lookup if self._looking.put(lookup) else None

    def now(self, hashes: Sequence[bytes]) -> Lookup:
        """Return the answer for `hashes`, looked up on the caller's thread, which is not the
        engine's: it waits for the index."""
        lookup = Lookup(hashes, self._clock())
        with self._answering(lookup):
            question = self._here(lookup, self._store.get())
            if question is not None:
                self._answer(question)
        lookup.answered_at = self._clock()
        lookup.done.set()
        return lookup

    def close(self) -> None:
        """Stop the threads; waits at most `SHUTDOWN_TIMEOUT_S` for each."""
        for thread in (self._looking, self._asking):
            thread.end()
            thread.join(SHUTDOWN_TIMEOUT_S)

    def here(self, lookup: Lookup) -> Lookup | None:
        """Return what this host has of `lookup`, as an answer of its own, for a request that cannot
        wait any longer; None when that is nothing, or the store is not open yet.

        Where no thread has come to look, because there is no processor for it or too much before
        it, the caller does: that takes microseconds a block.
        """
        store = self._store.opened
        if lookup.looked_here or store is None:
            return lookup.here
        own = Lookup(lookup.hashes, lookup.submitted_at, lookup.name, part=lookup.part)
        with self._answering(own):
            self._here(own, store)
        return self._so_far(own) if own.run or any(own.part_placement) else None

    def _so_far(self, lookup: Lookup) -> Lookup:
        answer = replace(lookup, done=threading.Event(), answered_at=self._clock())
        answer.done.set()
        return answer

    def _look_here(self, lookup: Lookup) -> None:
        self._look(lookup, self._store.get())

    def _look(self, lookup: Lookup, store: BlockStore | None) -> None:
        question: _Question | None = None
        with self._answering(lookup):
            question = self._here(lookup, store)
            lookup.looked_here = True
        if question is not None and self._asking.put(question):
            return
        if question is not None:
            lookup.short = MissReason.TOO_BUSY
        self._answered(lookup)

    def _ask_index(self, question: _Question) -> None:
        with self._answering(question.lookup):
            self._answer(question)
        self._answered(question.lookup)

    @contextmanager
    def _answering(self, lookup: Lookup) -> Iterator[None]:
        try:
            yield
        except Exception:
            # A lookup may cost its own hit, never the thread that all others need.
            log.exception("a lookup failed: request %s loads nothing", lookup.name)
            lookup.placement = lookup.part_placement = ()
            lookup.run = 0
            lookup.short = MissReason.INDEX_ERROR

    def _answered(self, lookup: Lookup) -> None:
        lookup.answered_at = self._clock()
        lookup.done.set()
        if self._on_answer is not None:
            self._on_answer(lookup)

    def _here(self, lookup: Lookup, store: BlockStore | None) -> _Question | None:
        """Look for it on this host. Return what is left to ask the index."""
        layout = self._layout
        per_key = layout.hashes_per_key
        blocks = min(len(lookup.hashes) // per_key, MATCH_BLOCKS_MAX)
        hashes = lookup.hashes[: blocks * per_key]
        if len(lookup.hashes) // per_key > blocks:
            lookup.part = None
        part = [] if lookup.part is None else [lookup.part]

        def keys_of(split: Split) -> list[list[Key]]:
            names = split.namespaces
            return [name.engine_keys(hashes, per_key) + name.engine_keys(part) for name in names]

        finder = Finder([group.splits for group in layout.groups], keys_of)
        lookup.keys = tuple(tuple(shard[:blocks] for shard in own) for own in finder.own_keys())
        if store is None:
            lookup.short = MissReason.NO_STORE
            return None
        if blocks == 0 and not part:
            return None
        if lookup.given_up:
            lookup.short = MissReason.DEADLINE
            return None
        self._found(lookup, finder.here(partial(store.lookup, timeout_s=0.0)), finder)
        if lookup.run == blocks and None not in lookup.part_placement:
            return None
        lookup.short = MissReason.DEADLINE
        if lookup.run or any(lookup.part_placement):
            lookup.here = self._so_far(lookup)
        return _Question(lookup, store, finder, blocks)

    def _answer(self, question: _Question) -> None:
        lookup = question.lookup
        if lookup.given_up:
            return
        deadline = self._clock() + self._timeout_s
        asked: list[LookupResult] = []

        def ask(wanted: Sequence[Key]) -> LookupResult:
            left_s = max(0.0, deadline - self._clock())
            asked.append(question.store.lookup(wanted, timeout_s=left_s))
            return asked[-1]

        self._found(lookup, question.finder(ask), question.finder)
        lookup.short = None
        if lookup.run < question.blocks:
            trouble = [answers.short for answers in asked if answers.short is not None]
            lookup.short = trouble[0] if trouble else MissReason.ABSENT

    def _found(
        self, lookup: Lookup, placement: tuple[tuple[Placed | None, ...], ...], finder: Finder
    ) -> None:
        layout = self._layout
        if lookup.part is not None:
            lookup.part_placement = tuple(row[-1] for row in placement)
            placement = tuple(row[:-1] for row in placement)
        lookup.placement = placement
        lookup.found = finder.found_keys
        tokens = len(lookup.hashes) * layout.hash_block_tokens + 1
        lookup.run = usable_run(placement, {}, layout, tokens)


class Finder:
    """Finds where each store block is, whoever saved it, in one question to the index or two.

    None where `here` found all. The first asks for all shards of the engine's own split
    and for the first shard of every other: a writer whose first shard is missing has nothing
    to give. Only when another writer may fill a gap, its other shards are asked for.

    Keys of other splits are made when they are asked for: a prompt that is here needs none.
    """

    def __init__(
        self, splits: Sequence[Sequence[Split]], keys_of: Callable[[Split], list[list[Key]]]
    ) -> None:
        """`splits` are those of each group, the preferred one first; `keys_of` one gives its keys
        per shard and block."""
        self._splits = splits
        self._keys_of = keys_of
        self._keys = [[keys_of(group[0])] for group in splits]
        """Keys per group, split, shard and block."""
        self._found: dict[Key, BlockRef] = {}

    def own_keys(self) -> list[list[list[Key]]]:
        """Return the keys of the preferred split, per group, shard and block."""
        return [group[0] for group in self._keys]

    def here(self, ask: Ask) -> tuple[tuple[Placed | None, ...], ...]:
        """Return what `ask`, which waits for nobody, finds of the engine's own split."""
        self._look_up(ask, (key for group in self._keys for shard in group[0] for key in shard))
        return self._placement()

    def __call__(self, ask: Ask) -> tuple[tuple[Placed | None, ...], ...]:
        """Return what `ask` finds of any split."""
        for group, splits in zip(self._keys, self._splits, strict=True):
            group += [self._keys_of(split) for split in splits[len(group) :]]
        self._look_up(
            ask,
            (
                key
                for group in self._keys
                for split, shards in enumerate(group)
                for shard in (shards if split == 0 else shards[:1])
                for key in shard
            ),
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
        self._look_up(ask, more)
        return self._placement()

    @property
    def found_keys(self) -> frozenset[Key]:
        return frozenset(self._found)

    def _look_up(self, ask: Ask, keys: Iterable[Key]) -> None:
        self._found.update((found.key, found) for found in ask(list(keys)) if found is not None)

    def _placement(self) -> tuple[tuple[Placed | None, ...], ...]:
        return tuple(map(self._placed, self._keys))

    def _placed(self, group: Sequence[Sequence[Sequence[Key]]]) -> tuple[Placed | None, ...]:
        row: list[Placed | None] = [None] * len(group[0][0])
        for split, shards in enumerate(group):
            found = [map(self._found.get, keys) for keys in shards]
            for index, refs in enumerate(zip(*found, strict=True)):
                if row[index] is None and None not in refs:
                    row[index] = Placed(split, cast("tuple[BlockRef, ...]", refs))
        return tuple(row)
