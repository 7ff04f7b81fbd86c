"""Kills processes of a store at random times and checks what is left."""

from __future__ import annotations

import argparse
import secrets
import sys
import time

from kvstore.testing.crash.loop import CrashError, CrashLoop


def main() -> int:
    parser = argparse.ArgumentParser(prog="crash-loop", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="kills (100)")
    parser.add_argument("--seed", type=int, help="of who dies when (printed; times still vary)")
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    started = time.monotonic()
    loop = CrashLoop(seed)
    try:
        loop.rounds(options.rounds)
        loop.settle()
        loop.finish()
    except CrashError as e:
        print(f"seed {seed}, {dict(loop.killed)} killed: {e}", file=sys.stderr)
        return 1
    finally:
        loop.close()
    told = {f"killed {who}": n for who, n in loop.killed.items()} | {"paused": loop.paused}
    told |= loop.counts()
    took_s = time.monotonic() - started
    print(f"{options.rounds} rounds in {took_s:.0f} s: nothing wrong, nothing left, no hang")
    print(", ".join(f"{what} {count}" for what, count in told.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
