"""The vLLM adapter's own part: registration, settings, and answers that need no engine."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import pickle
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_model_engine import (
    ENGINE_BLOCK,
    ModelEngine,
    expected_output,
    kv_cache_config,
    vllm_config,
)

from connector.adapters import register_vllm
from connector.base import StepPlan, WorkerReport
from kvstore import UsageError
from kvstore.testing.blockstore import MemoryBlockStore

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def shape(config: Any, groups: Any) -> Any:
    from connector.adapters.vllm_shape import engine_shape
    from connector.settings import ConnectorSettings

    return engine_shape(config, groups, ConnectorSettings())


def transfer(**changes: Any) -> dict[str, Any]:
    base = {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "connector.adapters.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {},
    }
    return {**base, **changes}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    from connector.adapters import vllm as adapter

    lines: list[tuple[int, str]] = []

    def record(level: int) -> Any:
        return lambda text, *args: lines.append((level, text % args))

    for level, name in ((logging.ERROR, "error"), (logging.WARNING, "warning")):
        monkeypatch.setattr(adapter.logger, name, record(level))
    return lines


def warned(config: Any) -> None:
    from connector.adapters.vllm import _warn

    _warn(config)


ADDED = {"explain"}
"""Ours alone: nothing of vLLM calls it."""


class TestRegistration:
    def test_trap_registering_twice_is_harmless_and_the_name_is_the_class_name(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        register_vllm()
        register_vllm()
        found = KVConnectorFactory.get_connector_class_by_name("KVStoreConnector")
        assert found.__name__ == "KVStoreConnector"

    def test_trap_the_constructor_takes_what_vllm_passes(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        config = SimpleNamespace(**transfer())
        found = KVConnectorFactory.get_connector_class(config)
        assert found.__module__ == "connector.adapters.vllm"

    def test_the_entry_point_names_the_registration(self) -> None:
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
        points = project["project"]["entry-points"]["vllm.general_plugins"]
        module, _, function = points["kvstore"].partition(":")
        assert getattr(importlib.import_module(module), function) is register_vllm

    def test_every_method_of_vllms_base_class_keeps_its_signature(self) -> None:
        """Drift guard: what we override must still exist and take the same arguments."""
        import inspect

        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

        from connector.adapters.vllm import KVStoreConnector

        own = [
            name
            for name, value in vars(KVStoreConnector).items()
            if inspect.isfunction(value) and not name.startswith("_") and name not in ADDED
        ]
        assert len(own) > 15
        assert not any(hasattr(KVConnectorBase_V1, name) for name in ADDED), "vLLM has it now"
        for name in own:
            theirs = inspect.signature(getattr(KVConnectorBase_V1, name))
            ours = inspect.signature(getattr(KVStoreConnector, name))
            assert list(ours.parameters) == list(theirs.parameters), name


class TestAnswers:
    def test_trap_a_cache_requires_no_delivery_and_no_piecewise_graphs(self, model: Path) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        from connector.adapters.vllm import KVStoreConnector

        config = vllm_config(model, blocks=8)
        connector = KVStoreConnector(config, KVConnectorRole.WORKER, kv_cache_config(8))
        assert connector.requires_kv_delivery is False
        assert connector._cache_hit_source is CacheHitSource.HOST
        assert connector.reset_cache() is None
        assert connector.get_kv_connector_stats() is None
        assert KVStoreConnector.requires_piecewise_for_cudagraph({}) is False
        assert KVStoreConnector.get_required_kvcache_layout(config) is None
        connector.shutdown()

    def test_trap_with_several_groups_failures_are_told_by_request(self, model: Path) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

        from connector.adapters.vllm import KVStoreConnector, KVStoreMetadata

        groups = kv_cache_config(8)
        connector = KVStoreConnector(vllm_config(model, blocks=8), KVConnectorRole.WORKER, groups)
        report = WorkerReport({"r"}, {"r"}, {5}, {0: 0})
        connector._worker.poll = lambda wait_s: report  # type: ignore[union-attr]
        connector.bind_connector_metadata(KVStoreMetadata(StepPlan()))
        results = connector.get_transfer_results(set())
        assert (results.finished_recving, results.failed_recving) == ({"r"}, set())
        assert connector.get_block_ids_with_load_errors() == {5}
        groups.kv_cache_groups.append(groups.kv_cache_groups[0])
        results = connector.get_transfer_results(set())
        assert (results.finished_recving, results.failed_recving) == ({"r"}, {"r"})
        assert connector.get_block_ids_with_load_errors() == set()
        connector.shutdown()

    def test_trap_reports_of_several_workers_are_counted_together(self) -> None:
        from connector.adapters.vllm import KVStoreWorkerMetadata

        one = KVStoreWorkerMetadata(WorkerReport(failed_blocks={1: 4}, ended_saves={7: 1}))
        two = KVStoreWorkerMetadata(WorkerReport(failed_blocks={1: 2}, ended_saves={7: 1, 8: 1}))
        total = pickle.loads(pickle.dumps(one)).aggregate(two).report
        assert total.failed_blocks == {1: 2}
        assert total.ended_saves == {7: 2, 8: 1}


class TestWarnings:
    def test_trap_a_policy_that_fails_requests_is_said_loudly(
        self, model: Path, said: list[tuple[int, str]]
    ) -> None:
        warned(vllm_config(model, blocks=8, transfer=transfer(kv_load_failure_policy="fail")))
        ((level, text),) = said
        assert level == logging.ERROR
        assert '"kv_load_failure_policy": "recompute"' in text

    def test_trap_another_hash_algorithm_is_warned_about(
        self, model: Path, said: list[tuple[int, str]]
    ) -> None:
        config = vllm_config(model, blocks=8)
        warned(config)
        assert said == []
        config.cache_config.prefix_caching_hash_algo = "sha256"
        warned(config)
        ((level, text),) = said
        assert level == logging.WARNING
        assert "sha256_cbor" in text


class TestShape:
    def test_trap_hash_seed_algorithm_and_rope_are_in_the_namespace(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fields(**changes: Any) -> Any:
            config = vllm_config(model, blocks=8)
            for name, value in changes.items():
                setattr(config.cache_config, name, value)
            return shape(config, kv_cache_config(8)).model

        base = fields()
        assert fields(prefix_caching_hash_algo="sha256") != base
        monkeypatch.setenv("PYTHONHASHSEED", "5")
        assert fields() != base
        monkeypatch.delenv("PYTHONHASHSEED")
        config = vllm_config(model, blocks=8)
        config.model_config.hf_text_config.rope_parameters = {"rope_theta": 5e5}
        assert shape(config, kv_cache_config(8)).model != base

    def test_trap_sizes_come_from_the_resolved_block_size(self, model: Path) -> None:
        geometry = shape(vllm_config(model, blocks=8), kv_cache_config(8)).geometry
        assert dataclasses.asdict(geometry) == {
            "layers": 2,
            "heads": 2,
            "channel_bytes": 16,
            "engine_block_tokens": ENGINE_BLOCK,
        }

    def test_trap_context_parallel_blocks_are_refused(self, model: Path) -> None:
        config = vllm_config(model, blocks=8)
        config.parallel_config.decode_context_parallel_size = 2
        with pytest.raises(UsageError, match="decode_context_parallel_size"):
            shape(config, kv_cache_config(8))

    def test_trap_hybrid_models_are_refused_with_the_way_out(self, model: Path) -> None:
        groups = kv_cache_config(8)
        groups.kv_cache_groups.append(groups.kv_cache_groups[0])
        with pytest.raises(UsageError, match="--disable-hybrid-kv-cache-manager"):
            shape(vllm_config(model, blocks=8), groups)

    def test_roles(self, model: Path) -> None:
        for role, loads, saves in (
            ("kv_producer", False, True),
            ("kv_consumer", True, False),
            ("kv_both", True, True),
        ):
            found = shape(vllm_config(model, role, blocks=8), kv_cache_config(8))
            assert (found.loads, found.saves) == (loads, saves)


def test_trap_under_multi_connector_the_child_that_lost_loads_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of ours with different namespaces: both save, the first one's hit wins."""
    store = MemoryBlockStore()
    children = [
        transfer(kv_connector_extra_config={"block_tokens": 32, "model_id": name})
        for name in ("a", "b")
    ]
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }
    prompt = [(i * 7) % 500 for i in range(100)]
    loads: list[list[int]] = []
    for _ in range(2):
        engine = ModelEngine(model, store, monkeypatch, transfer=multi)
        engine.add("r", prompt)
        engine.run()
        assert engine.outputs["r"] == expected_output(prompt, 4)
        plans = [m.metadata for m in engine.metadata]
        loads.append([sum(len(pair[i].plan.loads) for pair in plans) for i in (0, 1)])
        engine.close()
    assert len(store.sealed()) == 2 * 3
    assert loads == [[0, 0], [1, 0]]
