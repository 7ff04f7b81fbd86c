"""What runs on a device, through the real cuda-python, over a stand-in for the driver."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from connector.cuda.nvrtc import SOURCE

TESTS = Path(__file__).parents[2]
TIMEOUT_S = 100


def test_copies_through_cuda_python_keep_the_contract(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed")
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f'-DPAGED_COPY_CU="{SOURCE}"']
    subprocess.run(
        [compiler, *flags, "-o", tmp_path / "libcuda.so.1", TESTS / "fake_driver.cpp", "-ldl"],
        check=True,
        timeout=TIMEOUT_S,
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", Path(__file__).with_name("on_fake_driver.py")],
        env={
            **os.environ,
            "LD_LIBRARY_PATH": f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}",
            "PYTHONPATH": f"{TESTS.parent}:{TESTS}",
        },
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "8 passed" in run.stdout, run.stdout
