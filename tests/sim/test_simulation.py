"""Seeds of the simulation. A failing seed replays with `scripts/sim --seed N`."""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
from each_input import each

from kvstore.testing.sim import Faults, run
from kvstore.testing.sim.faults import PER_MESSAGE
from kvstore.testing.sim.many import together, try_many, try_seed, workers

pytestmark = pytest.mark.timeout(600)  # of a machine that is busy with other things

SEEDS = int(os.environ.get("KVSTORE_SIM_SEEDS", "1000"))
SEEDS_A_TEST = 100
QUICK_SEEDS = 100
"""Without the tests that are long."""
QUIET = Faults().calm()
SHORT_S = (0.6, 0.6)
STEPS_STRUCK = 160
STRIKES = {
    "client_kill": 1,
    "node_kill": 3,
    "node_kill_warm": 2,
    "connection_loss": 3,
    "client_signal": 1,
}
"""What may strike, and at every how many steps the long tests have it."""
EVERY_QUICK = 13
"""In the others: prime, so that no rhythm of the program hides from it."""


@pytest.fixture(scope="module")
def pool():
    with workers(len(os.sched_getaffinity(0))) as pool:
        yield pool


@pytest.fixture(scope="module")
def counts():
    """What happened, over all seeds of this module."""
    return Counter()


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.long] if first >= QUICK_SEEDS else [])
        for first in range(0, SEEDS, SEEDS_A_TEST)
    ],
)
def test_the_rules_hold_whatever_luck_brings(first, pool, counts):
    outcome = together(try_many(pool, first, min(SEEDS_A_TEST, SEEDS - first)))
    counts.update(outcome.counts)
    told = [f"seed {b.seed}: {b.rule}" for b in outcome.broken]
    assert not told, "\n".join([*told, *outcome.broken[0].trace])


@each(
    ("seed", "found"),
    [
        (14433, "an index that failed over before its node's first heartbeat kept a stale record"),
        (22831, "the same"),
        (33883, "a publication that failed and was withdrawn ended all looks for lost records"),
        (20344, "a pin that its client never heard of stayed for as long as the client"),
        (21607, "of an empty start's block the checks believed that a former start had held it"),
        (
            49603,
            "stops of a stopped node added up, until it was away for longer than the checks wait",
        ),
    ],
)
def test_a_seed_that_found_something_finds_it_no_more(seed, found):
    (broken,) = try_seed(seed, whole_trace=True).broken
    assert not broken.rule, "\n".join([found, *broken.trace[-100:], broken.rule])


def test_luck_does_strike(counts):
    """Otherwise the simulation proves nothing."""
    if not counts:
        counts = together(try_seed(seed) for seed in range(40)).counts
    # In one seed of a hundred a child outlives its parent.
    counts = counts + try_seed(121).counts
    strikes = {f.name for f in fields(Faults)} - PER_MESSAGE
    outcomes = {"hits", "misses", "stale", "stored", "exists", "in_progress", "rejected", "failed"}
    outcomes |= {"interrupted", "outlived"}
    assert not {what for what in strikes | outcomes if not counts[what]}


def test_on_a_quiet_day_gets_hit_and_nothing_fails():
    counts = Counter()
    # In one seed of five somebody draws a time-out of some milliseconds, or a node is too late
    # for 2 s even so: each step takes a simulated millisecond.
    for seed in range(92, 100):
        counts.update(run(seed, QUIET).counts)
    assert counts["hits"] > 500
    assert "failed" not in counts


def test_a_seed_replays_exactly():
    assert run(7) == run(7)


def test_a_seed_replays_exactly_in_another_process():
    """Nothing may depend on the order of a set of strings."""

    def trace(hash_seed: str) -> str:
        program = (
            "from kvstore.testing.sim.many import try_seed;"
            "print(*try_seed(9, whole_trace=True).broken[0].trace, sep='\\n')"
        )
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path.cwd())}
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=100, check=True
        )
        return done.stdout

    first = trace("1")
    assert len(first.splitlines()) > 500
    assert first == trace("2")


@pytest.mark.parametrize(
    ("fault", "every"),
    [
        *((fault, EVERY_QUICK) for fault in STRIKES),
        *(pytest.param(fault, every, marks=pytest.mark.long) for fault, every in STRIKES.items()),
    ],
)
def test_it_may_strike_at_every_step(fault, every):
    """Not by chance: one run for each step of a short day, or for every third; for fewer where
    there is little time."""
    assert run(1, QUIET, trouble_s=SHORT_S).steps > STEPS_STRUCK
    for step in range(1, STEPS_STRUCK, every):
        run(1, QUIET, strike=(step, fault), trouble_s=SHORT_S)


def test_the_rules_hold_while_the_index_is_full():
    def fill(world):
        world.after(0.5, lambda: setattr(world.index, "full", True))
        world.after(2.5, lambda: setattr(world.index, "full", False))

    counts = Counter()
    for seed in range(12):
        counts.update(run(seed, watch=fill).counts)
    assert min(counts["index_full"], counts["hits"]) > 50
