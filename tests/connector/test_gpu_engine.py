"""What scripts/gpu-check starts first, here on vLLM for CPUs."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_one_that_saves_and_one_that_loads_start_and_share_kv(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import gpu_engine

    monkeypatch.setattr(gpu_engine, "ENGINES", gpu_engine.ENGINES[:2])
    with tempfile.TemporaryDirectory() as folder:  # a short path: sockets are in it
        assert gpu_engine.check(Path(folder)) == []


def test_an_engine_that_does_not_start_is_named_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_engine

    monkeypatch.setattr(gpu_engine, "ENGINES", (("kv_nobody", False),))
    wrong = gpu_engine.check(tmp_path)
    assert wrong[0].startswith("kv_nobody: an engine did not start")
    assert any("kv_nobody" in line for line in wrong[1:])
