"""Defines the connector's metrics for Prometheus, names and help texts, and counts them.

An engine's adapter gives `METRICS` to the engine's own metrics and feeds them
with `CountStats` that the two sides hand out; nothing else is decided there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar

from connector.limits import STATS_SAMPLES_MAX
from connector.stats import CountStats
from kvstore import MissReason, PutStatus, Retained
from kvstore.spi import Tier

_Value = TypeVar("_Value")


class Metric(NamedTuple):
    """Defines a counter, or with `buckets` a histogram. Names are Prometheus', without "_total"."""

    name: str
    help: str
    label: str = ""
    """Name of its one label; empty: none."""
    values: tuple[str, ...] = ()
    """Values of the label that are known beforehand. They exist with 0 from the start, because
    `increase()` never sees the first count of a counter that begins with it."""
    buckets: tuple[float, ...] = ()
    """Upper bounds, in the unit of the name."""


ABORTED = "aborted"
"""Reason of a load whose request is gone. The others are `MissReason`s."""
INCOMPLETE = "incomplete"
"""Reason of a transfer within a step whose forward did not name each layer once."""
PINNED = "pinned_fraction"
"""Reason of a block that was never given to a save, because of the setting that bounds them."""
ERROR = "error"
"""Reason of a transfer that ended with an exception: see the log."""

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# Of a transfer that ended before all was done.
_ENDED_BY = (MissReason.DEADLINE, MissReason.TOO_BUSY, MissReason.NO_STORE, INCOMPLETE, ERROR)

# Counted by the scheduler side, when a request has ended.
REQUESTS = Metric("kvstore_requests", "Requests that have ended")
POSSIBLE_TOKENS = Metric(
    "kvstore_possible_tokens", "Prompt tokens in full store blocks: the most that can hit"
)
HIT_TOKENS = Metric("kvstore_hit_tokens", "Of those, loaded from the store")
LOCAL_TOKENS = Metric("kvstore_local_tokens", "Of those, found in the engine's own cache")
MISSED_REQUESTS = Metric(
    "kvstore_missed_requests",
    "Requests that got less than was possible, by reason (docs/explain.md)",
    "reason",
    tuple(MissReason),
)
LAST_TOKEN = "last-token"
"""The one token that an engine computes in any case: its output is wanted."""
NOT_ASKED = "not-asked"
"""Of requests that ended before their lookup did."""
MISSED_TOKENS = Metric(
    "kvstore_missed_tokens",
    "Of the possible tokens, computed, by reason: possible = hit + local + missed",
    "reason",
    (*MissReason, LAST_TOKEN, NOT_ASKED),
)
SLOWER_TOKENS = Metric(
    "kvstore_slower_tokens",
    "Tokens found and not loaded, as computing them is quicker, by where they are",
    "tier",
    tuple(Tier),
)
# Counted by the scheduler side, when nodes were asked to retain blocks.
NO_NODE = "no-node"
"""No node of this host could be asked."""
TOO_BUSY = str(MissReason.TOO_BUSY)
RESULT_OF = {one: one.name.lower().replace("_", "-") for one in Retained}
RETAINED_BLOCKS = Metric(
    "kvstore_retained_blocks",
    "Blocks, per shard, that requests wanted retained or released, by what became of it",
    "result",
    (*RESULT_OF.values(), NO_NODE, TOO_BUSY),
)
# Counted by the scheduler side, when blocks were to be brought from other hosts.
PREFETCHED_BLOCKS = Metric(
    "kvstore_prefetched_blocks",
    "Blocks, per shard, that requests wanted on this host and another one had, by what became "
    "of it",
    "result",
    ("yes", "here", "lost", "rejected", NO_NODE, TOO_BUSY),
)
# Counted by the scheduler side, with `save_decode` auto.
ASKED, UNASKED = "yes", "no"
GENERATED_BLOCKS = Metric(
    "kvstore_generated_blocks",
    "Saved blocks that hold generated tokens, once they are old or evicted, by whether they were "
    "asked for since",
    "asked",
    (ASKED, UNASKED),
)
# Counted by the scheduler side, once.
BLOCK_TOKENS = Metric("kvstore_block_tokens", "Tokens of a store block, which is loaded whole")
# Counted by the scheduler side, when a request first gets an answer.
LOOKUP_BLOCKS = Metric("kvstore_lookup_blocks", "Store blocks looked up, once for each request")
FOUND_BLOCKS = Metric("kvstore_found_blocks", "Of those, leading ones that could be loaded")
# Counted by the scheduler side, when a lookup is answered.
LOOKUP_SECONDS = Metric(
    "kvstore_lookup_seconds", "From asking for a prompt to its answer", buckets=_SECONDS
)
# Counted by each worker, its own shard alone.
LOADED_BLOCKS = Metric("kvstore_loaded_blocks", "Store blocks loaded, per worker")
LOADED_BYTES = Metric("kvstore_loaded_bytes", "Bytes written into engine blocks by loads")
LOAD_SECONDS = Metric(
    "kvstore_load_seconds", "From the start of a request's load to its end", buckets=_SECONDS
)
FAILED_LOADS = Metric(
    "kvstore_failed_loads",
    "Loads that ended before all was there",
    "reason",
    (*_ENDED_BY, MissReason.LOAD_FAILED, MissReason.SLOWER, ABORTED),
)
CUT_LOADS = Metric(
    "kvstore_cut_loads",
    "Loads ended early as computing is quicker, or their time was over, by what was read then",
    "tier",
    tuple(Tier),
)
SAVED_BLOCKS = Metric("kvstore_saved_blocks", "Store blocks written and committed, per worker")
SAVED_BYTES = Metric("kvstore_saved_bytes", "Bytes of those")
UNSAVED_BLOCKS = Metric(
    "kvstore_unsaved_blocks",
    "Store blocks that the memory node gave no slot for: exists, in_progress or rejected; and "
    "those of requests that ended while other saves held what they may: pinned_fraction",
    "reason",
    (PutStatus.EXISTS, PutStatus.IN_PROGRESS, PutStatus.REJECTED, PINNED),
)
SAVE_SECONDS = Metric(
    "kvstore_save_seconds",
    "From the end of the forward that filled blocks to their commit",
    buckets=_SECONDS,
)
DROPPED_SAVES = Metric(
    "kvstore_dropped_saves",
    "Save jobs that were given up",
    "reason",
    (*_ENDED_BY, MissReason.NODE_DEAD, ABORTED),
)
# Counted by each worker, once for each load or save that is in such a copy.
STUCK_LOADS = Metric("kvstore_stuck_loads", "Loads whose copy was under way for COPY_STUCK_S")
STUCK_SAVES = Metric(
    "kvstore_stuck_saves", "Saves whose copy or commit was under way for COPY_STUCK_S"
)
READ_BYTES = Metric(
    "kvstore_read_bytes",
    "Bytes of store blocks read by the worker: shm, cuda_ipc, disk, nixl, nixl_vram, stream",
    "transport",
    ("shm", "cuda_ipc", "disk", "nixl", "nixl_vram", "stream"),
)
PAGE_LOCKED_BYTES = Metric(
    "kvstore_page_locked_bytes", "Bytes of the store's memory page-locked for the worker's device"
)
UNLOCKED_BYTES = Metric(
    "kvstore_unlocked_bytes",
    "Bytes of the store's memory that could not be page-locked: their copies are slower",
    "reason",
)

