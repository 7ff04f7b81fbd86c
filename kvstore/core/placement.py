"""Which node takes a block that has no node on its writer's host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

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
