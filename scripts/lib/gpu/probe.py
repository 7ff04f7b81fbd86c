"""Runs one stage of what is asked of a driver and a device without an engine.

python scripts/lib gpu.probe STAGE [--rows FILE]
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

from gpu import answers, handed, speeds
from gpu.rows import Rows, Say

ANSWERS = {
    "env": 25,
    "versions": 60,
    "register": 40,
    "batch": 40,
    "vmm": 40,
    "sigkill": 60,
    "storm": 40,
}
"""Seconds that each may take, in their order."""
FIGURES = {"bus": 40, "unlocked": 25, "kernel": 60, "callers": 40}
STAGES: dict[str, Callable[[Say], None]] = {
    "env": answers.env,
    "versions": answers.versions,
    "register": answers.register,
    "batch": answers.batch,
    "vmm": answers.vmm,
    "storm": answers.storm,
    "sigkill": handed.sigkill,
    "bus": speeds.bus,
    "unlocked": speeds.unlocked,
    "kernel": speeds.kernel,
    "callers": speeds.callers,
}


def main() -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--rows", type=Path, help="write the rows to the end of this file too")
    options = parser.parse_args()
    rows = Rows(options.stage, options.rows)
    STAGES[options.stage](rows.say)
    return 0


if __name__ == "__main__":
    sys.exit(main())
