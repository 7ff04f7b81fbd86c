"""Runs the router until a signal: `kvstore-router`, `python -m connector.router`."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from connector.router.options import parse


def main() -> int:
    """Return the exit code. What only the router needs is not installed with the package."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        parse()
    if find_spec("aiohttp") is None:
        print("kvstore-router: needs aiohttp: pip install aiohttp", file=sys.stderr)
        return 1
    from connector.router.run import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
