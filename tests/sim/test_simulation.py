"""Seeds of the protocol simulation. A failing seed replays with `scripts/sim --seed N`."""

import os

import pytest

from kvstore.testing.sim import Faults, run

SEEDS = int(os.environ.get("KVSTORE_SIM_SEEDS", "200"))
FOUND = [4]
"""Seeds that once found a bug: 4, a stale record nobody removed."""


@pytest.mark.parametrize("first", range(0, SEEDS, 20))
def test_the_rules_hold_whatever_luck_brings(first):
    for seed in range(first, min(first + 20, SEEDS)):
        run(seed)


@pytest.mark.parametrize("seed", FOUND)
def test_a_seed_that_found_a_bug_stays_clean(seed):
    run(seed)


def test_a_seed_replays_exactly():
    assert run(7) == run(7)


def test_on_a_quiet_day_gets_hit_and_nothing_is_lost():
    hits = 0
    for seed in range(8):
        counts = run(seed, Faults().calm()).counts
        hits += counts["hits"]
        assert "requests_lost" not in counts
        assert "clients_killed" not in counts
    assert hits > 100


def test_luck_does_strike():
    """Otherwise the simulation proves nothing."""
    total: dict[str, int] = {}
    for seed in range(40):
        for what, count in run(seed).counts.items():
            total[what] = total.get(what, 0) + count
    for what in ("hits", "stale", "clients_killed", "node_restarts", "requests_lost", "committed"):
        assert total.get(what, 0) > 10, (what, total)
