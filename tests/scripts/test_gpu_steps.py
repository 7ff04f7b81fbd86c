"""scripts/gpu-check runs its steps in their order and within its limits, and says what became of
each."""

from __future__ import annotations

import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from gpu import check
from gpu.check import JUDGE, LOGS, OUTPUT, RESULTS, Options, Packed, Planned, plan, summary
from gpu.steps import Became, Step, Steps


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    return Steps(60.0, (tmp_path / OUTPUT).open("wb"))


def python(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", code]


def became(steps: Steps) -> dict[str, Became]:
    return {ended.name: ended.became for ended in steps.ended}


def test_a_step_passes_or_fails_by_its_code_and_the_next_is_run(steps: Steps) -> None:
    for name, code in (("good", 0), ("bad", 1), ("no test chosen", 5)):
        steps.run(Step(name, 30, python(f"raise SystemExit({code})")))
    assert became(steps) == {
        "good": Became.PASSED,
        "bad": Became.FAILED,
        "no test chosen": Became.PASSED,
    }


def test_a_step_that_takes_too_long_has_failed_and_ends_with_all_that_it_started(
    steps: Steps, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(3); open({str(mark)!r}, 'w')"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])"
    began = time.monotonic()
    steps.run(Step("hangs", 1.0, python(code)))
    assert time.monotonic() - began < 20
    assert became(steps) == {"hangs": Became.FAILED}
    assert "more than 1 s" in steps.ended[0].why
    time.sleep(3)
    assert not mark.exists()


def test_what_the_limit_of_all_ends_or_lets_not_begin_is_not_run_and_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu.steps.WORTH_STARTING_S", 1.0)
    steps = Steps(2.0, (tmp_path / OUTPUT).open("wb"))
    steps.run(Step("cut short", 300, python("import time; time.sleep(60)")))
    steps.run(Step("late", 5, python("")))
    assert became(steps) == {"cut short": Became.NOT_RUN, "late": Became.NOT_RUN}
    lines, code = summary(steps, "")
    assert lines == ["gpu-check: not run: cut short, late"]
    assert code == 3


def test_what_a_step_prints_is_kept_as_it_comes(steps: Steps, tmp_path: Path) -> None:
    steps.run(Step("cut", 2.0, python("print('seen', flush=True); import time; time.sleep(60)")))
    assert "seen" in (tmp_path / OUTPUT).read_text()


@pytest.mark.parametrize(
    ("codes", "output", "last", "code"),
    [
        ([0], "", "gpu-check: all passed", 0),
        ([0], "SKIPPED [1] x: no NIXL\n", "gpu-check: all passed, but for what was skipped", 0),
        ([0, 1], "", "gpu-check: failed: 1", 1),
    ],
)
def test_the_end_says_what_failed_and_what_was_skipped(
    steps: Steps, codes: list[int], output: str, last: str, code: int
) -> None:
    for number, one in enumerate(codes):
        steps.end_with(str(number), one)
    lines, status = summary(steps, output)
    assert (lines[-1], status) == (last, code)
    assert not output or lines[:2] == ["gpu-check: skipped:", output.strip()]


def planned(tmp_path: Path, **chosen: Any) -> list[Planned]:
    options = Options(**chosen)
    return [one for one in plan(tmp_path, tmp_path, {}, options) if options.takes(one)]


def test_answers_come_first_then_tests_then_engines_from_the_safest_up_then_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check.shutil, "which", lambda name: f"/usr/bin/{name}")
    all_of_it = planned(tmp_path)
    parts = list(dict.fromkeys(part for part, _ in all_of_it))
    assert parts == ["answers", "tests", "engines", "figures", "sanitizer"]
    names = [step.name for _, step in all_of_it]
    assert len(set(names)) == len(names)
    assert names[:3] == ["machine", "env", "versions"]
    engines = [step.name for part, step in all_of_it if part == "engines"]
    assert engines == ["eager", "graphs", "vram", "default"]
    tests = {step.name for part, step in all_of_it if part == "tests"}
    files = {path.stem for path in (check.ROOT / "tests" / "gpu").glob("test_*.py")}
    assert tests == files | {"test_copy"}
    assert "sanitizer-memcheck" not in [s.name for _, s in planned(tmp_path, quick=True)]


def test_single_steps_and_parts_are_run_by_their_names_and_the_cliff_only_so(
    tmp_path: Path,
) -> None:
    chosen = planned(tmp_path, only=["storm", "engines", "cliff"])
    names = [step.name for _, step in chosen]
    assert names == ["storm", "eager", "graphs", "vram", "default", "cliff"]


def test_all_that_a_run_leaves_is_eight_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where results have to be fetched one by one, they are few."""
    assert len(RESULTS) == 8
    (tmp_path / "bench.json").write_text("of an earlier run")
    row = '{"stage": "one", "name": "figure", "value": 2, "most": 1}'

    def two(out: Path, scratch: Path, *_: object) -> list[Planned]:
        (scratch / "eager").mkdir()
        (scratch / "eager" / "alone.log").write_text("what it said")
        write = f"open({str(out / 'rows.jsonl')!r}, 'w').write({row!r})"
        return [Planned("figures", Step("writes", 30, python(write)))]

    monkeypatch.setattr(check, "plan", two)
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["gpu-check", "--limit", "60"])
    assert check.main() == 1, "an aim was missed"
    assert {path.name for path in tmp_path.iterdir()} == {OUTPUT, "rows.jsonl", JUDGE, LOGS}
    assert "MISSED: one: figure at most 1: 2" in (tmp_path / JUDGE).read_text()
    output = (tmp_path / OUTPUT).read_text()
    assert output.endswith("gpu-check: failed: judge\n")
    with tarfile.open(tmp_path / LOGS) as tar:
        assert tar.getnames() == ["eager/alone.log"]


def test_rows_that_say_nothing_of_what_must_be_are_not_judged(tmp_path: Path, steps: Steps) -> None:
    (tmp_path / "rows.jsonl").write_text('{"stage": "env", "name": "kernel", "value": "6.1"}\n')
    check.judge(steps, tmp_path)
    assert steps.ended == []
    assert not (tmp_path / JUDGE).exists()


def test_an_unknown_name_is_refused_with_those_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["gpu-check", "--only", "strom"])
    with pytest.raises(SystemExit):
        check.main()
    said = capsys.readouterr().err
    assert "strom" in said
    assert "storm" in said


def test_an_engine_that_was_taken_along_is_unpacked_and_one_that_is_broken_is_not_run(
    tmp_path: Path, steps: Steps
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "one-1.0-py3-none-any.whl").write_bytes(b"no wheel")
    with tarfile.open(tmp_path / "vllm.tar.xz", "w:xz") as tar:
        (tmp_path / "engine.py").write_text("")
        tar.add(tmp_path / "engine.py", "vllm/engine.py")
    site = tmp_path / "site"
    packed = Packed(tmp_path, site, tmp_path / "log")
    assert packed.path == [site, site / "packages"], "not among vLLM's own modules"
    engine = Planned("engines", Step("eager", 30, python("")))
    check.run(steps, [engine, Planned("tests", Step("test", 30, python("")))], packed)
    assert became(steps) == {"eager": Became.NOT_RUN, "test": Became.PASSED}
    assert (site / "vllm" / "engine.py").exists()
    assert (site / "vllm" / "vllm_flash_attn" / "_vllm_fa2_C.py").exists()
    assert "wheel" in (tmp_path / "log").read_text().lower()


def test_without_an_engine_taken_along_that_of_the_machine_is_run(
    tmp_path: Path, steps: Steps
) -> None:
    packed = Packed(tmp_path, tmp_path / "site", tmp_path / "log")
    assert packed.path == []
    check.run(steps, [Planned("engines", Step("eager", 30, python("")))], packed)
    assert became(steps) == {"eager": Became.PASSED}
