"""PromptKeys: a router names a prompt's blocks as the engine that saved them does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from each_input import each

from connector import PromptKeys
from connector.layout.block_hashes import ALGORITHM, extend
from kvstore import Namespace, UsageError

KEYS = PromptKeys(4, Namespace({"model": "m", "hash_algorithm": ALGORITHM, "tp": 1}))
TOKENS = list(range(11))


def told(**changes: Any) -> Mapping[str, Any]:
    return {**KEYS.answer(hashes(TOKENS)), **changes}


def hashes(tokens: list[int], extra: object = None) -> list[bytes]:
    return extend([], tokens, KEYS.block_tokens, lambda first, end: extra)


def test_what_an_engine_tells_survives_json_and_gives_the_same_keys() -> None:
    keys, last = PromptKeys.from_answer(json.loads(json.dumps(told())))
    assert keys == KEYS
    assert keys.of(TOKENS) == KEYS.of_hashes(hashes(TOKENS))
    assert last == keys.of(TOKENS)[-1]
    assert len(keys.of(TOKENS)) == 2


def test_a_prompt_with_an_adapter_has_other_keys_and_its_last_is_told() -> None:
    with_lora = hashes(TOKENS, (("lora_name", "a"),))
    _, last = PromptKeys.from_answer(KEYS.answer(with_lora))
    assert last is not None
    assert last not in KEYS.of(TOKENS)


def test_a_prompt_that_fills_no_block_has_no_last_key() -> None:
    assert PromptKeys.from_answer(KEYS.answer([]))[1] is None


@each(
    ("changes", "field"),
    [
        ({"namespace": None}, "kvstore_keys.namespace"),
        ({"namespace": {"model": ["m"]}}, "kvstore_keys.namespace"),
        ({"block_tokens": "4"}, "kvstore_keys.block_tokens"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"last_key": "no hex"}, "kvstore_keys.last_key"),
        ({"last_key": 7}, "kvstore_keys.last_key"),
    ],
)
def test_what_no_engine_tells_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError) as refused:
        PromptKeys.from_answer(told(**changes))
    assert refused.value.field == field
