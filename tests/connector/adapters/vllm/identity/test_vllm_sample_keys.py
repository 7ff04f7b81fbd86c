"""Keys of engines with nothing but defaults are what they were: a stored sample of an older one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from vllm_model_config import kv_cache_config, vllm_config

from connector.layout.prompt_keys import PromptKeys
from connector.settings import ConnectorSettings

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.vllm

FIELDS = {
    "block_tokens": 32,
    "channel_bytes": 16,
    "draft": "",
    "dtype": "torch.bfloat16",
    "engine": "vllm",
    "forward": "a6238c64f8526c11",
    "hash_algorithm": "kvstore-chain-1",
    "hash_block_tokens": 32,
    "head_first": 0,
    "head_size": 4,
    "heads": 2,
    "kv_cache_dtype": "auto/torch.bfloat16",
    "kv_group": 0,
    "kv_heads": 2,
    "kv_layers": "9bfdc81e6177eac9",
    "kv_spec": "FullAttentionSpec",
    "layers": 2,
    "layout": "LHNC",
    "layout_version": 1,
    "packing": "",
    "pp_rank": 0,
    "pp_size": 1,
    "quantisation": "",
    "total_heads": 2,
    "weights": "id sample",
    "within_block": "",
}
KEYS = [
    "85e51126100e553b85e51126100e553b82b87fd33916cc8921754e290e710451",
    "85e51126100e553b010a4150fa8d1c1c777b1bb9eeaf6cb30a83566cf36fd41c",
]
"""Of the tokens 0 to 63."""


def test_keys_of_a_default_engine_are_those_of_the_stored_sample(
    model: Path, token_by_token: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from connector.adapters.vllm import identity
    from connector.adapters.vllm.shape import engine_shape

    # What transformers writes into a configuration is its release's own.
    monkeypatch.setattr(identity, "forward_digest", lambda config: "f")
    settings = ConnectorSettings(weights_id="sample", block_tokens=32)
    config = vllm_config(model, blocks=8)
    layout = engine_shape(config, kv_cache_config(8), settings).layout(settings)
    keys = PromptKeys.of_layout(layout)
    assert keys is not None
    assert dict(keys.namespace.fields) == FIELDS
    assert [key.hex() for key in keys.of(range(64))] == KEYS
