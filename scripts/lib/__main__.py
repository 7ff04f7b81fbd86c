"""Runs a module of these rooms, which then finds the others: `python scripts/lib chaos.run ...`."""

import runpy
import sys
from pathlib import Path

# Absolute: processes that a script starts elsewhere are given this path.
sys.path[0] = str(Path(__file__).resolve().parent)
name = sys.argv.pop(1)
runpy.run_module(name, run_name="__main__", alter_sys=True)
