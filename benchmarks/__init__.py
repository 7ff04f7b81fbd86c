"""Measures the store: a suite is a file in suites/, run by `scripts/bench`."""

import sys
from pathlib import Path

# What starts servers and engines is shared with scripts and tests.
sys.path.append(str(Path(__file__).parents[1] / "scripts" / "lib"))
