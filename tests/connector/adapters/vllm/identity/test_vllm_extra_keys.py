"""What vLLM's hashes hold beside tokens: each kind, where it is made, and whether its name is one
in the whole store. Of vLLM's own source: a new kind fails here."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm
KINDS = {
    "lora": "name and path, from the request; ours adds a fingerprint of the files (weights.py)",
    "mm": "the identifier, made by the front end (_process_mm_uuids): content, or see MEDIA_NAMES",
    "cache_salt": "the user's own, in the first block, which all others follow",
    "prompt_embeds": "a digest of the values, made by the engine core",
}
MEDIA_NAMES = {
    "hasher.hash_kwargs(hash_algorithm, model_id=model_id, **{modality: item}, **hash_factors)": (
        "a digest of the item, or of a user's or a counter's name, with what it is processed by"
    ),
    "uuid_item": "a user's or a counter's name as it is",
}


def tree(path: str) -> ast.Module:
    import vllm

    return ast.parse((Path(next(iter(vllm.__path__))) / path).read_text())


def function(module: ast.Module, name: str) -> ast.FunctionDef:
    (found,) = (
        node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return found


def test_every_kind_of_extra_key_is_known() -> None:
    module = tree("v1/core/kv_cache_utils.py")
    makers = [one.name for one in module.body if isinstance(one, ast.FunctionDef)]
    makers = [name for name in makers if name.startswith("_gen_")]
    whole = function(module, "generate_block_hash_extra_keys")
    called = {ast.unparse(one.func) for one in ast.walk(whole) if isinstance(one, ast.Call)}
    assert called == {*makers, "tuple"}
    made = {
        str(node.elts[0].value)
        for name in (*makers, whole.name)
        for node in ast.walk(function(module, name))
        if isinstance(node, ast.Tuple) and node.elts
        if isinstance(node.elts[0], ast.Constant) and isinstance(node.elts[0].value, str)
    }
    assert made == set(KINDS)
    assert len(makers) == 3


def test_every_name_of_media_is_known() -> None:
    names = function(tree("multimodal/processing/inputs.py"), "get_mm_hashes")
    made = {
        ast.unparse(call.args[0])
        for call in ast.walk(names)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "hashes.append"
    }
    assert made == set(MEDIA_NAMES)


def test_a_counter_names_media_where_both_settings_are_off_and_nowhere_else() -> None:
    base = tree("renderers/base.py")
    process = function(base, "_process_mm_uuids")
    (only,) = (node for node in process.body if isinstance(node, ast.If))
    assert ast.unparse(only.test) == (
        "model_config.multimodal_config and "
        "model_config.multimodal_config.mm_processor_cache_gb == 0 and "
        "(not self.config.cache_config.enable_prefix_caching)"
    )
    counted = [node for node in ast.walk(process) if isinstance(node, ast.Name)]
    inside = [node for node in ast.walk(only) if isinstance(node, ast.Name)]
    uses = [node.id == "mm_req_id" for node in counted], [n.id == "mm_req_id" for n in inside]
    assert sum(uses[0]) == sum(uses[1]) == 1
    made: list[Any] = [
        node
        for node in ast.walk(base)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "mm_req_id"
    ]
    assert [ast.unparse(one.value) for one in made] == [
        "f'renderer{self.api_process_rank}-mm-{self._mm_req_counter.inc(1)}'"
    ]


def test_what_a_request_says_of_its_media_does_not_say_who_named_it() -> None:
    """Then requests could be told one by one."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec

    fields = set(MultiModalFeatureSpec.__dataclass_fields__)
    assert fields == {"data", "identifier", "mm_hash", "mm_position", "modality"}
