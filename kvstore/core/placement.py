"""Which node takes a block: of several on its writer's host, or of those on other hosts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

from kvstore.types import TAG_BYTES, Key

_MIX = 0x9E3779B97F4A7C15
"""An odd number with no pattern: multiplying by it scatters neighbours."""


class Candidate(NamedTuple):
    node_id: int
    free_bytes: int
    """Without evicting anything, as far as is known."""


def emptiest_first(candidates: Iterable[Candidate], salt: int) -> list[int]:
    """Node ids, the one with most free bytes first.

    Nodes that are equally full (a cache mostly is) are in an order that `salt`
    decides, so that writers with different salts spread over them.
    """

    def order(candidate: Candidate) -> tuple[int, int]:
        scattered = (candidate.node_id ^ salt) * _MIX & (1 << 64) - 1
        return -candidate.free_bytes, scattered

    return [candidate.node_id for candidate in sorted(candidates, key=order)]


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
    """The node id for each of `blocks`, which are (key, size in bytes); `homes` is not empty.

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
