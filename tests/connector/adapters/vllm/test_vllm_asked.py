"""What `kvstore explain --engine` is told, token for token what the engine's next request loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_model_config import BLOCK, ENGINE_BLOCK
from vllm_model_engine import MakeEngine, ModelEngine, prompt

from kvstore.client.engine_socket import ask_engine, engine_sockets
from kvstore.errors import PeerError
from kvstore.testing.blockstore import MemoryBlockStore

pytestmark = pytest.mark.vllm


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    tmp_path.chmod(0o700)
    yield tmp_path
    assert list(tmp_path.iterdir()) == [], "an engine that ends takes its socket away"


class Asked:
    """An engine and its socket."""

    def __init__(self, make: MakeEngine, home: Path, **changes: Any) -> None:
        before = engine_sockets(home)
        self.engine: ModelEngine = make(run_dir=str(home), **changes)
        (self.path,) = set(engine_sockets(home)) - set(before)

    def explain(self, tokens: list[int], **more: Any) -> dict[str, Any]:
        (found,) = ask_engine(self.path, {"tokens": tokens, **more})["explanations"]
        return dict(found)

    def loads(self, name: str, tokens: list[int], **more: Any) -> int:
        before = self.engine.loaded_tokens
        self.engine.add(name, tokens, **more)
        self.engine.run()
        return self.engine.loaded_tokens - before


KINDS = {
    "one group": {},
    "window": {"window": 3 * ENGINE_BLOCK},
    "chunks": {"chunk": 2 * BLOCK},
    "states": {"recurrent": True},
    "no cache of its own": {"prefix_caching": False},
    "layer by layer": {"layerwise": True},
}
TELLS_ITS_OWN = ("one group", "layer by layer", "no cache of its own")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 5])
def test_the_answer_is_what_the_next_request_loads(
    make: MakeEngine, home: Path, kind: str, length: int
) -> None:
    producer, asked = Asked(make, home, **KINDS[kind]), Asked(make, home, **KINDS[kind])
    tokens = prompt(length)
    longer = [*tokens, *prompt(2 * BLOCK, seed=1)]
    for which in (tokens, longer):
        assert asked.explain(which)["hit_tokens"] == 0
    producer.loads("a", tokens)
    producer.loads("b", longer)
    told = asked.explain(tokens)["hit_tokens"]
    assert told == asked.loads("a", tokens)
    assert (told > 0) == (length >= BLOCK) or kind == "states"
    if kind in TELLS_ITS_OWN:
        # What the first request left in the engine counts for the second.
        told = asked.explain(longer)["hit_tokens"]
        assert told == asked.loads("b", longer)
        assert asked.explain(longer)["first_missing"] is None
    else:
        note = ask_engine(asked.path, {"tokens": longer})["note"]
        assert "what the engine has in its own cache is not known" in note
    producer.engine.close()
    asked.engine.close()


def test_salt_and_adapter_tell_prompts_apart_as_the_engine_does(
    make: MakeEngine, home: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from vllm.lora.request import LoRARequest

    files = tmp_path_factory.mktemp("adapter")
    (files / "adapter_config.json").write_text("{}")
    (files / "adapter_model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    producer, asked = Asked(make, home), Asked(make, home)
    tokens = prompt(2 * BLOCK + 3)
    adapter = ["adapter", str(files)]
    hows: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "salt": ({"cache_salt": "salt"}, {"cache_salt": "salt"}),
        "lora": ({"adapter": adapter}, {"lora_request": LoRARequest("adapter", 7, str(files))}),
        "plain": ({}, {}),
    }
    for name, (how, request) in hows.items():
        assert asked.explain(tokens, **how)["hit_tokens"] == 0
        producer.loads(name, tokens, **request)
        assert asked.explain(tokens, **how)["hit_tokens"] == 2 * BLOCK, name
    assert asked.explain(tokens, cache_salt="other")["first_missing"]["reason"] == "salt"
    for name, (_, request) in hows.items():
        assert asked.loads(name, tokens, **request) == 2 * BLOCK
    for name, (how, _) in hows.items():
        found = asked.explain(tokens, **how)
        assert (found["hit_tokens"], found["local_tokens"]) == (0, 2 * BLOCK), name
    producer.engine.close()
    asked.engine.close()


def test_an_adapter_whose_files_cannot_be_read_is_unknown_and_no_miss(
    make: MakeEngine, home: Path
) -> None:
    asked = Asked(make, home)
    found = ask_engine(asked.path, {"tokens": prompt(BLOCK), "adapter": ["a", "/nonexistent"]})
    assert "adapter" in found["unknown"]
    assert "explanations" not in found
    asked.engine.close()


def test_an_engine_that_only_saves_says_so(make: MakeEngine, home: Path) -> None:
    asked = Asked(make, home, role="kv_producer")
    asked.loads("a", prompt(2 * BLOCK))
    found = asked.explain([*prompt(2 * BLOCK), *prompt(BLOCK, seed=1)])
    assert (found["hit_tokens"], found["local_tokens"]) == (0, 2 * BLOCK)
    assert "kv_producer" in found["first_missing"]["detail"]
    asked.engine.close()


def test_a_request_is_found_by_the_id_that_its_client_knows(make: MakeEngine, home: Path) -> None:
    asked = Asked(make, home)
    for name in ("chatcmpl-abc-0-12345678", "chatcmpl-abc-1-9abcdef0", "cmpl-abcd-0-12345678"):
        asked.loads(name, prompt(BLOCK + 1, seed=len(name)))

    def names(api_id: str) -> list[str]:
        found = ask_engine(asked.path, {"request_id": api_id})["explanations"]
        return sorted(one["request_id"] for one in found)

    both = ["chatcmpl-abc-0-12345678", "chatcmpl-abc-1-9abcdef0"]
    assert names("chatcmpl-abc") == names("abc") == both
    assert names("abcd") == ["cmpl-abcd-0-12345678"]
    assert names("ab") == []
    asked.engine.close()


def test_asking_changes_nothing_in_the_engine(
    make: MakeEngine, home: Path, store: MemoryBlockStore
) -> None:
    asked = Asked(make, home)
    tokens = prompt(2 * BLOCK + 1)
    for _ in range(3):
        asked.explain(tokens)
    connector = asked.engine.scheduler.connector
    assert connector.explain("") is None
    assert store.sealed() == []
    assert not asked.engine.scheduler.has_requests()
    asked.engine.close()


@pytest.mark.parametrize(
    "question",
    [
        *({"tokens": tokens} for tokens in ([], [-1], [1 << 32], [True], ["1"], [1.5], 7, None)),
        *({"tokens": [1], "cache_salt": salt} for salt in ("", 7, ["a"])),
        *({"tokens": [1], "adapter": adapter} for adapter in ("ab", ["a"], ["a", ""], [1, 2])),
        *({"request_id": name} for name in ("", 7, None)),
        {},
    ],
)
def test_what_is_no_question_gets_an_error_and_the_next_an_answer(
    make: MakeEngine, home: Path, question: dict[str, Any]
) -> None:
    asked = Asked(make, home)
    with pytest.raises(PeerError, match="must be"):
        ask_engine(asked.path, question)
    assert asked.explain(prompt(BLOCK))["possible_tokens"] == BLOCK
    asked.engine.close()
