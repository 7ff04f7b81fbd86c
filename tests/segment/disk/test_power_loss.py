"""Whatever of the unsynced pages lands at a power loss, an answer is right, or a miss."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from disk_parts import SmallNode

SEEDS, SEEDS_EACH, SEEDS_AT_NIGHT = 2000, 500, 100_000


def survive_power_losses(seeds: Iterable[int]) -> tuple[int, int]:
    """Return how many blocks were found by start, and how many answers were no misses."""
    adopted = hits = 0
    for seed in seeds:
        try:
            node = SmallNode(seed)
            for _ in range(2):
                node.live(20)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        adopted, hits = adopted + node.adopted, hits + node.hits
    return adopted, hits


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_EACH))
def test_answers_are_right_after_any_power_loss(first: int) -> None:
    adopted, hits = survive_power_losses(range(first, first + SEEDS_EACH))
    assert adopted > 3 * SEEDS_EACH
    assert hits > 2 * SEEDS_EACH


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_answers_are_right_after_very_many_power_losses() -> None:
    survive_power_losses(range(SEEDS, SEEDS_AT_NIGHT))
