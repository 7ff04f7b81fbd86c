"""Each variable and setting of vLLM has a verdict: in the namespace, refused, or why neither.

What fails here for a new vLLM is read in its source, and then named in `vllm_environment.py` or
`vllm_settings.py`.
"""

from __future__ import annotations

import dataclasses
import typing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import vllm_environment
import vllm_settings
from vllm_model_config import BLOCK, kv_cache_config, vllm_config
from vllm_model_engine import MakeEngine, expected_output, prompt

from connector.settings import ConnectorSettings

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.vllm
VARIABLES = {
    "VLLM_CPU_INT4_W4A8": "0",
    "VLLM_FLOAT32_MATMUL_PRECISION": "high",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": '{"dtype": "int8"}',
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": '{"dtype": "int8"}',
    "VLLM_MARLIN_INPUT_DTYPE": "fp8",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random",
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT": "mxfp4",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT8",
    "VLLM_USE_DEEP_GEMM_E8M0": "0",
    "VLLM_VIDEO_LOADER_BACKEND": "opencv_dynamic",
    "VLLM_XPU_INC_WNA16_BACKEND": "w4a16",
}
"""Values other than the default; of the rest "1" is one."""


def of_reason(verdicts: dict[str, str], reason: str) -> set[str]:
    return {name for why, names in verdicts.items() if reason in why for name in names.split()}


def configurations() -> dict[str, set[str]]:
    """Return the fields of vLLM's configuration and of all its parts, by class."""
    from vllm.config import VllmConfig

    found: dict[str, set[str]] = {}

    def add(kind: Any) -> None:
        for part in typing.get_args(kind):
            add(part)
        if not dataclasses.is_dataclass(kind) or kind.__name__ in found:  # type: ignore[union-attr]
            return
        names = {field.name for field in dataclasses.fields(kind)}
        found[kind.__name__] = names  # type: ignore[union-attr]
        hints = typing.get_type_hints(kind)
        for name in names:
            add(hints[name])

    add(VllmConfig)
    return found


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from connector.adapters.vllm.identity import ENVIRONMENT

    for name in (*ENVIRONMENT, "VLLM_BATCH_INVARIANT"):
        monkeypatch.delenv(name, raising=False)


def test_no_variable_of_vllms_is_without_a_verdict_or_has_two() -> None:
    from vllm import envs

    from connector.adapters.vllm.identity import ENVIRONMENT

    named = [name for names in vllm_environment.VERDICTS.values() for name in names.split()]
    assert len(named) == len(set(named))
    assert set(envs.environment_variables) - set(named) == set()
    own = of_reason(vllm_environment.VERDICTS, "identity.ENVIRONMENT")
    assert own == {*ENVIRONMENT, "VLLM_BATCH_INVARIANT"}


def test_no_setting_of_vllms_is_without_a_verdict_or_has_two() -> None:
    found = configurations()
    assert len(found) > 30
    assert sum(map(len, found.values())) > 500
    for kind, names in found.items():
        verdicts = vllm_settings.VERDICTS.get(kind, {})
        named = [name for some in verdicts.values() for name in some.split()]
        assert len(named) == len(set(named)), kind
        assert names - set(named) == set(), kind


def test_the_settings_that_are_named_are_those_of_the_namespace() -> None:
    from connector.adapters.vllm.identity import CONFIGURATION

    own = {
        name
        for verdicts in vllm_settings.VERDICTS.values()
        for name in of_reason(verdicts, "identity.CONFIGURATION")
    }
    assert own == {path.rpartition(".")[2] for path in CONFIGURATION}


