"""Measures what loads read, and judges whether one takes longer than computing what it loads."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from connector.layout.shard_reads import bytes_of, found_in
from connector.limits import (
    LOAD_SOURCES_MAX,
    LOAD_TRY_BYTES,
    LOAD_WINDOW_S,
    READ_TIMEOUT_MIN_S,
    READS_MAX,
)
from connector.messages import BlockRead, LoadBlock, is_far

if TYPE_CHECKING:
    from connector.layout.shard_reads import GroupReads
    from kvstore.spi import BlockStore

_TRY_SHARE = 1 / 16
"""What is read first of a load whose source is not known, at most."""
_PATIENCE, _RISK = 3.0, 0.125
"""A read may take so many times as long as expected, or this share of computing all of its load."""
_WORTH, _WORTH_S = 1.25, 0.02
"""A load ends when the rest takes so much longer than computing: to go on costs the engine a
step."""


def far_of(
    store: BlockStore, groups: Sequence[GroupReads], blocks: Sequence[LoadBlock]
) -> set[str]:
    """Return the sources of `blocks` that are not the memory of this host."""
    return set(filter(is_far, store.sources(found_in(groups, blocks))))


def takes_too_long(
    left: float, took_s: float, compute_s: float | None, *, by_request: bool
) -> bool:
    """Return whether what is left of a load, a share of it, takes longer than computing it;
    `by_request` all of it would be computed again."""
    if compute_s is None or left >= 1.0:
        return False
    compute_s *= 1.0 if by_request else left
    return took_s / (1.0 - left) * left > _WORTH * compute_s + _WORTH_S


class LoadPaces:
    """Remembers how fast each source was, and what is still to be reported. One thread measures,
    another one takes."""

    def __init__(self) -> None:
        self._byte_s: dict[str, float] = {}
        """Source -> seconds that a byte took last."""
        self._reads: deque[BlockRead] = deque(maxlen=READS_MAX)

    def next_read(
        self, far: set[str], total_bytes: int, compute_s: float | None, most: int
    ) -> tuple[int, float]:
        """Return how many bytes to read next of a load, at most `most`, and for how many seconds.
        `compute_s` is what computing all of the load takes."""
        if not far or compute_s is None:
            return most, math.inf
        least = min(most, LOAD_TRY_BYTES, max(1, int(total_bytes * _TRY_SHARE)))
        if not far <= self._byte_s.keys():
            return least, math.inf
        slowest = max(self._byte_s[name] for name in far)
        size_bytes = min(most, max(least, int(LOAD_WINDOW_S / slowest)))
        expected_s = size_bytes * slowest
        return size_bytes, max(READ_TIMEOUT_MIN_S, _PATIENCE * expected_s, _RISK * compute_s)

    def measured(
        self,
        store: BlockStore,
        groups: Sequence[GroupReads],
        window: Sequence[LoadBlock],
        loaded: int,
        took_s: float,
    ) -> None:
        """Note that the first `loaded` blocks of a window came in `took_s`. Sources that are not
        this host's memory share the time by what they were asked for: beside them memory takes
        none."""
        asked: dict[str, tuple[int, int]] = {}
        names = iter(store.sources(found_in(groups, window)))
        for number, block in enumerate(window):
            size_bytes = bytes_of(groups, block)
            pieces = groups[block.group].pieces(block.split) if block.found else ()
            for name in {next(names) for _ in pieces}:
                wanted, came = asked.get(name, (0, 0))
                asked[name] = wanted + size_bytes, came + size_bytes * (number < loaded)
        far = {name: sizes for name, sizes in asked.items() if is_far(name)} or asked
        total = sum(wanted for wanted, _ in far.values())
        for name, (wanted, came) in far.items():
            read = BlockRead(name, came, took_s * wanted / total)
            self._reads.append(read)
            if len(self._byte_s) >= LOAD_SOURCES_MAX:
                self._byte_s.clear()
            self._byte_s[name] = max(read.took_s, 1e-9) / max(came, 1)

    def take(self) -> list[BlockRead]:
        """Return what was measured since the last call."""
        return [self._reads.popleft() for _ in range(len(self._reads))]
