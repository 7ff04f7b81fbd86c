"""The namespace of a vLLM engine names what it computes with, not what that is called."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_model_config import kv_cache_config, vllm_config

from connector.settings import ConnectorSettings
from kvstore import Namespace, UsageError

pytestmark = pytest.mark.vllm


def namespace(
    model: Path, change: Callable[[Any], None] = lambda _: None, **extra: Any
) -> Namespace:
    from connector.adapters.vllm.shape import engine_shape

    config = vllm_config(model, blocks=8)
    change(config)
    settings = ConnectorSettings(**extra)
    layout = engine_shape(config, kv_cache_config(8), settings).layout(settings)
    return layout.groups[0].namespaces[0]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    root.mkdir()
    vllm_config(root, blocks=8)
    return root


def test_two_fine_tunes_mounted_at_one_path_in_turn_share_no_key(model: Path) -> None:
    before = namespace(model)
    (model / "pytorch_model.bin").write_bytes(b"WEIGHTS")
    assert namespace(model) != before
    (model / "pytorch_model.bin").write_bytes(b"weights")
    assert namespace(model) == before


def test_two_paths_with_the_same_files_share(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "elsewhere")
    assert namespace(tmp_path / "elsewhere") == namespace(model)


def edited(model: Path, **fields: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **fields}))


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rms_norm_eps": 1e-3},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"a_field_of_tomorrow": 1},
    ],
)
def test_a_configuration_that_shapes_the_forward_is_part_of_it(
    model: Path, fields: dict[str, Any]
) -> None:
    before = namespace(model)
    edited(model, **fields)
    assert namespace(model) != before


def test_overrides_at_start_count_as_the_configuration_does(model: Path) -> None:
    def override(config: Any) -> None:
        config.model_config.hf_config.rms_norm_eps = 0.5

    def quantise(config: Any) -> None:
        config.model_config.quantization = "fp8"

    names = {namespace(model), namespace(model, override), namespace(model, quantise)}
    assert len(names) == 3


def test_names_alone_do_not_count(model: Path) -> None:
    before = namespace(model)
    edited(model, _name_or_path="elsewhere", transformers_version="9.9")
    assert namespace(model) == before


@pytest.mark.parametrize(
    ("rope", "counts"),
    [
        (None, False),
        ({"rope_type": "yarn", "factor": 2.0}, False),
        ({"rope_type": "longrope"}, True),
        ({"full": {"rope_type": "default"}, "sliding": {"rope_type": "of tomorrow"}}, True),
    ],
)
def test_the_context_length_counts_where_the_rotation_depends_on_it(
    model: Path, rope: dict[str, Any] | None, counts: bool
) -> None:
    def length(tokens: int) -> Callable[[Any], None]:
        def change(config: Any) -> None:
            config.model_config.hf_text_config.rope_parameters = rope
            config.model_config.max_model_len = tokens

        return change

    assert (namespace(model, length(512)) != namespace(model, length(1024))) is counts


def test_trap_no_layer_of_vllm_that_asks_for_the_context_length_is_unknown() -> None:
    """Of vLLM's own source: a file that is new here must be read, then named below."""
    import vllm.model_executor as package

    harmless = {
        # Buffers, tables and limits of input, encoders, pooling.
        "internvl", "kimi_vl", "kimi_k25", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "parakeet",
        "gemma3_mm", "gemma4_mm", "embedding_gemma2", "diffusion_gemma", "deepseek_ocr",
        "deepseek_v2", "nano_nemotron_vl", "step3_vl", "colpali", "voxtral", "voxtral_realtime",
        "idefics3", "glm4_1v", "lfm2_vl", "minicpmv", "ernie45_vl", "mllama4",
        # Refuses, or sizes state-space blocks, which are part of the namespace.
        "config",
    }  # fmt: skip
    shaping = {
        "llama4", "phi3_long_rope_scaled_rope", "minimax_m2", "plamo3", "cohere_compass"
    }  # fmt: skip
    root = Path(next(iter(package.__path__)))
    files = [*(root / "models").rglob("*.py"), *(root / "layers/rotary_embedding").rglob("*.py")]
    asks = {f.stem for f in files if re.search(r"\bmax_model_len\b", f.read_text())}
    assert files
    assert asks <= harmless | shaping


