"""Divides what one node is asked for among several connections to it.

One connection is one flow of the network, and often has less than the link: clouds give a flow 5
to 10 Gbit/s of a host's 100 (for EC2: "Amazon EC2 instance network bandwidth"), and a thread
receives 3 to 4 GB/s.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvstore.limits import STREAM_CONNECTIONS_PER_READ, STREAM_SHARE_BYTES
from kvstore.types import Location

CORES_PER_CONNECTION = 2
"""Each connection has a thread that copies what it receives; the engine beside it computes."""


def by_node(locations: Sequence[Location]) -> list[list[int]]:
    """Return the numbers of `locations`, those in memory of each start of a node together, and
    those on its disks."""
    found: dict[tuple[int, int, bool], list[int]] = {}
    for i, at in enumerate(locations):
        found.setdefault((at.node_id, at.epoch, at.segment > 0), []).append(i)
    return list(found.values())


def connections_per_read() -> int:
    """Return how many connections to one node the cores of this process are enough for."""
    cores = len(os.sched_getaffinity(0))
    return max(min(STREAM_CONNECTIONS_PER_READ, cores // CORES_PER_CONNECTION), 1)


def in_shares(which: Sequence[int], sizes: Sequence[int], count_max: int) -> list[list[int]]:
    """Cut the numbers `which` of blocks, in their order, into at most `count_max` shares.

    `sizes` are the bytes of all blocks, by number. Shares are as large as each other as blocks
    allow, and none has less than `STREAM_SHARE_BYTES` if there are several: a thread and a
    request more are not worth less.
    """
    left_bytes = sum(sizes[i] for i in which)
    left = max(min(count_max, left_bytes // STREAM_SHARE_BYTES), 1)
    shares: list[list[int]] = [[]]
    share_bytes = 0
    for i in which:
        enough = share_bytes >= max(left_bytes // left, STREAM_SHARE_BYTES)
        if enough and left_bytes - share_bytes >= STREAM_SHARE_BYTES:
            left, left_bytes = left - 1, left_bytes - share_bytes
            shares.append([])
            share_bytes = 0
        shares[-1].append(i)
        share_bytes += sizes[i]
    return shares
