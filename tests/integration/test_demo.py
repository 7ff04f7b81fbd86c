"""The demo without an engine: real Redis, real node, real processes, SIGKILL in the middle."""

from pathlib import Path

import pytest
from script_runs import run_without_engine

pytest.importorskip("rich", reason="the demo extra is not installed")
pytest.importorskip("matplotlib", reason="the demo extra is not installed")


@pytest.mark.long
def test_the_demo_loads_every_block_and_survives_the_nodes_death(tmp_path):
    before = set(Path("/dev/shm").iterdir())
    summary, said = run_without_engine("demo.run", "--out", str(tmp_path))
    assert summary["identical"] == summary["requests"] == 16
    assert summary["tokens_loaded"] == summary["tokens_possible"] == 32768
    assert summary["after_node_kill"] == {"requests": 16, "answered": 16, "identical": 16}
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    assert "synthetic" in said
    assert not [p for p in set(Path("/dev/shm").iterdir()) - before if b"demo" in p.name.encode()]
