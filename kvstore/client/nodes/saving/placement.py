"""Chooses the node that takes a block: of several on its writer's host, or on other hosts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from random import Random
from typing import NamedTuple

from kvstore.types import TAG_BYTES, Key

RAMP_S = 30
"""A node that has just started gets less than its share for so long: its caches and connections
are cold, and what was said of its room is true of one moment only."""
RAMP_LEAST = 0.1


class Candidate(NamedTuple):
    """A node on another host, as it announces itself."""

    node_id: int
    capacity_bytes: int
    free_bytes: int
    """Without evicting anything, as far as is known."""
    up_s: float
    """How long ago it started."""


def two_choices(candidates: Sequence[Candidate], random: Random) -> Candidate:
    """Return who takes the next save; `candidates` is not empty.

    Two are drawn, each node by its bytes, and the one of which a larger share is free takes
    it. So an empty node gets at most twice its share however many writers see it, where the
    emptiest of all would get everything from all of them; and when all are full, each gets
    its share.
    """
    weights = [c.capacity_bytes * _ramp(c) for c in candidates]
    one, other = random.choices(candidates, weights, k=2)
    return max(one, other, key=_free_share)


def _ramp(candidate: Candidate) -> float:
    return min(max(candidate.up_s / RAMP_S, RAMP_LEAST), 1.0)


def _free_share(candidate: Candidate) -> float:
    return candidate.free_bytes / candidate.capacity_bytes


class Home(NamedTuple):
    """A node on the writer's host. Sizes in bytes."""

    node_id: int
    capacity_bytes: int
    free_bytes: int
    """Without evicting anything, as far as is known."""
    value_bytes_max: int
    """The largest value that it takes."""


def homes_of(
    blocks: Sequence[tuple[Key, int]], holders: Mapping[Key, int], homes: Sequence[Home]
) -> list[int]:
    """Return the node id for each of `blocks`, which are (key, size in bytes); `homes` is not
    empty.

    A block that a node holds already goes there: it exists, and is to be used rather than
    stored again. The others go by the run tag of their key, so that all writers agree, the
    blocks of a run of a prefix lie together and each node takes what is its share of the host.
    A node without room is passed over while another has some; when all are full the first
    evicts, and each then keeps what was used last of a share of all keys.
    """
    free = {home.node_id: home.free_bytes for home in homes}
    orders: dict[bytes, list[Home]] = {}
    chosen: list[int] = []
    for key, size_bytes in blocks:
        holder = holders.get(key)
        if holder is not None and holder in free:
            chosen.append(holder)
            continue
        tag = key[:TAG_BYTES]
        order = orders.get(tag)
        if order is None:
            order = orders[tag] = sorted(homes, key=lambda home: -_draw(tag, home))
        takers = [home for home in order if size_bytes <= home.value_bytes_max] or order
        home = next((home for home in takers if size_bytes <= free[home.node_id]), takers[0])
        free[home.node_id] -= size_bytes
        chosen.append(home.node_id)
    return chosen


def _draw(tag: bytes, home: Home) -> float:
    """The highest of all nodes is the home of `tag`: each is it for a share of all tags that is
    its share of all bytes, and keeps it as far as it can when other nodes come and go."""
    word = blake2b(tag, digest_size=8, key=home.node_id.to_bytes(8, "little")).digest()
    drawn = (int.from_bytes(word, "little") + 1) / (1 << 64)
    return math.inf if drawn >= 1 else home.capacity_bytes / -math.log(drawn)
