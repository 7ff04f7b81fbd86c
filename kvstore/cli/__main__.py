"""`python -m kvstore.cli`: the `kvstore` command where it is not on PATH."""

import sys

from kvstore.cli import main

if __name__ == "__main__":
    sys.exit(main())
