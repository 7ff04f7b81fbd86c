"""A load that ends where its source becomes slow, under vLLM's own scheduler: the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
from connector_parts import Hold
from vllm_model_config import BLOCK
from vllm_model_engine import MakeEngine, ModelEngine, expected_output, prompt

from connector.messages import BlockRead, WorkerReport
from connector.scheduler import load_costs
from connector.scheduler.patience import ComputeRate
from kvstore.spi import Tier
from kvstore.testing.blockstore import MemoryBlockStore

pytestmark = pytest.mark.vllm
NEAR, ALL = 3, 7
"""Blocks of a prompt in this host's memory, and in all."""


def save_in_two_tiers(producer: ModelEngine, store: MemoryBlockStore, tokens: list[int]) -> None:
    producer.serve("head", tokens[: NEAR * BLOCK + 1], 1)
    here = set(store.sealed())
    producer.serve("whole", tokens, 1)
    for key in store.sealed():
        if key not in here:
            store.elsewhere[key] = Tier.OTHER_HOST


def slow_reads(engine: ModelEngine) -> None:
    """Have the workers tell that the other host gives a MiB a minute."""
    from vllm.v1.outputs import KVConnectorOutput

    from connector.adapters.vllm.connector import KVStoreWorkerMetadata

    reads = [BlockRead("other_host:1", 1 << 20, 60.0)]
    told = KVStoreWorkerMetadata(WorkerReport(reads=reads))
    output = KVConnectorOutput(kv_connector_worker_meta=told)
    engine.scheduler.connector.update_connector_output(output)


@pytest.mark.parametrize(
    "kind",
    [{}, {"window": 40}, {"chunk": 64}, {"recurrent": True}, {"layerwise": True}],
    ids=["attention", "windows", "chunks", "states", "layer by layer"],
)
def test_what_is_quicker_computed_is_computed_and_the_tokens_are_the_same(
    make: MakeEngine,
    store: MemoryBlockStore,
    monkeypatch: pytest.MonkeyPatch,
    kind: dict[str, Any],
) -> None:
    monkeypatch.setattr(load_costs, "RETRY_S", 600.0)
    monkeypatch.setattr(ComputeRate, "tokens_per_s", 10_000.0)
    engine_kind = {name: value for name, value in kind.items() if name != "layerwise"}
    producer, consumer = make(**kind), make(**kind)
    prompts = [prompt(ALL * BLOCK + 5, seed) for seed in (1, 2)]
    for tokens in prompts:
        save_in_two_tiers(producer, store, tokens)
    slow_reads(consumer)
    # The first request tries whether it is still slow, in vain; the second takes what is here.
    hold = store.on_view = Hold()
    loaded = []
    for name, tokens in zip("ab", prompts, strict=True):
        before = consumer.loaded_tokens
        consumer.serve(name, tokens)
        hold.release()
        loaded.append(consumer.loaded_tokens - before)
        assert consumer.outputs[name] == expected_output(tokens, 4, **engine_kind)
    assert NEAR * BLOCK < loaded[0] <= ALL * BLOCK
    assert loaded[1] == NEAR * BLOCK
    assert consumer.computed_tokens >= (ALL - NEAR) * BLOCK
