"""benchmarks/gpu_judge.py: what a run on a device measured meets the aims, or is said not to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from each_input import each

from benchmarks.gpu_judge import (
    AIMS,
    BENCH,
    BUSY,
    HIT,
    IDLE,
    LOCKED,
    LOCKS,
    PRODUCER,
    PULL,
    PULL_WHOLE,
    PULLS,
    Figure,
    figures_in,
    judge,
    main,
)
from connector.limits import DEVICE_BLOCKS_MAX


def copies(**changed: float) -> list[dict[str, Any]]:
    """Rows as benchmarks.suites.gpu writes them, all aims met but for what is changed."""
    value = {"d2h": 0.95, "h2d": 0.95, "saves": 40.0, "loads": 40.0, "other": 40.0, **changed}
    shape = {"shape": "llama-8b"}
    rows: list[dict[str, Any]] = []
    for way in ("d2h", "h2d"):
        rows.append({**shape, "way": f"{way} plain", "GB/s": 50.0, "plain_ratio": 1.0})
        rows.append({**shape, "way": f"{way} pool", "GB/s": 48.0, "plain_ratio": value[way]})
        rows.append({**shape, "way": f"{way} not locked", "GB/s": 10.0, "plain_ratio": 0.2})
    for way in ("saves", "loads"):
        for grid, rate in ((DEVICE_BLOCKS_MAX, value[way]), (DEVICE_BLOCKS_MAX // 2, 1.0)):
            row = {**shape, "thread_blocks": grid, "slowed_percent": 0.5}
            rows.append({**row, "way": f"matmul beside {way}", "GB/s": rate})
            rows.append({**row, "way": f"memory-bound beside {way}", "GB/s": 1.0})
    return rows


def written(
    folder: Path, pull: float = 0.8, whole: float = 0.8, locked_mib: int = 8192, **changed: float
) -> Path:
    (folder / BENCH).write_text(json.dumps({"rows": copies(**changed)}))
    rows = [
        {"blocks": 64, "MiB": 16, "ratio": 0.9, "whole_ratio": whole},
        # Copies this small are slowed by calls, the yardstick's as well.
        {"blocks": 256, "MiB": 1, "ratio": pull, "whole_ratio": 0.2},
    ]
    (folder / PULLS).write_text(json.dumps({"rows": rows}))
    locks = {"MiB": 8192, "locked_MiB": locked_mib, "alone_us_max": 30.0, "beside_us_max": 9000.0}
    (folder / LOCKS).write_text(json.dumps({"rows": [locks]}))
    return folder


def test_a_run_that_meets_all_that_was_measured_passes_and_names_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(written(tmp_path))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("met: ")]) == 8
    assert [line for line in lines if line.startswith("SKIPPED")] == [
        f"SKIPPED {HIT}: not measured",
        f"SKIPPED {PRODUCER}: not measured",
    ]
    assert "met: d2h of the bus, beside prefill at least 0.8 (llama-8b): 0.8" in lines


@each(
    ("changed", "aim"),
    [
        ({"d2h": 0.949}, IDLE["d2h"]),
        ({"h2d": 0.949}, IDLE["h2d"]),
        ({"saves": 39.9}, BUSY["d2h"]),
        ({"loads": 39.9}, BUSY["h2d"]),
        ({"pull": 0.79}, PULL),
        ({"whole": 0.79}, PULL_WHOLE),
        ({"locked_mib": 8128}, LOCKED),
        ({"d2h": float("nan")}, IDLE["d2h"]),
    ],
)
def test_one_missed_aim_fails_the_run_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], aim: object
) -> None:
    assert main([str(written(tmp_path, **changed))]) == 1
    missed = [x for x in capsys.readouterr().out.splitlines() if x.startswith("MISSED")]
    assert len(missed) == 1
    assert missed[0].startswith(f"MISSED: {aim} (")


def test_what_may_be_at_most_so_much_is_judged_so() -> None:
    assert judge([Figure(HIT, "llama", 1.05), Figure(PRODUCER, "llama", -0.3)]).passed
    assert not judge([Figure(HIT, "llama", 1.06)]).passed
    assert not judge([Figure(PRODUCER, "llama", 1.1)]).passed


def test_a_run_that_measured_nothing_does_not_pass(tmp_path: Path) -> None:
    assert figures_in(tmp_path) == []
    assert not judge([]).passed
    assert len(judge([]).lines) == len(AIMS)


class Registrar:
    """Locks whatever it is asked to but for one part."""

    def __init__(self, refused: int | None = None) -> None:
        self.parts: list[int] = []
        self._refused = refused

    def lock(self, address: int, size_bytes: int, writable: bool) -> str:
        self.parts.append(address)
        return "out_of_memory" if len(self.parts) - 1 == self._refused else ""

    def unlock(self, address: int) -> None:
        self.parts.remove(address)


@pytest.mark.parametrize(("refused", "parts"), [(None, 8), (3, 3)])
def test_memory_is_locked_part_by_part_until_one_is_refused_and_unlocked(
    refused: int | None, parts: int
) -> None:
    from benchmarks.gpu_locking import locked

    registrar = Registrar(refused)
    total, _ = locked(registrar, memoryview(bytearray(8 << 12)), 1 << 12, 60.0)
    assert total == parts << 12
    assert len(registrar.parts) == (refused is not None), "what was locked is unlocked"


def test_memory_to_be_locked_has_its_pages_before_anything_is_timed() -> None:
    from benchmarks.gpu_locking import shared_memory

    with shared_memory(16 << 20):
        opened = [fd for fd in Path("/proc/self/fd").iterdir() if fd.exists() or fd.is_symlink()]
        (fd,) = (fd for fd in opened if "kvstore-bench-locking" in str(fd.readlink()))
        assert os.fstat(int(fd.name)).st_blocks * 512 >= 16 << 20