def test_defaults_are_vllms() -> None:
    from vllm import envs
    from vllm.config import LoRAConfig, MultiModalConfig, SpeculativeConfig, VllmConfig
    from vllm.config.utils import get_field

    from connector.adapters.vllm.identity import CONFIGURATION, ENVIRONMENT

    for name, default in ENVIRONMENT.items():
        if name in envs.environment_variables:
            assert default is None or getattr(envs, name) in (default, None), name
    parts = {
        "lora_config": LoRAConfig,
        "multimodal_config": MultiModalConfig,
        "speculative_config": SpeculativeConfig,
    }
    hints = typing.get_type_hints(VllmConfig)
    for path, default in CONFIGURATION.items():
        *rooms, name = path.split(".")
        kind = parts.get(rooms[-1]) or hints[rooms[0]] if rooms else VllmConfig
        field = get_field(kind, name)
        made = field.default_factory is not dataclasses.MISSING
        assert (field.default_factory() if made else field.default) == default, path


def fields_of(model: Path, change: Any = lambda config: None) -> dict[str, Any]:
    from connector.adapters.vllm.shape import engine_shape

    config = vllm_config(model, blocks=8)
    change(config)
    settings = ConnectorSettings()
    layout = engine_shape(config, kv_cache_config(8), settings).layout(settings)
    return dict(layout.groups[0].namespaces[0].fields)


def test_each_variable_that_changes_kv_is_a_field_where_it_is_not_the_default(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import envs

    from connector.adapters.vllm.identity import ENVIRONMENT

    before = fields_of(model)
    for name, default in ENVIRONMENT.items():
        if name not in envs.environment_variables:
            continue
        with monkeypatch.context() as patch:
            patch.setenv(name, VARIABLES.get(name, "1"))
            changed = fields_of(model)
            assert changed.pop(name, None) is not None, name
            assert changed == before
            if isinstance(default, bool):
                patch.setenv(name, str(int(default)))
                assert fields_of(model) == before, "what is said and is the default is none"


def test_each_setting_that_changes_kv_is_a_field_where_it_is_not_the_default(model: Path) -> None:
    from connector.adapters.vllm.identity import CONFIGURATION, unusual_fields

    assert unusual_fields(vllm_config(model, blocks=8)) == {}
    for path, default in CONFIGURATION.items():
        config = vllm_config(model, blocks=8)
        *rooms, name = path.split(".")
        part = config
        for room in rooms:
            if getattr(part, room) is None:
                object.__setattr__(part, room, SimpleNamespace())
            part = getattr(part, room)
        for value in (default, None):
            object.__setattr__(part, name, value)
            assert unusual_fields(config) == {}, path
        for value in ({"a": 1}, {"a": 2}, True, "other", 0.5):
            object.__setattr__(part, name, value)
            assert list(unusual_fields(config)) == [path]


def test_batch_invariant_engines_share_with_engines_like_them_alone(
    make: MakeEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(2 * BLOCK + 5)

    def loaded(engine: Any) -> int:
        engine.serve("r", tokens)
        assert engine.outputs["r"] == expected_output(tokens, 4)
        return int(engine.loaded_tokens)

    assert loaded(make()) == 0
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_BATCH_INVARIANT", "1")
        assert [loaded(make()), loaded(make())] == [0, 2 * BLOCK]
        one = fields_of(model)

        def other_backend(config: Any) -> None:
            config.attention_config.backend = "OTHER"

        def more_workers(config: Any) -> None:
            config.parallel_config.world_size = 2

        kinds = [one, fields_of(model, other_backend), fields_of(model, more_workers)]
        assert len({fields["batch_invariant"] for fields in kinds}) == 3
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert loaded(make()) == 2 * BLOCK
    assert fields_of(model).keys() == one.keys() - {"batch_invariant"}


def test_pages_that_rocm_shuffles_are_another_order_of_bytes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from connector.adapters.vllm import shape

    monkeypatch.setattr(shape.current_platform, "is_cpu", lambda: False)
    config = vllm_config(model, blocks=8)
    config.cache_config.kv_cache_layout = "LBNHC"
    spec = kv_cache_config(8).kv_cache_groups[0].kv_cache_spec
    assert shape._within_block(config, spec) == ""
    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
    assert shape._within_block(config, spec) == "NONE, 16 tokens, shuffled, BNHC"
