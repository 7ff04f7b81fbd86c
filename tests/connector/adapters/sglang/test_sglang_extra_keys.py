"""What SGLang's page hashes hold beside tokens, by where it is made: of its own source, which is
read and not imported. A new kind fails here."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.sglang

EXTRA_KEYS = {
    "schedule_batch.py: extra_key": "the caller's class of requests, which may be anything",
    "schedule_batch.py: (extra_key or '') + lora_id": (
        "and an adapter: a random number, or of its name and path on the command line, for which "
        "the namespace has the files (engine.py)"
    ),
    "scheduler.py: f'{req.extra_key}|{namespace}'": "and how many expert-parallel ranks there are",
    "scheduler.py: namespace": "the same without a class",
}
ITEM_HASHES = {
    "uuid.uuid4().int": "random: SGLang was told to compute none, so nothing is found again",
    "existing_hash": "of a processor, or the caller's own word",
    "hash_feature(value)": "64 bits of the content's digest",
}
"""What stands for a picture among a prompt's tokens (`_compute_pad_values`)."""


def source(path: str) -> tuple[str, ast.Module]:
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    text = (Path(next(iter(spec.submodule_search_locations))) / "srt" / path).read_text()
    return text, ast.parse(text)


def named(path: str, name: str) -> ast.AST:
    return next(
        node
        for node in ast.walk(source(path)[1])
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
    )


def assigned(tree: ast.AST, *targets: str) -> set[str]:
    return {
        " ".join(ast.unparse(node.value).split())
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in targets
    }


def test_a_page_hash_begins_with_two_names_and_no_more() -> None:
    slots = next(iter(assigned(named("mem_cache/radix_cache.py", "RadixKey"), "__slots__")))
    assert set(ast.literal_eval(slots)) == {
        "token_ids", "extra_key", "cache_salt", "is_bigram", "limit"
    }  # fmt: skip
    seed = named("mem_cache/utils.py", "storage_namespace_seed")
    assert isinstance(seed, ast.FunctionDef)
    assert [one.arg for one in seed.args.args] == ["extra_key", "cache_salt"]


def test_every_part_of_an_extra_key_is_known() -> None:
    made = {
        f"{path}: {value}"
        for path in ("schedule_batch.py", "scheduler.py")
        for value in assigned(source(f"managers/{path}")[1], "extra_key", "req.extra_key")
    }
    # A request keeps what it was made with, and one without an adapter the caller's own.
    assert made | {"schedule_batch.py: extra_key"} == set(EXTRA_KEYS)
    assert assigned(named("managers/schedule_batch.py", "Req"), "self.cache_salt") == {
        "cache_salt or None"
    }


def test_every_name_of_a_picture_is_known() -> None:
    path = "multimodal/cache/identity.py"
    made = assigned(named(path, "resolve_multimodal_item_hash"), "item_hash")
    assert made == set(ITEM_HASHES)
