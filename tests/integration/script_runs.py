"""Runs of scripts/lib without an engine, as processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATIENCE_S = 110


def run_without_engine(script: str, *options: str) -> tuple[dict[str, Any], str]:
    """The summary in its last line, and what it said on standard error."""
    run = subprocess.run(
        [sys.executable, "scripts/lib", script, "--no-engine", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1]), run.stderr
