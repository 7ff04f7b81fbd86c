"""Measures whether large copies, which go past the caches, are fast on this processor.

How to stream depends on who made the processor, and the wrong way took six times as long as the
right one (docs/decisions/0077): no test can see that, only a look at the machine itself."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from statistics import median

from kvstore.cli.checks.base import Context, Finding, Level
from kvstore.segment import batch_read

BATCH_BYTES = 32 << 20
"""More than what a core has of the third cache; streamed, as every put of that much is."""
BLOCK_BYTES = 1 << 20
TURNS = 5
RATIO_MIN = 0.75
"""Of a `memcpy` of the same turn. Less is no noise any more: streaming gives 1.5 where it suits."""


def look(context: Context) -> list[Finding]:
    """Copy a batch of blocks as the store does and by `memcpy`, in turns."""
    reader = batch_read.READER
    with mmap.mmap(-1, BATCH_BYTES) as source, mmap.mmap(-1, BATCH_BYTES) as target:
        source[:] = target[:] = bytes(BATCH_BYTES)  # so that every page is there
        with memoryview(source) as read, memoryview(target) as written:
            starts = range(0, BATCH_BYTES, BLOCK_BYTES)
            sources = [read[start : start + BLOCK_BYTES] for start in starts]
            targets = [written[start : start + BLOCK_BYTES] for start in starts]

            def by_memcpy() -> None:
                for into, block in zip(targets, sources, strict=True):
                    into[:] = block

            turns = [
                (_seconds(by_memcpy), _seconds(lambda: reader.copy_each(targets, sources)))
                for _ in range(TURNS)
            ]
            for part in (*sources, *targets):
                part.release()
    plain_s, ours_s = (median(column) for column in zip(*turns, strict=True))
    ratio = median(plain / ours for plain, ours in turns)
    found = (
        f"32 blocks of 1 MiB at {BATCH_BYTES / ours_s / 1e9:.1f} GB/s, "
        f"by memcpy at {BATCH_BYTES / plain_s / 1e9:.1f}"
    )
    if ratio >= RATIO_MIN or not reader.suits_one:  # in Python it is memcpy
        return [Finding(Level.INFO, found)]
    do = (
        "ask again on an idle machine; if it stays, KVSTORE_COMPILED=no copies by memcpy: report it"
    )
    return [Finding(Level.WARN, f"{found}: past the caches is slow on this processor", do)]


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
