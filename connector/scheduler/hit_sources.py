"""Computes where the tokens of a load come from: pure arithmetic over plain data.

A token counts once, for the farthest place of what is loaded for it: all groups and shards have
to come before it can be used. Of a group with a window, chunks or states only what the end of the
prefix needs is loaded, and counts. Tokens for which nothing is loaded count nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvstore.spi import BlockRef, Tier

if TYPE_CHECKING:
    from connector.layout.block_plan import Placement
    from connector.layout.geometry import StoreLayout

FARTHER = {tier: distance for distance, tier in enumerate(Tier)}


def hit_sources(
    placement: Placement,
    start_token: int,
    num_tokens: int,
    layout: StoreLayout,
    tiers: Callable[[Sequence[BlockRef]], Sequence[Tier]],
) -> dict[Tier, int]:
    """Return how many of the tokens `start_token` to `start_token + num_tokens` come from where."""
    size, end_token = layout.block_tokens, start_token + num_tokens
    needed_from = [
        group.needed_from(end_token) if group.forgetful else 0 for group in layout.groups
    ]
    spans: list[tuple[int, int]] = []
    """(tokens, blocks that are loaded for them)"""
    found: list[BlockRef] = []
    for index in range(start_token // size, -(-end_token // size)):
        begin, end = max(start_token, index * size), min(end_token, (index + 1) * size)
        before = len(found)
        for row, first in zip(placement, needed_from, strict=True):
            placed = row[index] if index < len(row) and first < end else None
            if placed is not None:
                found += placed.found
        spans.append((end - begin, len(found) - before))
    places = iter(tiers(found))
    sources: dict[Tier, int] = {}
    for tokens, count in spans:
        if count:
            tier = max((next(places) for _ in range(count)), key=FARTHER.__getitem__)
            sources[tier] = sources.get(tier, 0) + tokens
    return sources
