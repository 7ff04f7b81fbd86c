"""What scripts/gpu-check starts first, here on vLLM for CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_engines_of_every_role_start_and_share_kv(tmp_path: Path) -> None:
    import gpu_engine

    assert gpu_engine.check(tmp_path) == []


def test_an_engine_that_does_not_start_is_named_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_engine

    monkeypatch.setattr(gpu_engine, "ENGINES", (("kv_nobody", False),))
    wrong = gpu_engine.check(tmp_path)
    assert wrong[0].startswith("kv_nobody: an engine did not start")
    assert any("kv_nobody" in line for line in wrong[1:])
