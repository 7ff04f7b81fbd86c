"""What scripts/gpu-check starts of engines, here on vLLM for CPUs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]


def test_one_that_saves_and_one_that_loads_start_and_share_kv(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gpu import engine as gpu_engine

    monkeypatch.setattr(gpu_engine, "ENGINES", gpu_engine.ENGINES[:2])
    with tempfile.TemporaryDirectory() as folder:  # a short path: sockets are in it
        assert gpu_engine.check(Path(folder)) == []


class Engine:
    """Finds its prefix, and says that it runs as vLLM without a device does."""

    def __init__(self, model: Path, settings: Any, log: Path, *, fresh: bool) -> None:
        assert fresh
        extra = settings.extra
        assert extra["enforce_eager"] is False
        self._loads = settings.connector["kv_role"] != "kv_producer"

    def call(self, op: str) -> dict[str, bool]:
        assert op == "running"
        return {
            "model runner V2": True,
            "asynchronous scheduling": not self._loads,
            "CUDA graphs": True,
        }

    def generate(self, prompts: list[list[int]]) -> list[Any]:
        from engines import Generated

        return [Generated([1], 0.1, 512 if self._loads else 0) for _ in prompts]

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_an_engine_on_a_device_that_lacks_what_users_have_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu import engine as gpu_engine

    monkeypatch.setattr(gpu_engine, "on_device", lambda: True)
    monkeypatch.setattr(gpu_engine, "EngineProcess", Engine)
    assert gpu_engine.check(tmp_path) == [
        "kv_consumer with VRAM: it runs without asynchronous scheduling",
        "kv_both: it runs without asynchronous scheduling",
    ]


def test_an_engine_that_does_not_start_is_named_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu import engine as gpu_engine

    monkeypatch.setattr(gpu_engine, "ENGINES", (("kv_nobody", False),))
    wrong = gpu_engine.check(tmp_path)
    assert wrong[0].startswith("kv_nobody: an engine did not start")
    assert any("kv_nobody" in line for line in wrong[1:])


class Alone:
    """Saves and loads as one that is right, but for what a test changes."""

    made: list[Alone]

    def __init__(self, model: Path, settings: Any, log: Path, *, fresh: bool) -> None:
        self.settings, self.killed = settings, False
        self._loads = settings.connector["kv_role"] == "kv_consumer"
        type(self).made.append(self)

    def call(self, op: str, **_: object) -> dict[str, bool]:
        self._loads = self._loads or op == "reset"
        return {"model runner V2": True, "asynchronous scheduling": True, "CUDA graphs": False}

    def generate(self, prompts: list[list[int]]) -> list[Any]:
        from engines import Generated

        # What was killed has taken its VRAM along.
        there = self._loads and not any(one.killed for one in type(self).made)
        return [Generated(self.tokens(prompt), 0.1, 512 if there else 0) for prompt in prompts]

    def tokens(self, prompt: list[int]) -> list[int]:
        return prompt[:2]

    def drain(self) -> None:
        pass

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        pass


class Wrong(Alone):
    """Gives other tokens when what it was given was loaded, or is gone."""

    made: list[Alone]

    def tokens(self, prompt: list[int]) -> list[int]:
        return [9] if self._loads else prompt[:2]


@pytest.mark.parametrize(
    ("name", "engine", "wrong"),
    [
        ("eager", Alone, []),
        ("graphs", Alone, ["alone: it runs without CUDA graphs"]),
        ("eager", Wrong, ["loaded: other tokens than the engine that computed them"]),
        ("vram", Alone, []),
        (
            "vram",
            Wrong,
            [
                "out of another process's VRAM: other tokens than the engine that computed them",
                "after its producer was killed: other tokens",
            ],
        ),
    ],
)
def test_engines_of_each_kind_load_what_was_saved_with_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, engine: Any, wrong: list[str]
) -> None:
    from gpu import engine as gpu_engine

    engine.made = []
    monkeypatch.setattr(gpu_engine, "on_device", lambda: True)
    monkeypatch.setattr(gpu_engine, "EngineProcess", engine)
    monkeypatch.setattr(gpu_engine, "build_model", lambda path, shape: path)
    assert gpu_engine.RUNGS[name](tmp_path) == wrong
    eager = {one.settings.extra["enforce_eager"] for one in engine.made}
    assert eager == {name == "eager"}
    vram = {one.settings.connector["kv_connector_extra_config"]["vram"] for one in engine.made}
    assert vram == {name == "vram"}
    assert any(one.killed for one in engine.made) == (name == "vram")
