"""Configurations that nobody chose here: each starts, or is refused by one `UsageError`.

They are drawn from what vLLM's own source offers (vllm_configurations.py): a worker that dies after
the scheduler's side has accepted, or any other exception, is a failure. vLLM starts with each first
without a connector: what ends that is vLLM's own, and nothing else is. `KVSTORE_FUZZ_SEED` draws
others, `KVSTORE_FUZZ_TIMES` as many times more, as for the tests of tests/fuzz.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_configurations import (
    UnusableError,
    axes,
    check_usable,
    config_of,
    drawn,
    kv_caches_of,
    layer_kinds,
    memory_of,
)
from vllm_model_checks import groups_of
from vllm_model_config import vllm_config

from connector import build
from kvstore import UsageError
from kvstore.testing.blockstore import MemoryBlockStore

pytestmark = pytest.mark.vllm
SEED = int(os.environ.get("KVSTORE_FUZZ_SEED") or 0)
DRAWS = 60 * int(os.environ.get("KVSTORE_FUZZ_TIMES") or 1)
"""Of each seed; vLLM itself starts with a third of them."""


@pytest.fixture(scope="module")
def base(model: Path) -> Any:
    return vllm_config(model, blocks=8)


@pytest.fixture(autouse=True)
def no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryBlockStore()
    monkeypatch.setattr(build, "open_store", lambda *_, **__: store)


def on(platform: str, monkeypatch: pytest.MonkeyPatch, *, v2_runner: bool | None = None) -> None:
    """What the adapter asks vLLM of the machine; `v2_runner` is what users set for it."""
    if v2_runner is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(v2_runner)))
    if platform == "cpu":
        return
    machine = SimpleNamespace(
        is_cpu=lambda: False, get_device_capability=lambda: (9, 0), device_type="cuda"
    )
    for module in ("shape", "identity", "groups.states"):
        monkeypatch.setattr(f"connector.adapters.vllm.{module}.current_platform", machine)


def started(base: Any, draw: dict[str, Any]) -> str:
    """Start both sides as vLLM does; returns what became of it.

    A worker may stand aside where it is told more than the scheduler's side: it logs the reason,
    and the engine computes. Raises `UnusableError` for what vLLM does not take, `AssertionError`
    where the sides do not name blocks alike.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

    from connector.adapters.vllm.bystander import Bystander

    check_usable(base, draw)
    config = config_of(base, draw)
    scheduler_cache, worker_caches = kv_caches_of(config, draw)
    create = KVConnectorFactory.create_connector
    try:
        scheduler = create(config, KVConnectorRole.SCHEDULER, scheduler_cache)
    except UsageError as e:
        return f"refused: {e.field}"
    made, aside = [scheduler], 0
    try:
        per_stage = config.parallel_config.world_size // draw["pp_size"]
        for rank in {0, per_stage - 1, config.parallel_config.world_size - 1}:
            own = worker_caches[rank // per_stage]
            memory = memory_of(own, draw["layout"])
            config.parallel_config.rank = rank
            made.append(worker := create(config, KVConnectorRole.WORKER, own))
            worker.register_kv_caches(memory)
            if isinstance(worker._worker, Bystander):
                aside += 1
                continue
            names, theirs = (
                [group.namespaces for group in groups_of(side)] for side in (worker, scheduler)
            )
            assert names == theirs, "both sides name blocks alike"
        return "a worker stands aside" if aside else "started"
    finally:
        for one in made:
            one.shutdown()


@pytest.mark.parametrize("seed", range(SEED, SEED + 4))
def test_what_users_configure_starts_or_is_refused_by_name(
    base: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng, fates = random.Random(seed), Counter[str]()
    for number in range(DRAWS):
        draw = drawn(rng)
        with monkeypatch.context() as patch:
            on(draw["platform"], patch, v2_runner=draw["v2_runner"])
            try:
                fates[started(base, draw)] += 1
            except UnusableError as e:
                fates[f"vLLM: {str(e)[:40]}"] += 1
            except Exception as e:
                raise AssertionError(f"seed {seed}, draw {number}: {draw}") from e
    print(fates.most_common())
    assert fates["started"] > 0


PLAIN = {
    "other_kind": None,
    "cache_dtype": "auto",
    "block_size": 16,
    "layout": "LBNHC",
    "tp_size": 1,
    "pp_size": 1,
    "dcp_size": 1,
    "pcp_size": 1,
    "interleave": 1,
    "kv_heads": 8,
    "head_size": 64,
    "method": None,
    "caching": True,
    "mamba_mode": "align",
    "role": "kv_both",
    "layerwise": False,
    "payload_order": "heads",
}


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("axis", list(PLAIN))
def test_each_value_of_each_choice_alone(
    base: Any, monkeypatch: pytest.MonkeyPatch, axis: str, platform: str
) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    rng, fates = random.Random(1), {}
    on(platform, monkeypatch)
    for value in dict.fromkeys(axes()[axis]):
        plain = {**PLAIN, "kind": FullAttentionSpec, "platform": platform, axis: value}
        try:
            fates[str(value)] = started(base, drawn(rng, **plain))
        except UnusableError as e:
            fates[str(value)] = f"vLLM: {e}"
    print(fates)
    assert "started" in fates.values()


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_each_kind_of_layer_alone(
    base: Any, monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    rng, fates = random.Random(2), {}
    on(platform, monkeypatch)
    for kind in layer_kinds():
        plain = {**PLAIN, "kind": kind, "platform": platform}
        try:
            fates[kind.__name__] = started(base, drawn(rng, **plain))
        except UnusableError as e:
            fates[kind.__name__] = f"vLLM: {e}"
    print(fates)
    assert list(fates.values()).count("started") >= 5


def test_trap_what_vllms_kernels_for_cpus_do_not_take_is_refused_by_name(base: Any) -> None:
    """They say so by an exception of their own, to whoever asks how a block's bytes lie."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    plain = {**PLAIN, "kind": FullAttentionSpec, "platform": "cpu", "cache_dtype": "fp8"}
    rng = random.Random(3)
    has_fp8 = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
    refused = "refused: kv_cache_dtype, head_size"
    assert started(base, drawn(rng, **plain)) == ("started" if has_fp8 else refused)
    odd = drawn(rng, **{**plain, "head_size": 80})
    assert started(base, odd) == refused


def test_trap_a_stage_without_a_layer_of_some_group_is_refused_by_name(base: Any) -> None:
    """vLLM tells each stage all groups, and of each the layers that the stage has."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from connector.adapters.vllm.shape import engine_shape
    from connector.settings import ConnectorSettings

    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=64, dtype=torch.bfloat16)
    groups = [KVCacheGroupSpec(names, spec) for names in (["model.layers.0.self_attn.attn"], [])]
    kv_cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    draw = drawn(random.Random(4), **{**PLAIN, "pp_size": 2}, kind=FullAttentionSpec)
    with pytest.raises(UsageError, match=r"pipeline_parallel_size=2.*group 1"):
        engine_shape(config_of(base, draw), kv_cache, ConnectorSettings())