def test_weights_id_stands_for_the_files_of_those_who_know_better(model: Path) -> None:
    named = namespace(model, weights_id="mine-1")
    (model / "pytorch_model.bin").write_bytes(b"WEIGHTS")
    assert namespace(model, weights_id="mine-1") == named
    assert namespace(model, weights_id="mine-2") != named


def test_weights_that_nobody_can_look_at_are_shared_with_nobody(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model / "pytorch_model.bin").unlink()
    assert namespace(model) != namespace(model)
    assert "weights_id" in caplog.text
    assert namespace(model, weights_id="mine") == namespace(model, weights_id="mine")


def test_formats_without_files_say_so(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    from connector.adapters.vllm.identity import UNREADABLE_FORMATS

    for kind in UNREADABLE_FORMATS:
        caplog.clear()

        def loads(config: Any, kind: str = kind) -> None:
            config.load_config.load_format = kind

        assert namespace(model, loads) != namespace(model, loads)
        assert kind in caplog.text


def test_a_hub_name_leads_to_the_files_in_the_cache(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mount(commit: str) -> Callable[[Any], None]:
        place = tmp_path / "hub" / "models--org--name"
        if not (place / "snapshots" / commit).exists():
            shutil.copytree(model, place / "snapshots" / commit)
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / "main").write_text(commit)

        def change(config: Any) -> None:
            config.model_config.model = "org/name"
            config.load_config.download_dir = str(tmp_path / "hub")

        return change

    first = namespace(model, mount("1" * 40))
    assert first.fields["weights"].startswith("w1-")
    assert namespace(model, mount("1" * 40)) == first
    assert namespace(model, mount("2" * 40)) != first


def test_dummy_weights_are_the_same_on_engines_of_one_size(model: Path) -> None:
    from connector.adapters.vllm.identity import model_fields

    def dummy(config: Any) -> None:
        config.load_config.load_format = "dummy"

    def wide(config: Any) -> None:
        dummy(config)
        config.parallel_config.tensor_parallel_size = 2

    assert namespace(model, dummy) == namespace(model, dummy)
    assert namespace(model, dummy) != namespace(model)
    one, two = (
        model_fields(c, ConnectorSettings())["weights"]
        for c in (changed(model, dummy), changed(model, wide))
    )
    assert one != two


def changed(model: Path, change: Callable[[Any], None]) -> Any:
    config = vllm_config(model, blocks=8)
    change(config)
    return config


def test_two_adapters_mounted_at_one_path_in_turn_share_no_hash(
    model: Path, tmp_path: Path
) -> None:
    from vllm.lora.request import LoRARequest

    from connector.adapters.vllm.weights import Weights

    config = vllm_config(model, blocks=8)
    adapter = tmp_path / "adapter"
    adapter.mkdir()

    def seen(weights: bytes, known: Weights | None = None, **more: Any) -> tuple[str, ...]:
        (adapter / "adapter_model.safetensors").write_bytes(weights)
        request = SimpleNamespace(lora_request=LoRARequest("a", 1, str(adapter), **more))
        return (known or Weights(config, "p")).of(request)

    assert seen(b"one") == seen(b"one") != seen(b"two")
    engine = Weights(config, "p")
    loaded = seen(b"one", engine)
    assert seen(b"two", engine) == loaded, "vLLM has loaded the first"
    assert seen(b"two", engine, load_inplace=True) == seen(b"two")
    assert Weights(config, "p").of(SimpleNamespace(lora_request=None)) == ()


def test_weights_id_must_be_a_name() -> None:
    with pytest.raises(UsageError, match="weights_id"):
        ConnectorSettings(weights_id="")
