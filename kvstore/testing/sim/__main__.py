"""`python -m kvstore.testing.sim`: many seeds, or one again."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter

from kvstore.errors import InternalError
from kvstore.testing.sim.run import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds (1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--seed", type=int, help="replay this one")
    options = parser.parse_args()
    logging.getLogger("kvstore").setLevel(logging.CRITICAL)  # trouble is what it is about
    seeds = range(options.first, options.first + options.seeds)
    if options.seed is not None:
        seeds = range(options.seed, options.seed + 1)
    started, total, steps = time.monotonic(), Counter[str](), 0
    for seed in seeds:
        try:
            report = run(seed)
        except (AssertionError, InternalError) as e:
            print(f"seed {seed}: {e}", file=sys.stderr)
            return 1
        total.update(report.counts)
        steps += report.steps
    print(
        f"{len(seeds)} seeds, {steps} steps in {time.monotonic() - started:.1f} s: no rule broken"
    )
    print(", ".join(f"{what} {count}" for what, count in sorted(total.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
