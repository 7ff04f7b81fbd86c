"""For every test: one that needs what this machine lacks is skipped, and says why."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest


def _missing() -> dict[str, str]:
    """Marks whose tests cannot run here, and why."""
    missing = {}
    if find_spec("vllm") is None:
        missing["vllm"] = "vLLM is not installed (scripts/setup says why)"
    if not Path("/dev/nvidiactl").exists():
        missing["gpu"] = "no CUDA device"
    return missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for mark, why in _missing().items():
        for item in items:
            if item.get_closest_marker(mark) is not None:
                item.add_marker(pytest.mark.skip(reason=why))
