"""Simulates many seeds on all cores, and finds a smaller example of one that breaks a rule."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from multiprocessing.pool import Pool
from typing import NamedTuple

from kvstore.testing.sim.faults import Faults
from kvstore.testing.sim.run import run
from kvstore.testing.sim.world import World

SEEDS_PER_TASK = 10


class Broken(NamedTuple):
    """Describes a seed that broke a rule."""

    seed: int
    rule: str
    trace: list[str]


class SeedOutcome(NamedTuple):
    """Tells what came of some seeds."""

    seeds: int
    steps: int
    counts: Counter[str]
    broken: list[Broken]


def try_seed(seed: int, faults: Faults | None = None, *, whole_trace: bool = False) -> SeedOutcome:
    """Simulate one seed. What goes wrong is returned, not raised."""
    seen: list[World] = []

    def watch(world: World) -> None:
        seen.append(world)
        if whole_trace:
            world.trace.keep_all()

    try:
        report = run(seed, faults, watch=watch)
    except Exception as e:
        (world,) = seen
        broken = Broken(seed, f"{type(e).__name__}: {e}", world.trace.lines())
        return SeedOutcome(1, world.step, Counter(world.counts), [broken])
    trace = [Broken(seed, "", seen[0].trace.lines())] if whole_trace else []
    return SeedOutcome(1, report.steps, Counter(report.counts), trace)


def _some(task: tuple[int, int]) -> SeedOutcome:
    first, last = task
    # Each worker passes its batons on a core of its own.
    cpus = sorted(os.sched_getaffinity(0))
    number = multiprocessing.current_process()._identity
    os.sched_setaffinity(0, {cpus[(number[0] if number else 0) % len(cpus)]})
    try:
        return together(try_seed(seed) for seed in range(first, last))
    finally:
        os.sched_setaffinity(0, cpus)


def together(outcomes: Iterator[SeedOutcome]) -> SeedOutcome:
    seeds = steps = 0
    counts: Counter[str] = Counter()
    broken: list[Broken] = []
    for outcome in outcomes:
        seeds += outcome.seeds
        steps += outcome.steps
        counts.update(outcome.counts)
        broken += outcome.broken
    return SeedOutcome(seeds, steps, counts, broken)


def workers(jobs: int) -> Pool:
    """Make processes for `try_many`. They start afresh: a fork would bring other threads' locks."""
    return multiprocessing.get_context("spawn").Pool(jobs)


def try_many(pool: Pool, first: int, count: int) -> Iterator[SeedOutcome]:
    """Simulate seeds from `first` on; yields outcomes of a few seeds each as they come."""
    end = first + count
    tasks = [(i, min(i + SEEDS_PER_TASK, end)) for i in range(first, end, SEEDS_PER_TASK)]
    return pool.imap_unordered(_some, tasks)


def shrink(seed: int) -> tuple[Faults, Broken]:
    """Find fewer kinds of faults with which this seed still breaks some rule.

    Every fault left out changes the whole run, so this finds a smaller example, not
    the same one smaller. Raises `ValueError` when the seed breaks none.
    """
    faults = Faults().drawn_by(seed)
    found = try_seed(seed, faults).broken
    if not found:
        raise ValueError(f"seed {seed} breaks no rule")
    broken = found[0]
    for name in _kinds(faults):
        fewer = faults.without(name)
        again = try_seed(seed, fewer).broken
        if again:
            faults, broken = fewer, again[0]
    return faults, broken


def _kinds(faults: Faults) -> Sequence[str]:
    return [f.name for f in fields(faults) if getattr(faults, f.name)]
