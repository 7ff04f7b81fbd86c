"""From where the tokens of a load come."""

from __future__ import annotations

from collections.abc import Sequence

from connector_parts import BLOCK, ENGINE_BLOCK, GEOMETRY, Side, prompt

from connector.layout.block_plan import Placed
from connector.layout.geometry import GroupLayout, StoreLayout
from connector.layout.topology import TpKVTopology
from connector.scheduler.hit_sources import hit_sources
from kvstore.spi import BlockRef, Tier
from kvstore.testing.blockstore import MemoryBlockStore

LETTERS = {"v": Tier.VRAM, "h": Tier.HOST, "d": Tier.DISK, "o": Tier.OTHER_HOST}


def layout(*windows: int | None) -> StoreLayout:
    groups = tuple(
        GroupLayout(geometry=GEOMETRY, topology=TpKVTopology.of(), splits=(), window_tokens=window)
        for window in windows
    )
    return StoreLayout(block_tokens=BLOCK, hash_block_tokens=BLOCK, groups=groups)


def row(where: str) -> list[Placed | None]:
    """A block per word: a letter for each shard; "." is one that is nowhere."""
    return [
        None if word == "." else Placed(0, tuple(BlockRef(b"", c.encode()) for c in word))
        for word in where.split()
    ]


def tiers(found: Sequence[BlockRef]) -> list[Tier]:
    return [LETTERS[bytes(one.record).decode()] for one in found]


def of(rows: Sequence[str], *windows: int | None, start: int = 0, end: int) -> dict[Tier, int]:
    placement = [row(where) for where in rows]
    return hit_sources(placement, start, end - start, layout(*windows), tiers)


def test_each_block_counts_for_where_it_lies() -> None:
    found = of(["h o v h"], None, end=4 * BLOCK)
    assert found == {Tier.HOST: 2 * BLOCK, Tier.OTHER_HOST: BLOCK, Tier.VRAM: BLOCK}


def test_the_farthest_shard_counts_for_all() -> None:
    assert of(["ho vh vv dh do"], None, end=5 * BLOCK) == {
        Tier.OTHER_HOST: 2 * BLOCK,
        Tier.DISK: BLOCK,
        Tier.HOST: BLOCK,
        Tier.VRAM: BLOCK,
    }


def test_what_the_engine_had_or_made_no_room_for_does_not_count() -> None:
    found = of(["h o h"], None, start=ENGINE_BLOCK, end=2 * BLOCK + ENGINE_BLOCK)
    assert found == {
        Tier.HOST: BLOCK - ENGINE_BLOCK + ENGINE_BLOCK,
        Tier.OTHER_HOST: BLOCK,
    }


def test_of_a_window_only_what_the_end_needs_counts() -> None:
    rows = ["h h h", "o o o"]
    assert of(rows, None, BLOCK, end=3 * BLOCK) == {Tier.HOST: 2 * BLOCK, Tier.OTHER_HOST: BLOCK}


def test_tokens_for_which_nothing_is_loaded_count_nowhere() -> None:
    assert of(["h . h"], None, end=3 * BLOCK) == {Tier.HOST: 2 * BLOCK}
    assert of([". . v"], BLOCK, end=3 * BLOCK) == {Tier.VRAM: BLOCK}


def test_the_scheduler_side_says_it_of_the_load_that_it_planned(
    side: Side, store: MemoryBlockStore
) -> None:
    request = prompt(3)
    side.put(request, 3)
    first, second, _ = side.keys(request)[:3]
    store.elsewhere = {first: Tier.VRAM, second: Tier.OTHER_HOST}
    offered = side.match(request)
    assert side.core.hit_sources(request.request_id, offered) == {}, "none was planned"
    side.core.allocated(request, lambda: [list(range(101, 120))], offered)
    assert side.core.hit_sources(request.request_id, offered) == {
        Tier.VRAM: BLOCK,
        Tier.OTHER_HOST: BLOCK,
        Tier.HOST: BLOCK,
    }
    assert side.core.hit_sources(request.request_id, BLOCK + 1) == {
        Tier.VRAM: BLOCK,
        Tier.OTHER_HOST: 1,
    }
