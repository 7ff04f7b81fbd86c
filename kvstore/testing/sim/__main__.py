"""Simulates many seeds, or one again, and shows those that break a rule."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from dataclasses import fields

from kvstore.testing.sim.faults import Faults
from kvstore.testing.sim.many import Broken, shrink, try_many, try_seed, workers

SEEDS, SEEDS_NIGHTLY = 1000, 50_000
BROKEN_MAX = 20
"""Failing seeds to tell of before it is enough."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"how many seeds ({SEEDS})")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--nightly", action="store_true", help=f"{SEEDS_NIGHTLY} seeds")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, help="replay this one and print every step")
    parser.add_argument("--shrink", action="store_true", help="with --seed: with fewer faults")
    options = parser.parse_args()
    if options.seed is not None:
        return _shrink(options.seed) if options.shrink else _replay(options.seed)
    return _many(options.first, SEEDS_NIGHTLY if options.nightly else options.seeds, options.jobs)


def _many(first: int, count: int, jobs: int) -> int:
    started, steps, done = time.monotonic(), 0, 0
    counts: Counter[str] = Counter()
    broken: list[Broken] = []
    with workers(jobs) as pool:
        for outcome in try_many(pool, first, count):
            done += outcome.seeds
            steps += outcome.steps
            counts.update(outcome.counts)
            for found in outcome.broken:
                print(f"seed {found.seed}: {found.rule}", file=sys.stderr, flush=True)
            broken += outcome.broken
            if len(broken) >= BROKEN_MAX:
                break
    print(f"{done} seeds, {steps} steps in {time.monotonic() - started:.1f} s", end=": ")
    if broken:
        worst = min(broken, key=lambda b: len(b.trace))
        print(f"{len(broken)} broke a rule: {sorted(b.seed for b in broken)}")
        print(*worst.trace, worst.rule, sep="\n")
        print(f"every step: scripts/sim --seed {worst.seed}")
        return 1
    print("no rule broken")
    print(", ".join(f"{what} {count}" for what, count in sorted(counts.items())))
    return 0


def _replay(seed: int) -> int:
    (seen,) = try_seed(seed, whole_trace=True).broken
    print(*seen.trace, sep="\n")
    print(f"faults: {_told(Faults().drawn_by(seed))}")
    print(seen.rule or f"seed {seed}: no rule broken")
    return int(bool(seen.rule))


def _shrink(seed: int) -> int:
    faults, broken = shrink(seed)
    print(*broken.trace, sep="\n")
    print(f"faults left: {_told(faults) or 'none'}")
    print(broken.rule)
    return 1


def _told(faults: Faults) -> str:
    rates = {f.name: getattr(faults, f.name) for f in fields(faults)}
    return ", ".join(f"{name} {rate:g}" for name, rate in rates.items() if rate)


if __name__ == "__main__":
    sys.exit(main())
