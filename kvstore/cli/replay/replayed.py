"""Feeds a trace to the core of a node, as engines would, and counts what they would have found."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import NamedTuple

from kvstore.batches import in_batches
from kvstore.cli.replay.disk import ReplayedDisk, disk_of
from kvstore.cli.replay.optimum import NEVER, Pieces
from kvstore.cli.replay.traces import PromptTrace
from kvstore.core.disk.base import DISK_PAGE
from kvstore.core.events import Reserve, Retain, Touch
from kvstore.core.memory.eviction import POLICIES
from kvstore.core.memory.granules import GRANULE_BYTES, granules_of
from kvstore.core.node import NodeCore
from kvstore.types import Key

CLIENT, REQUEST, NAMESPACE_ID = 1, 1, 1
SAVED_AT_ONCE = 64
"""Blocks that an engine saves at a time; the disk has its turn between."""
HINT_S = 600
"""How long a hint has the blocks of a prompt retained: until the next hint of its session says
otherwise, mostly."""
VALUE = b""
"""Of every block: a core copies no payload, it only says where to."""


def keys_of(trace: PromptTrace) -> list[Key]:
    """Return the key of each block number."""
    numbers = range(trace.distinct)
    return [blake2b(b"%d" % number, digest_size=32).digest() for number in numbers]


def slot_bytes(block_bytes: int) -> int:
    """Return what a block takes of a node."""
    return granules_of(block_bytes) * GRANULE_BYTES


class Found(NamedTuple):
    hits: int
    """Blocks of leading runs that the node would have had."""
    disk_written: int = 0
    disk_read: int = 0
    """Of the hits, those that were on the disk alone."""
    disk_again: int = 0
    """Of those written, what was on the disk since it was saved."""


def replayed(
    trace: PromptTrace,
    keys: Sequence[Key],
    *,
    size_bytes: int,
    block_bytes: int,
    policy: str,
    disk_bytes: int = 0,
    disk_writes_per_day: float = 1.0,
    hints: Sequence[bool] | None = None,
) -> Found:
    """Return what a node of that size finds.

    `hints`: for each prompt, whether its blocks are to be retained (`HINT_S`), or released.
    """
    core = NodeCore(node_id=1, epoch=1, size_bytes=size_bytes, policy=POLICIES[policy])
    if not disk_bytes:
        return Found(_hits(core, None, trace, keys, block_bytes, hints)[0])
    with disk_of(core, disk_bytes, disk_bytes // block_bytes, disk_writes_per_day) as disk:
        hits, read = _hits(core, disk, trace, keys, block_bytes, hints)
        each = -(-block_bytes // DISK_PAGE) * DISK_PAGE
        return Found(hits, disk.written_bytes // each, read, disk.again_bytes // each)


def _hits(
    core: NodeCore,
    disk: ReplayedDisk | None,
    trace: PromptTrace,
    keys: Sequence[Key],
    block_bytes: int,
    hints: Sequence[bool] | None,
) -> tuple[int, int]:
    """Return how many blocks are found, and how many of them on the disk alone."""
    by_key, outbox = core.blocks.by_key, core.blocks.outbox
    hits = read = 0
    for number, (now, prompt) in enumerate(zip(trace.times, trace.prompts, strict=True)):
        asked = list(map(keys.__getitem__, prompt))
        if disk is not None:
            disk.work(now)  # what there was time for
        found = len(list(takewhile(by_key.__contains__, asked)))
        if disk is not None:
            while found < len(asked) and (asked[found] in by_key or disk.holds(asked[found])):
                read += asked[found] not in by_key
                found += 1
        hits += found
        # As a connector does it: what was loaded was used, the rest is computed and saved, and
        # then the whole run was used, so that its end goes first.
        if new := asked[found:]:
            core.handle(Touch(CLIENT, asked[:found]), now)
        for some in in_batches(new, SAVED_AT_ONCE):
            none = [0] * len(some)
            sizes, values = [block_bytes] * len(some), [VALUE] * len(some)
            save = Reserve(CLIENT, REQUEST, some, sizes, NAMESPACE_ID, none, none, values, none)
            core.handle(save, now)
            if disk is not None:
                disk.work(now)
        core.handle(Touch(CLIENT, asked), now)
        if disk is not None:
            disk.work(now)
        if hints is not None:
            ttl_s = HINT_S if hints[number] else 0
            core.handle(Retain(CLIENT, REQUEST, asked, ttl_s, prompt[0]), now)
        # The index hears of all of it at once.
        while work := outbox.take_publications(outbox.publications_pending):
            outbox.published(work)
        outbox.removed(outbox.take_removals(outbox.removals_pending))
    return hits, read


def hints_of(uses: Sequence[Pieces], right: float, seed: int) -> list[bool]:
    """Return for each prompt whether it is said to go on: that its end but for the last block is
    used again. A share of `right` is true."""
    rng = random.Random(seed)
    said: list[bool] = []
    for pieces in uses:
        use, count = pieces[-1]
        goes_on = use != NEVER or (count == 1 and len(pieces) > 1)
        said.append(goes_on if rng.random() < right else not goes_on)
    return said
