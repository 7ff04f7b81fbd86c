"""The vLLM adapter's own part: registration, settings, and answers that need no engine."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import pickle
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_model_config import ENGINE_BLOCK, kv_cache_config, vllm_config
from vllm_model_engine import ModelEngine, expected_output

from connector.adapters import register_vllm
from connector.messages import LoadJob, StepPlan, WorkerReport
from kvstore.testing.blockstore import MemoryBlockStore

pytestmark = pytest.mark.vllm


def shape(config: Any, groups: Any) -> Any:
    from connector.adapters.vllm.shape import engine_shape
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
    from connector.adapters.vllm import connector as adapter

    lines: list[tuple[int, str]] = []

    def record(level: int) -> Any:
        return lambda text, *args: lines.append((level, text % args))

    for level, name in ((logging.ERROR, "error"), (logging.WARNING, "warning")):
        monkeypatch.setattr(adapter.logger, name, record(level))
    return lines


def warned(config: Any) -> None:
    from connector.adapters.vllm.connector import _warn

    _warn(config)


ADDED = {
    "explain",
    "weights_may_have_changed",
    "weights_named",
    "adapter_changes",
    "own_cache_emptied",
    "saves_ended",
    "end_loads",
    "end_saves",
    "ended_everywhere",
}
"""Ours alone: nothing of vLLM calls it."""


class TestRegistration:
    def test_trap_registering_twice_is_harmless_and_the_name_is_the_class_name(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        register_vllm()
        register_vllm()
        found = KVConnectorFactory.get_connector_class_by_name("KVStoreConnector")
        assert found.__name__ == "KVStoreConnector"

    def test_trap_the_module_registers_its_class_when_it_is_imported(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Named by its module under MultiConnector, it is looked up by name for statistics."""
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        package = importlib.import_module("connector.adapters.vllm")
        module = importlib.import_module("connector.adapters.vllm.connector")
        monkeypatch.delitem(KVConnectorFactory._registry, "KVStoreConnector")
        monkeypatch.delattr(package, "connector")
        monkeypatch.delitem(sys.modules, module.__name__)
        named = package.KVStoreConnector  # as vLLM takes it: importing the package does nothing
        found = KVConnectorFactory.get_connector_class_by_name("KVStoreConnector")
        assert found is named is not module.KVStoreConnector

    def test_trap_the_constructor_takes_what_vllm_passes(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        config = SimpleNamespace(**transfer())
        found = KVConnectorFactory.get_connector_class(config)
        assert found.__module__ == "connector.adapters.vllm.connector"

    def test_the_entry_point_registers_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        monkeypatch.setattr(KVConnectorFactory, "_registry", {})
        project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())
        points = project["project"]["entry-points"]["vllm.general_plugins"]
        module, _, function = points["kvstore"].partition(":")
        getattr(importlib.import_module(module), function)()
        assert list(KVConnectorFactory._registry) == ["KVStoreConnector"]

    def test_every_method_of_vllms_base_class_keeps_its_signature(self) -> None:
        """Drift guard: what we override must still exist and take the same arguments."""
        import inspect

        from vllm.distributed.kv_transfer.kv_connector.v1.base import (
            KVConnectorBase_V1,
            SupportsHMA,
        )

        from connector.adapters.vllm.connector import KVStoreConnector

        own = [
            name
            for name, value in vars(KVStoreConnector).items()
            if inspect.isfunction(value) and not name.startswith("_") and name not in ADDED
        ]
        assert len(own) > 15
        assert not any(hasattr(KVConnectorBase_V1, name) for name in ADDED), "vLLM has it now"
        for name in own:
            base = KVConnectorBase_V1 if hasattr(KVConnectorBase_V1, name) else SupportsHMA
            theirs = inspect.signature(getattr(base, name))
            ours = inspect.signature(getattr(KVStoreConnector, name))
            assert list(ours.parameters) == list(theirs.parameters), name


class TestAnswers:
    def test_trap_a_cache_requires_no_delivery_and_no_piecewise_graphs(self, model: Path) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

        from connector.adapters.vllm.connector import KVStoreConnector

        config = vllm_config(model, blocks=8)
        connector = KVStoreConnector(config, KVConnectorRole.WORKER, kv_cache_config(8))
        assert connector.requires_kv_delivery is False
        assert connector.reset_cache() is None
        assert connector.get_kv_connector_stats() is None
        assert KVStoreConnector.requires_piecewise_for_cudagraph({}) is False
        assert KVStoreConnector.get_required_kvcache_layout(config) is None
        connector.shutdown()

    def test_trap_failures_are_told_as_the_core_says_by_request_or_by_block(
        self, model: Path
    ) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

        from connector.adapters.vllm.connector import KVStoreConnector, KVStoreMetadata

        config, groups = vllm_config(model, blocks=8), kv_cache_config(8)
        connector = KVStoreConnector(config, KVConnectorRole.WORKER, groups)
        report = WorkerReport({"r", "s", "t"}, {"r"}, {5}, {0: 0})
        connector._worker.poll = lambda wait_s: report  # type: ignore[union-attr]
        connector.bind_connector_metadata(KVStoreMetadata(StepPlan()))
        results = connector.get_transfer_results(set())
        assert results.finished_recving == {"r", "s", "t"}
        assert results.failed_recving == {"r"}
        assert connector.get_block_ids_with_load_errors() == {5}
        connector.shutdown()

    def test_trap_loads_wait_for_what_was_submitted_before_the_step_not_for_its_forward(
        self, model: Path
    ) -> None:
        """vLLM launches the forward between the two calls."""
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

        from connector.adapters.vllm.connector import KVStoreConnector, KVStoreMetadata

        config, groups = vllm_config(model, blocks=8), kv_cache_config(8)
        connector = KVStoreConnector(config, KVConnectorRole.WORKER, groups)
        submitted, started = [0], []
        worker = connector._worker
        worker.mark_ready = lambda: submitted[0]  # type: ignore[union-attr,method-assign]
        worker.start_loads = lambda *with_ready: started.append(with_ready)  # type: ignore
        jobs = [LoadJob(0, "r", ())]
        connector.bind_connector_metadata(KVStoreMetadata(StepPlan(loads=jobs)))
        submitted[0] += 1
        connector.start_load_kv(None)
        assert started == [(jobs, 0)]
        connector.bind_connector_metadata(KVStoreMetadata(StepPlan()))
        connector.start_load_kv(None)
        assert started[1] == ([], None), "a step without loads marks nothing"
        connector.shutdown()

    def test_trap_reports_of_several_workers_are_counted_together(self) -> None:
        from connector.adapters.vllm.connector import KVStoreWorkerMetadata

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

    def test_good_settings_are_passed_in_silence(
        self, model: Path, said: list[tuple[int, str]]
    ) -> None:
        warned(vllm_config(model, blocks=8))
        assert said == []


