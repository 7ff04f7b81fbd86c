"""What a worker cannot work with ends no worker: it stands aside, and the engine computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_model_config import BLOCK, ENGINE_BLOCK, kv_cache_config, vllm_config
from vllm_model_engine import MakeEngine, expected_output, prompt

from kvstore import UsageError
from kvstore.testing.blockstore import MemoryBlockStore

pytestmark = pytest.mark.vllm
WINDOW = 40


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker can work with the shapes of its layers, of which the scheduler knows nothing."""
    from connector.worker.worker import WorkerCore

    def refuse(self: WorkerCore, *groups: Any) -> None:
        raise UsageError("kv_cache_spec", "model.layers.1", "cannot be shared beside the others")

    monkeypatch.setattr(WorkerCore, "register_kv_caches", refuse)


@pytest.mark.parametrize("window", [None, WINDOW])
def test_its_loads_fail_and_its_saves_end(
    make: MakeEngine, store: MemoryBlockStore, window: int | None, request: Any
) -> None:
    tokens = prompt(4 * BLOCK + 5)
    producer = make(window=window)
    producer.serve("a", tokens)
    there = len(store.sealed())
    assert there
    request.getfixturevalue("refused")
    engine = make(window=window)
    for name, asked in (("a", tokens), ("b", prompt(4 * BLOCK + 5, seed=1))):
        engine.add(name, asked)
        engine.run(steps_max=300)
        assert engine.outputs[name] == expected_output(asked, 4, window=window)
    assert engine.loaded_tokens > 0, "loads were planned"
    assert len(store.sealed()) == there, "nothing was stored"
    assert engine.free_blocks == 127, "no save holds a block any more"


def test_what_both_sides_see_is_refused_by_the_schedulers(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM makes the workers' connectors first."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.v1.kv_cache_interface import CrossAttentionSpec, KVCacheGroupSpec

    from connector.adapters.vllm.connector import KVStoreConnector

    config, groups = vllm_config(model, blocks=8), kv_cache_config(8)
    heads = {"num_kv_heads": 2, "head_size": 4, "dtype": torch.bfloat16}
    spec = CrossAttentionSpec(block_size=ENGINE_BLOCK, **heads)
    groups.kv_cache_groups.append(KVCacheGroupSpec(["cross"], spec))
    worker = KVStoreConnector(config, KVConnectorRole.WORKER, groups)
    worker.register_kv_caches({})
    with pytest.raises(UsageError, match="CrossAttentionSpec in group 1"):
        KVStoreConnector(config, KVConnectorRole.SCHEDULER, groups)
    worker.shutdown()
