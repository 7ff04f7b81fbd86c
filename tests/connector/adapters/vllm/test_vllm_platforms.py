"""The adapter starts, in both roles, on the configuration of every platform that vLLM has."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from each_input import each
from vllm_model_config import kv_cache_config, vllm_config

pytestmark = pytest.mark.vllm

ROLES = ("kv_producer", "kv_consumer", "kv_both")


def device_types() -> list[str]:
    """What `device_type` may be, by vLLM's own platforms; most of them cannot be imported here."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return ["cpu"]
    found = set()
    for path in (Path(spec.origin).parent / "platforms").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            named = any(getattr(target, "id", "") == "device_type" for target in targets)
            if named and isinstance(value, ast.Constant) and value.value:
                found.add(str(value.value))
    return sorted(found)


def test_vllms_platforms_are_found() -> None:
    assert {"cpu", "cuda", "xpu"} <= set(device_types())


@pytest.fixture(scope="module")
def config(model: Path) -> Any:
    return vllm_config(model, blocks=8)


def become(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's modules see a machine of that kind."""
    import vllm.platforms

    from connector.adapters.vllm import identity, shape
    from connector.adapters.vllm.groups import states

    if vllm.platforms.current_platform.device_type == device:
        return
    machine = SimpleNamespace(device_type=device, is_cpu=lambda: False)
    monkeypatch.setattr(vllm.platforms, "current_platform", machine, raising=False)
    for module in (identity, shape, states):
        monkeypatch.setattr(module, "current_platform", machine)


@each("vram", [False, True])
@each("role", ["kv_producer", "kv_consumer", "kv_both"])
@each("device", device_types())
def test_both_sides_start_on_every_platform(
    config: Any, monkeypatch: pytest.MonkeyPatch, device: str, role: str, vram: bool
) -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

    from connector.adapters.vllm.connector import KVStoreConnector

    become(device, monkeypatch)
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="KVStoreConnector",
        kv_role=role,
        kv_connector_extra_config={"vram": vram},
    )
    assert config.kv_transfer_config.kv_buffer_device == device, "vLLM's default there"
    sides = [
        KVStoreConnector(config, role, kv_cache_config(8))
        for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)
    ]
    shape, other = (side._shape for side in sides)
    assert shape == other
    assert shape.saves is (role != "kv_consumer")
    assert shape.loads is (role != "kv_producer")
    for connector in sides:
        connector.shutdown()
