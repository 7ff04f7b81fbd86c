"""Tests in a process whose libcuda.so.1 is fake_driver.cpp, beside the real cuda-python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_python import cuda_bindings

from connector.copiers.cuda.nvrtc import SOURCE

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PATH = os.pathsep.join(str(one) for one in (ROOT, *sorted(HERE.parent.iterdir())))
"""Ours, and the helpers of every room, for the processes that a test starts."""
TIMEOUT_S = 110
FAKE = "FAKE_CUDA_DRIVER"
"""Set where it is the driver."""


class FakeDriver:
    """Compiled; skips where nothing can compile it, or cuda-python is missing."""

    def __init__(self, folder: Path) -> None:
        cuda_bindings("driver")
        compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            pytest.skip("no C++ compiler")
        self._folder = folder
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f'-DPAGED_COPY_CU="{SOURCE}"']
        subprocess.run(
            [compiler, *flags, "-o", folder / "libcuda.so.1", HERE / "fake_driver.cpp", "-ldl"],
            check=True,
            timeout=TIMEOUT_S,
        )

    def run(self, *arguments: str | Path) -> None:
        """Run pytest with these arguments: it passes, and skips nothing."""
        output = self.python("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
        assert "skipped" not in output, output

    def python(self, *arguments: str | Path, **variables: str) -> str:
        """Run Python with these arguments, and return what it printed: it ends well."""
        libraries = f"{self._folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        env = {**os.environ, "LD_LIBRARY_PATH": libraries, FAKE: "yes", "PYTHONPATH": PATH}
        run = subprocess.run(
            [sys.executable, *arguments],
            env=env | variables,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout
