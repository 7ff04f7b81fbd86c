"""Both sides over the model of a store (connector_parts.py), engines around vLLM's own scheduler
(vllm_model_engine.py), and where the code is that starts real ones (scripts/lib)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from connector_parts import Side, Worker
from vllm_model_config import BLOCK
from vllm_model_engine import MakeEngine, ModelEngine

from kvstore.testing.blockstore import MemoryBlockStore

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "lib"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the configuration of the engines' model lies once an engine was made."""
    return tmp_path_factory.mktemp("model")


@pytest.fixture
def store() -> MemoryBlockStore:
    return MemoryBlockStore()


@pytest.fixture
def side(store: MemoryBlockStore) -> Iterator[Side]:
    side = Side(store)
    yield side
    side.core.close()


@pytest.fixture
def worker(store: MemoryBlockStore) -> Iterator[Worker]:
    pytest.importorskip("torch")
    worker = Worker(store)
    yield worker
    worker.core.close()


@pytest.fixture
def make(
    model: Path, store: MemoryBlockStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeEngine]:
    """Makes model engines that share `store`."""
    engines: list[ModelEngine] = []

    def one(**changes: Any) -> ModelEngine:
        settings = {"blocks": 128, "block_tokens": BLOCK, "lookup_timeout_s": 10.0, **changes}
        engines.append(ModelEngine(model, store, monkeypatch, **settings))
        return engines[-1]

    yield one
    for engine in engines:
        engine.close()


@pytest.fixture
def token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's memory is [block, head, token, K and V], unlike that of vLLM's CPU kernels."""
    monkeypatch.setattr("connector.adapters.vllm.shape._within_block", lambda *_: "")
