"""The adapter over a model of TensorRT-LLM's executor, and engines that share one store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.testing.blockstore import MemoryBlockStore

if TYPE_CHECKING:
    from trtllm_engines import Make
    from trtllm_model_engine import ModelEngine


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The adapter's package, over the model of the engine's."""
    from trtllm_model_engine import install

    install(monkeypatch)
    monkeypatch.setenv("KVSTORE_TENSORRT_LLM", json.dumps({"weights_id": "w"}))
    import connector.adapters.tensorrt_llm as package

    return package


@pytest.fixture
def make(adapter: Any, store: MemoryBlockStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes engines that share `store`."""
    from trtllm_engines import Shared, maker

    monkeypatch.setattr(
        "connector.adapters.tensorrt_llm.worker.open_store", lambda config: Shared(store)
    )
    made: list[ModelEngine] = []
    yield maker(adapter, made)
    for engine in made:
        engine.close()
