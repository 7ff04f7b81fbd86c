"""Runs one seed, from the start until everything has settled."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from kvstore.testing.sim.edges import simulated
from kvstore.testing.sim.faults import Faults
from kvstore.testing.sim.luck import Luck
from kvstore.testing.sim.world import World

TROUBLE_S = (3.0, 12.0)
"""How long faults go on, in simulated seconds."""
SETTLE_MAX_S = 30.0
POLL_S = 0.25


class Report(NamedTuple):
    """Tells what came of one seed that broke no rule."""

    seed: int
    steps: int
    counts: dict[str, int]


def run(
    seed: int,
    faults: Faults | None = None,
    *,
    strike: tuple[int, str] | None = None,
    trouble_s: tuple[float, float] = TROUBLE_S,
    watch: Callable[[World], None] = lambda world: None,
) -> Report:
    """Simulate one seed; raises `ViolationError` when a rule breaks. The same seed, the same run.

    Without `faults` the seed draws its own. `strike` is a step and the name of a fault
    that comes then, whatever the rates. `watch` is shown the world before it begins.
    """
    world = World(seed, faults or Faults().drawn_by(seed))
    watch(world)
    cpus = os.sched_getaffinity(0)
    # The baton passes many times faster where the next thread runs on the same core.
    os.sched_setaffinity(0, {min(cpus)})
    try:
        with simulated(world):
            try:
                _play(world, strike, trouble_s)
            finally:
                world.end()
    finally:
        os.sched_setaffinity(0, cpus)
    return Report(seed, world.step, world.counts)


def _play(world: World, strike: tuple[int, str] | None, trouble_s: tuple[float, float]) -> None:
    luck = Luck(world)
    if strike is not None:
        step, name = strike
        world.on_step[step] = lambda: luck.strike(name)
    world.sleep(world.rng.uniform(*trouble_s))
    world.note("the last fault is over")
    world.calm = True
    world.faults = world.faults.calm()
    while luck.living_clients():
        world.sleep(POLL_S)
    give_up_at = world.now + SETTLE_MAX_S
    while (wrong := world.checks.settled()) is not None:
        if world.now > give_up_at:
            world.fail(f"rule 7: {SETTLE_MAX_S} s after the last client {wrong}")
        world.sleep(POLL_S)
    world.checks.all_nodes()
