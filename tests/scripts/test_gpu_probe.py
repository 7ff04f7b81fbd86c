"""What scripts/gpu-check asks of a driver, over the stand-in for one: its answers are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_judge import figures_of_rows, judge

ROOT = Path(__file__).parents[2]
SMALL = {"GPU_PROBE_BYTES": str(4 << 20), "GPU_PROBE_STORM_S": "1"}
pytestmark = pytest.mark.long


@pytest.fixture
def probe(fake_driver: Any, tmp_path: Path) -> Any:
    """Runs one stage, and returns its rows by name."""

    def run(stage: str, **variables: str) -> dict[str, dict[str, Any]]:
        path = tmp_path / "rows"
        arguments = ["scripts/lib", "gpu.probe", stage, "--rows", path]
        printed = fake_driver.python(*arguments, **SMALL, **variables)
        assert path.read_text() == printed, "each row is in the file and was printed"
        rows = [json.loads(line) for line in printed.splitlines()]
        assert {row["stage"] for row in rows} == {stage}
        path.unlink()
        return {row["name"]: row for row in rows}

    return run


@pytest.mark.parametrize(("usable", "verdict"), [("1", "met"), ("0", "MISSED")])
def test_what_copies_rest_on_is_asked_and_judged(
    fake_driver: Any, usable: str, verdict: str
) -> None:
    """`versions` needs torch for CUDA; its rows about the device do not."""
    code = (
        "from gpu.answers import ATTRIBUTES\n"
        "from gpu.driver import Gpu\n"
        "from gpu.rows import Rows\n"
        "for name, least in ATTRIBUTES.items():\n"
        "    Rows('versions').say(name, Gpu().attribute(name), least=least)\n"
    )
    path = f"{ROOT}:{ROOT / 'scripts' / 'lib'}"
    printed = fake_driver.python("-c", code, PYTHONPATH=path, FAKE_HOST_POINTERS=usable)
    rows = map(json.loads, printed.splitlines())
    name = "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"
    assert (
        f"{verdict}: versions: {name} at least 1: {usable}"
        in judge(list(figures_of_rows(rows))).lines
    )


def test_the_machine_is_described(probe: Any) -> None:
    assert {"kernel", "/dev/shm", "memory that may be locked"} <= probe("env").keys()


def test_what_page_locking_answers_is_what_is_expected_of_a_driver(probe: Any) -> None:
    rows = probe("register")
    answers = [row for row in rows.values() if "expected" in row]
    assert len(answers) == 9
    assert all(row["as_expected"] for row in answers), rows


@pytest.mark.parametrize(
    ("unlocked", "answer"), [("stage", "CUDA_SUCCESS"), ("refuse", "INVALID_VALUE")]
)
def test_what_a_call_for_many_copies_takes_is_told(probe: Any, unlocked: str, answer: str) -> None:
    rows = probe("batch", FAKE_UNLOCKED_BATCHES=unlocked, FAKE_MOVES_NOTHING="yes")
    assert rows["source order ANY"]["value"] == "CUDA_SUCCESS"
    assert rows["overlap preferred"]["value"] == "CUDA_SUCCESS"
    assert rows["over two locked parts"]["value"] == "INVALID_VALUE"
    for way in ("from", "to"):
        assert rows[f"{way} memory that is not locked"]["value"] == answer
    assert {"batch", "any order", "overlap", "single"} <= rows["h2d 64 x 1024 KiB"].keys()


@pytest.mark.parametrize("stage", ["batch", "storm"])
def test_a_device_without_a_call_for_many_copies_is_told(probe: Any, stage: str) -> None:
    rows = probe(stage, FAKE_HOST_POINTERS="0")
    assert [row["value"] for row in rows.values()] == ["none"]


@pytest.mark.parametrize("stage", ["vmm", "sigkill", "storm"])
def test_what_must_hold_on_a_device_holds_on_the_stand_in(probe: Any, stage: str) -> None:
    figures = list(figures_of_rows(probe(stage).values()))
    assert figures
    assert judge(figures).passed, judge(figures).lines


def test_a_storm_of_copies_that_is_refused_misses_its_aim(probe: Any) -> None:
    rows = probe("storm", FAKE_REFUSES_BATCHES="yes")
    lines = judge(list(figures_of_rows(rows.values()))).lines
    assert [line for line in lines if line.startswith("MISSED: storm: other answers")]


@pytest.mark.parametrize("stage", ["bus", "unlocked"])
def test_ceilings_are_measured(probe: Any, stage: str) -> None:
    assert all(row["value"] > 0 for row in probe(stage).values())
