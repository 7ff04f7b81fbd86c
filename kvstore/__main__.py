"""Runs the `kvstore` command where it is not on PATH: `python -m kvstore`."""

import sys

from kvstore.cli import main

if __name__ == "__main__":
    sys.exit(main())