METRICS = tuple(value for value in globals().values() if isinstance(value, Metric))


class Counts:
    """Adds up counts and samples until somebody takes them. Thread-safe.

    Clients and nodes of `kvstore` have plain dictionaries of totals that only grow instead: who
    reads those may ask at any time, and takes nothing away from the next one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}
        self._samples: dict[str, deque[float]] = {}
        self._read_bytes: dict[str, int] = {}
        """Bytes by transport at the last call of `read`."""

    def add(self, metric: Metric, count: float = 1, label: str = "") -> None:
        key = f"{metric.name}:{label}" if metric.label else metric.name
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + count

    def observe(self, metric: Metric, value: float) -> None:
        """Add one sample to a histogram."""
        with self._lock:
            samples = self._samples.setdefault(metric.name, deque(maxlen=STATS_SAMPLES_MAX))
            samples.append(value)

    def page_locked(self, size_bytes: int, failure: str) -> None:
        """Count bytes of the store's memory that are page-locked, or not because of `failure`."""
        if failure:
            self.add(UNLOCKED_BYTES, size_bytes, failure)
        else:
            self.add(PAGE_LOCKED_BYTES, size_bytes)

    def read(self, totals: Mapping[str, int]) -> None:
        """Count what came since the last call, by what the store's `read_bytes` says."""
        with self._lock:
            before, self._read_bytes = self._read_bytes, dict(totals)
        for transport, total in totals.items():
            if total > before.get(transport, 0):
                self.add(READ_BYTES, total - before.get(transport, 0), transport)

    def take(self) -> CountStats | None:
        """Return all that was counted since the last call; None: nothing."""
        with self._lock:
            counts, self._counts = self._counts, {}
            samples, self._samples = self._samples, {}
        stats = CountStats(counts | {name: list(values) for name, values in samples.items()})
        return None if stats.is_empty() else stats


def labelled(counts: Mapping[str, _Value]) -> Iterator[tuple[str, str, _Value]]:
    """Yield (name, label or "", count or samples) of each entry of `CountStats.to_dict`."""
    for key, value in counts.items():
        name, _, label = key.partition(":")
        yield name, label, value


def summary(counts: Mapping[str, float | list[float]]) -> dict[str, float]:
    """Return `CountStats.to_dict` for people: of samples their number, mean and maximum."""
    out: dict[str, float] = {}
    for key, value in counts.items():
        if not isinstance(value, list):
            out[key] = value
        elif value:
            out[f"{key}_count"] = len(value)
            out[f"{key}_mean"] = round(sum(value) / len(value), 6)
            out[f"{key}_max"] = round(max(value), 6)
    return out
