"""Bits that flip, writes that are lost or go elsewhere, and what fails: an answer is right, or a
miss."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
from disk_parts import LOG_BYTES, PAGE, REGIONS, SmallNode

from kvstore.segment.disk.format import SUPERBLOCK_COPIES

SEEDS = 100
KINDS = ("superblock", "log", "header", "entries", "payload")


def page_of(kind: str, node: SmallNode, rng: random.Random) -> int:
    """Return a page that was written, if one of that kind was."""
    geometry = node.device.geometry
    start = geometry.start(rng.randrange(REGIONS))
    log = SUPERBLOCK_COPIES + rng.randrange(LOG_BYTES // PAGE)
    pages = {
        "superblock": rng.randrange(SUPERBLOCK_COPIES),
        "log": rng.choice(
            [page for page in node.disk.pages if 2 <= page < geometry.start(0)] or [log]
        ),
        "header": start,
        "entries": start + 1,
        "payload": start + 2 + rng.randrange(geometry.payload_pages),
    }
    return pages[kind]


def flip(kind: str) -> Callable[[SmallNode], None]:
    def befall(node: SmallNode) -> None:
        # Most of what is in a page is at its beginning.
        bit = node.rng.randrange(node.rng.choice([128 * 8, 1024 * 8, PAGE * 8]))
        node.disk.flip(page_of(kind, node, node.rng), bit)

    return befall


def lose(node: SmallNode) -> None:
    node.disk.lost_writes = 1
    for _ in range(6):
        node.act()


def misdirect(node: SmallNode) -> None:
    node.disk.misdirected_writes = 1
    for _ in range(6):
        node.act()


def fail(what: str) -> Callable[[SmallNode], None]:
    def befall(node: SmallNode) -> None:
        if what == "read":
            node.disk.unreadable = {page_of(node.rng.choice(KINDS), node, node.rng)}
        else:
            setattr(node.disk, f"failing_{what}s", node.rng.randint(1, 2))
        for _ in range(10):
            node.act()
        node.disk.failing_writes = node.disk.failing_syncs = 0
        for _ in range(10):
            node.act()

    return befall


FAULTS = {kind: flip(kind) for kind in KINDS} | {"lost": lose, "misdirected": misdirect}
FAULTS |= {f"failing_{what}": fail(what) for what in ("read", "write", "sync")}


def survive_damage(fault: str, seeds: Iterable[int]) -> int:
    """Return how many answers were no misses, after one fault each."""
    hits = 0
    for seed in seeds:
        try:
            node = SmallNode(seed)
            node.live(15)
            node.live(12, FAULTS[fault])
            node.disk.lost_writes = node.disk.misdirected_writes = 0
            node.disk.unreadable.clear()
            node.live(12)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        hits += node.hits
    return hits


@pytest.mark.parametrize("fault", FAULTS)
def test_answers_are_right_after(fault: str) -> None:
    assert survive_damage(fault, range(SEEDS)) > SEEDS


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", FAULTS)
def test_answers_are_right_after_many_times(fault: str) -> None:
    survive_damage(fault, range(SEEDS, 10_000))
