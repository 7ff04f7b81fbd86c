"""What the compiled reader does with memory that another process writes at full speed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hatch_build
from kvstore.segment import batch_read

PROGRAM = Path(__file__).parents[2] / "support" / "nodes" / "hostile_segment.py"
SECONDS = "3"
SANITIZED = "-g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined"


def library(name: str) -> str:
    """The path of a sanitizer's library; skips where there is none."""
    ran = subprocess.run(
        [*hatch_build.compiler(), f"-print-file-name={name}"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    if not Path(ran.stdout.strip()).is_absolute():
        pytest.skip(f"there is no {name} here")
    return ran.stdout.strip()


def play(module: Path, seed: int, **environment: str) -> str:
    command = [sys.executable, str(PROGRAM), str(module), str(seed), SECONDS]
    ran = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, f"seed {seed}: {ran.stdout}{ran.stderr[-4000:]}"
    return ran.stdout


def built(where: Path, monkeypatch: pytest.MonkeyPatch, flags: str) -> Path:
    monkeypatch.setenv("CFLAGS", flags)
    target = where / "_batch_read.abi3.so"
    try:
        hatch_build.build(batch_read.SOURCE, target)
    except hatch_build.CannotBuildError as e:
        pytest.skip(f"the compiled part cannot be built here: {e}")
    return target


def test_a_hit_is_its_keys_value_however_fast_slots_are_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(built(tmp_path, monkeypatch, "-O2"), seed=1)


@pytest.mark.long
def test_headers_and_hints_that_lie_lead_to_no_byte_outside_of_the_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = f"{library('libasan.so')} {library('libubsan.so')}"
    told = play(
        built(tmp_path, monkeypatch, SANITIZED),
        seed=2,
        LD_PRELOAD=libraries,
        PYTHONMALLOC="malloc",
        ASAN_OPTIONS="detect_leaks=0",
        UBSAN_OPTIONS="halt_on_error=1",
    )
    assert "hostile" in told