class TestShape:
    def test_trap_engines_that_hash_in_another_way_share_blocks(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        base = shape(vllm_config(model, blocks=8), kv_cache_config(8)).model
        monkeypatch.setenv("PYTHONHASHSEED", "5")
        config = vllm_config(model, blocks=8)
        config.cache_config.prefix_caching_hash_algo = "sha256"
        assert shape(config, kv_cache_config(8)).model == base
        assert base["hash_algorithm"] == "kvstore-chain-1"

    def test_trap_the_order_within_a_block_is_in_the_namespace(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm.v1.attention.backends import cpu_attn

        from connector.adapters.vllm import shape as vllm_shape

        def order(**changes: Any) -> object:
            groups = kv_cache_config(8)
            group = groups.kv_cache_groups[0]
            spec = dataclasses.replace(group.kv_cache_spec, **changes)
            object.__setattr__(group, "kv_cache_spec", spec)
            (found,) = shape(vllm_config(model, blocks=8), groups).groups
            return found.fields["within_block"]

        assert order() != order(block_size=32)
        before = order()
        monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "another")
        assert order() != before
        monkeypatch.setattr(vllm_shape.current_platform, "is_cpu", lambda: False, raising=False)
        assert order() == "" == order(block_size=32)
        assert order(state_content_bytes=16) != order(state_content_bytes=16, block_size=32)

    def test_trap_raw_pages_in_another_order_are_others(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """NVFP4: [K data | K scale | V data | V scale] a page, each by heads or by tokens."""
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode
        from vllm.v1.kv_cache_layout import KVCacheLayout

        from connector.adapters.vllm import shape as vllm_shape

        machine = SimpleNamespace(is_cpu=lambda: False, get_device_capability=lambda: (9, 0))
        monkeypatch.setattr(vllm_shape, "current_platform", machine)
        config = vllm_config(model, blocks=8)
        common = {"block_size": ENGINE_BLOCK, "num_kv_heads": 2, "head_size": 64}
        raw = FullAttentionSpec(
            **common,
            dtype=torch.uint8,
            kv_quant_mode=KVQuantMode.NVFP4,
            num_head_slots=4,
            state_content_bytes=36,
        )
        dense = FullAttentionSpec(**common, dtype=torch.bfloat16)

        def page(spec: Any) -> str:
            return vllm_shape._within_block(config, spec)

        for layout in KVCacheLayout:
            config.cache_config.kv_cache_layout = layout.name
            assert page(dense) == "", "copied by its strides, into the same bytes"
            same = [
                other
                for other in KVCacheLayout
                if other.layer_view_order == layout.layer_view_order
            ]
            known = page(raw)
            for other in KVCacheLayout:
                config.cache_config.kv_cache_layout = other.name
                assert (page(raw) == known) is (other in same), (layout, other)
        machine.get_device_capability = lambda: (10, 0)
        assert page(raw) != known

    def test_trap_rope_is_in_the_namespace(self, model: Path) -> None:
        base = shape(vllm_config(model, blocks=8), kv_cache_config(8)).model
        config = vllm_config(model, blocks=8)
        config.model_config.hf_text_config.rope_parameters = {"rope_theta": 5e5}
        assert shape(config, kv_cache_config(8)).model != base

    def test_trap_sizes_come_from_the_resolved_block_size(self, model: Path) -> None:
        (group,) = shape(vllm_config(model, blocks=8), kv_cache_config(8)).groups
        geometry = group.geometry
        assert dataclasses.asdict(geometry) == {
            "layers": 2,
            "heads": 2,
            "channel_bytes": 16,
            "engine_block_tokens": ENGINE_BLOCK,
            "recurrent": False,
            "runs": (),
            "tokens_per_slot": 1,
            "folded_heads": 1,
        }

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
        transfer(kv_connector_extra_config={"block_tokens": 32, "weights_id": name})
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
        engine.serve("r", prompt)
        assert engine.outputs["r"] == expected_output(prompt, 4)
        plans = [m.metadata for m in engine.metadata]
        loads.append([sum(len(pair[i].plan.loads) for pair in plans) for i in (0, 1)])
        engine.close()
    assert len(store.sealed()) == 2 * 3
    assert loads == [[0, 0], [1, 0]]
