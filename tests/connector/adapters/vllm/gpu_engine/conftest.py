"""Engines of vLLM as GPUs run them, over the model of a device (vllm_gpu_engine.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from vllm_model_config import BLOCK

from kvstore.testing.blockstore import MemoryBlockStore

if TYPE_CHECKING:
    from vllm_gpu_engine import GpuEngine
    from vllm_gpu_traps import MakeGpuEngine


@pytest.fixture
def make_gpu(
    model: Path, store: MemoryBlockStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[MakeGpuEngine]:
    """Makes engines that share `store`, each with a device of its own."""
    from vllm_gpu_engine import GpuEngine
    from vllm_gpu_traps import BLOCKS

    engines: list[GpuEngine] = []

    def one(**changes: Any) -> GpuEngine:
        settings = {"blocks": BLOCKS, "block_tokens": BLOCK, "lookup_timeout_s": 10.0, **changes}
        engines.append(GpuEngine(model, store, monkeypatch, tmp_path, **settings))
        return engines[-1]

    yield one
    for engine in engines:
        engine.close()
