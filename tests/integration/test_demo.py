"""The demo without an engine: real Redis, real node, real processes, SIGKILL in the middle."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("rich", reason="the demo extra is not installed")
pytest.importorskip("matplotlib", reason="the demo extra is not installed")


def test_the_demo_loads_every_block_and_survives_the_nodes_death(tmp_path):
    before = set(Path("/dev/shm").iterdir())
    run = subprocess.run(
        [sys.executable, "scripts/lib/demo.py", "--no-engine", "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout.splitlines()[-1])
    assert summary["identical"] == summary["requests"] == 16
    assert summary["tokens_loaded"] == summary["tokens_possible"] == 32768
    assert summary["after_node_kill"] == {"requests": 16, "answered": 16, "identical": 16}
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    assert "synthetic" in run.stderr
    assert not [p for p in set(Path("/dev/shm").iterdir()) - before if b"demo" in p.name.encode()]
