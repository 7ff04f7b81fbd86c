"""Engines whose processes somebody else starts (torchrun): vLLM's `external_launcher`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from vllm_model_checks import groups_of
from vllm_model_config import kv_cache_config, vllm_config

from kvstore import UsageError

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def base(model: Path) -> Any:
    return vllm_config(model, blocks=8)


def launched(base: Any, monkeypatch: pytest.MonkeyPatch, rank: int, **sizes: int) -> Any:
    """vLLM's configuration in the process with that RANK, as its worker leaves it."""
    from vllm.config import ParallelConfig

    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    config = copy.copy(base)
    config.parallel_config = ParallelConfig(
        distributed_executor_backend="external_launcher", **sizes
    )
    config.parallel_config.rank = rank  # v1/worker/worker_base.py
    return config


def sides(config: Any) -> list[Any]:
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

    from connector.adapters.vllm.connector import KVStoreConnector

    groups = kv_cache_config(8)
    return [KVStoreConnector(config, role, groups) for role in reversed(KVConnectorRole)]


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.covers("data parallel", "model")
def test_each_data_parallel_process_is_an_engine_of_its_own(
    base: Any, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """RANK counts over all engines: it is no place among one engine's shards."""
    config = launched(base, monkeypatch, rank, data_parallel_size=4)
    assert config.parallel_config.data_parallel_rank == rank
    worker, scheduler = sides(config)
    assert scheduler._shape.workers == 1, "its scheduler waits for its own worker only"
    (group,) = worker._w._groups
    assert group.saves
    assert (group.namespace,) == groups_of(scheduler)[0].namespaces
    for connector in (worker, scheduler):
        connector.shutdown()


@pytest.mark.parametrize("rank", [0, 1])
def test_trap_pipeline_stages_of_several_processes_are_refused_in_both_roles(
    base: Any, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    config = launched(base, monkeypatch, rank, pipeline_parallel_size=2)
    with pytest.raises(UsageError, match=r"external_launcher.*Use mp or ray"):
        sides(config)


@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
def test_trap_layer_by_layer_is_refused_where_processes_share_a_model(
    base: Any, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    config = launched(base, monkeypatch, 0, tensor_parallel_size=2)
    config.kv_transfer_config = copy.copy(config.kv_transfer_config)
    config.kv_transfer_config.kv_role = role
    config.kv_transfer_config.kv_connector_extra_config = {"layerwise": True}
    with pytest.raises(UsageError, match=r"external_launcher.*layerwise"):
        sides(config)
