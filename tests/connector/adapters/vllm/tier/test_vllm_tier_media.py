"""A tier is told nothing of a request's pictures, and a part of the configuration: it finds out
the rest, and refuses names that stand for several pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from test_vllm_tier import CHUNK_BYTES, CHUNKS
from vllm_model_config import kv_cache_config, vllm_config

from kvstore import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from stores import NodeProcess

pytestmark = pytest.mark.vllm


def offloading(
    model: Path, node: NodeProcess, change: Any = None, **settings: Any
) -> dict[str, Any]:
    """Makes vLLM's own connector with our tier below it, as its engine does; what the tier's
    namespace is made of."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

    tier = {"type": "KVStoreTier", "module_path": "connector.adapters.vllm.tier", "weights_id": "w"}
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": CHUNKS * CHUNK_BYTES,
        "secondary_tiers": [{**tier, **node.engine_settings}],
    }
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    config = vllm_config(model, blocks=8, transfer=transfer, **settings)
    if change is not None:
        change(config)
    groups = kv_cache_config(8)
    made: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, groups)
    (one,) = made.connector_scheduler.manager.secondary_tiers
    made.shutdown()
    return dict(one._fields)


def test_names_made_by_a_counter_are_refused(model: Path, node: NodeProcess) -> None:
    with pytest.raises(UsageError, match="mm_processor_cache_gb=0: must be above 0"):
        offloading(model, node, prefix_caching=False, media_cache_gb=0)


def test_where_a_name_counts_or_there_is_none_it_starts(model: Path, node: NodeProcess) -> None:
    def text_alone(config: Any) -> None:
        config.model_config.multimodal_config.language_model_only = True

    offloading(model, node, prefix_caching=False, media_cache_gb=4)
    offloading(model, node, prefix_caching=True, media_cache_gb=0)
    offloading(model, node, prefix_caching=False)
    offloading(model, node, text_alone, prefix_caching=False, media_cache_gb=0)


def test_what_an_engine_computes_with_that_is_not_the_default_is_in_the_namespace(
    model: Path, node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = offloading(model, node)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "fp8")
    added = {"VLLM_MARLIN_INPUT_DTYPE", "batch_invariant"}
    assert offloading(model, node).keys() == plain.keys() | added
