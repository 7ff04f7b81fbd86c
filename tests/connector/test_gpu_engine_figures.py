"""What scripts/gpu-check measures of real engines, over engines whose times are known."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_judge import ENGINES, HIT, PRODUCER, figures_in


class Engine:
    """Knows prompts that were saved; a hit takes `hit_s`, time goes on by `batch_s` a batch."""

    def __init__(self, clock: list[float], hit_s: float, batch_s: float, *, loads: bool) -> None:
        self.asked: Counter[str] = Counter()
        self._clock, self._hit_s, self._batch_s, self._loads = clock, hit_s, batch_s, loads
        self._saved: set[str] = set()
        self._own: set[str] = set()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[Any]:
        from engines import Generated

        self._clock[0] += self._batch_s
        results = []
        for prompt in map(str, prompts):
            assert prompt not in self._own, "the engine's own cache would answer"
            known = self._loads and prompt in self._saved
            results.append(Generated([1], self._hit_s if known else 9.0, 2048 if known else 0))
            self._own.add(prompt)
            self._saved.add(prompt)
        return results

    def drain(self) -> None:
        pass

    def call(self, op: str, connector: bool) -> None:
        assert (op, connector) == ("reset", False)
        self._own.clear()


def measured(monkeypatch: pytest.MonkeyPatch, folder: Path, *, loads: bool = True) -> list[Any]:
    from gpu import engine_figures as figures

    clock = [0.0]
    monkeypatch.setattr(figures.time, "perf_counter", lambda: clock[0])
    times = {"both": (0.02, 1), "offloading": (0.04, 1), "producer": (9, 1.25), "alone": (9, 1)}

    def start(name: str, connector: dict[str, Any] | None) -> Engine:
        assert (connector is None) == (name == "alone")
        return Engine(clock, *times[name], loads=loads)

    rows = figures.run(start, folder)
    (folder / ENGINES).write_text(json.dumps({"rows": rows}))
    return figures_in(folder)


def test_both_figures_are_ratios_to_their_yardsticks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hit, producer = measured(monkeypatch, tmp_path)
    assert (hit.aim, hit.value) == (HIT, 0.5)
    assert (producer.aim, producer.value) == (PRODUCER, 20.0)


def test_a_hit_that_is_none_is_an_error_not_a_figure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="only 0 of 2048 tokens were a hit"):
        measured(monkeypatch, tmp_path, loads=False)
