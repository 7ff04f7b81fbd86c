"""The fields of the namespace that SGLang's process gives, with stand-ins for its arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

Fields = Callable[..., dict[str, Any]]
WEIGHTS = "pytorch_model.bin"


def adapter(path: Path, name: str = "a") -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_path=str(path))


@pytest.fixture
def fields(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fields:
    """The fields of a server with these arguments and adapters."""
    for name in ("model", "adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / WEIGHTS).write_bytes(b"1")
    context: Any = ModuleType("sglang.srt.runtime_context")
    package: Any = ModuleType("sglang")
    package.__version__ = "1"
    for module in (package, ModuleType("sglang.srt"), context):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "connector.adapters.sglang.engine", raising=False)
    engine = import_module("connector.adapters.sglang.engine")
    monkeypatch.delitem(sys.modules, "connector.adapters.sglang.engine")

    def fields(
        *adapters: object, weights_id: str | None = None, enable_lora: bool = True, **args: object
    ) -> dict[str, Any]:
        known = {"model_path": str(tmp_path / "model"), "kv_cache_dtype": "auto", **args}
        context.get_server_args = lambda: SimpleNamespace(**known)
        context.get_lora = lambda: SimpleNamespace(
            enable_lora=enable_lora, lora_paths=list(adapters)
        )
        return dict(engine.engine_fields(weights_id))

    return fields


@pytest.mark.parametrize("weights_id", [None, "tuned"])
def test_trap_the_files_of_adapters_count_and_not_their_names_and_paths(
    fields: Fields, tmp_path: Path, weights_id: str | None
) -> None:
    one, other = adapter(tmp_path / "adapter"), adapter(tmp_path / "model", "b")

    def of(*adapters: object) -> dict[str, Any]:
        return fields(*adapters, weights_id=weights_id)

    before = of(one, other)
    assert before == of(other, one)
    without = of()
    assert without == fields("a=/b", weights_id=weights_id, enable_lora=False)
    assert len({str(each) for each in (before, without, of(one), of(other))}) == 4
    (tmp_path / "adapter" / WEIGHTS).write_bytes(b"2")
    assert of(one, other) != before
    assert of() == without


def test_adapters_that_cannot_be_read_are_shared_with_nobody(
    fields: Fields, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = adapter(tmp_path / "nowhere")
    assert fields(nowhere, weights_id="tuned")["adapters"] != fields(weights_id="tuned")["adapters"]
    assert str(tmp_path / "nowhere") in caplog.text


@pytest.mark.parametrize(
    "name",
    [
        "json_model_override_args",
        "dtype",
        "quantization",
        "model_loader_extra_config",
        "kt_weight_path",
        "forward_hooks",
    ],
)
def test_trap_arguments_that_change_the_forward_count(fields: Fields, name: str) -> None:
    assert fields() == fields()
    assert fields(**{name: "other"}) != fields()


def test_trap_the_scales_of_an_fp8_cache_count(fields: Fields, tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    scales.write_text('{"0": 1.0}')
    one = fields(quantization_param_path=str(scales), weights_id="tuned")
    assert one == fields(quantization_param_path=str(scales), weights_id="tuned")
    assert one != fields(weights_id="tuned")
    scales.write_text('{"0": 2.0}')
    assert one != fields(quantization_param_path=str(scales), weights_id="tuned")
