"""Whether cuda-python is installed, asked of its metadata and not by an import.

An import that fails where it is installed is a mistake of the tests, and is no reason to skip.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Any

import pytest

from kvstore.cuda.versions import DISTRIBUTION


def cuda_bindings(module: str) -> Any:
    """Return `cuda.bindings.<module>`; skips the test where cuda-python is not installed."""
    try:
        metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        pytest.skip("cuda-python is not installed", allow_module_level=True)
    return import_module(f"cuda.bindings.{module}")
