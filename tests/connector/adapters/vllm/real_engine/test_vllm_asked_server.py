"""`kvstore explain --engine` of a real server: its answer is what the server's next request loads.

The server keeps nothing itself, so that each request loads all that the store has.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import ModelShape, build_model, cpu_dtype
from redis_servers import RedisServer
from stores import NodeProcess
from vllm_server import CALL_TIMEOUT_S, VllmServer, build_tokenizer

from kvstore import Client

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]
BLOCK = 64
TEMPLATE = (
    "{% for m in messages %}t7 {{ m.content }} t8 {% endfor %}"
    "{% if more %}t9 t10 {% endif %}{% if add_generation_prompt %}t11{% endif %}"
)


class Asked:
    """A server, and the command that asks it."""

    def __init__(self, path: Path, node: NodeProcess) -> None:
        self.node = node
        model = build_model(path / "llama", ModelShape(context_tokens=1024))
        build_tokenizer(model, 512)
        (path / "template").write_text(TEMPLATE)
        extra = {**node.engine_settings, "load_timeout_s": 30.0, "block_tokens": BLOCK}
        transfer = {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "connector.adapters.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
        small = (
            f"--dtype {cpu_dtype()} --enforce-eager --block-size 32 --seed 0 --max-model-len 1024 "
            "--max-num-seqs 8 --enable-prompt-tokens-details --num-gpu-blocks-override 128 "
            "--no-enable-prefix-caching --served-model-name model --api-key word "
            f"--chat-template {path / 'template'}"
        )
        command = ["vllm", "serve", str(model), "--kv-transfer-config", json.dumps(transfer)]
        env = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.server = VllmServer([*command, *small.split()], env, path / "server.log")

    def explain(self, *args: str, code: int = 0, stdin: str = "", where: str = "") -> str:
        at = where or f"http://127.0.0.1:{self.server.port}"
        command = [sys.executable, "-m", "kvstore.cli", "explain", "--engine", at, *args]
        ran = subprocess.run(
            [*command, "--run-dir", str(self.node.run_dir), "--key-prefix", self.node.key_prefix],
            env={**os.environ, "VLLM_API_KEY": "word"},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode == code, ran
        return ran.stdout or ran.stderr

    def tells(self, *args: str, stdin: str = "") -> dict[str, Any]:
        (found,) = json.loads(self.explain(*args, "--json", stdin=stdin))["explanations"]
        return dict(found)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.server.port}{path}",
            json.dumps({"max_tokens": 2, "temperature": 0, "model": "model", **body}).encode(),
            {"Content-Type": "application/json", "Authorization": "Bearer word"},
        )
        with urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S) as answer:
            return dict(json.load(answer))

    def loads(self, path: str, body: dict[str, Any]) -> int:
        """Return the tokens that a request has loaded, as vLLM counts them."""
        answer = self.post(path, body)
        self.request_id = str(answer["id"])
        self.full_tokens = int(answer["usage"]["prompt_tokens"]) // BLOCK * BLOCK
        details = answer["usage"].get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)

    def tells_saved(self, *args: str, stdin: str = "") -> dict[str, Any]:
        """Return what is told once something is saved."""
        give_up_at = time.monotonic() + 60.0
        while not (found := self.tells(*args, stdin=stdin))["hit_tokens"]:
            assert time.monotonic() < give_up_at, found
        return found


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    with RedisServer() as redis, NodeProcess(redis) as node:
        asked = Asked(tmp_path_factory.mktemp("asked"), node)
        try:
            asked.server.wait()
            yield asked
        finally:
            asked.server.close()


def words(count: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(f"t{rng.randrange(20, 500)}" for _ in range(count))


CHATS: dict[str, dict[str, Any]] = {
    "chat": {},
    "salt": {"cache_salt": "of one tenant"},
    "more": {"chat_template_kwargs": {"more": True}},
    "continued": {"add_generation_prompt": False, "continue_final_message": True},
}


@pytest.mark.parametrize("kind", CHATS)
def test_a_chat_loads_what_is_told_after_a_miss_and_after_a_hit(asked: Asked, kind: str) -> None:
    turns = [{"role": "user", "content": words(150, seed=20 + list(CHATS).index(kind))}]
    body = {"messages": turns, **CHATS[kind]}
    told = ("--messages", "-")
    miss = asked.tells(*told, stdin=json.dumps(body))
    assert miss["hit_tokens"] == 0
    assert miss["first_missing"]["reason"] == ("salt" if kind == "salt" else "never-stored")
    assert asked.loads("/v1/chat/completions", body) == 0
    assert miss["possible_tokens"] == asked.full_tokens >= 2 * BLOCK
    hit = asked.tells_saved(*told, stdin=json.dumps(body))
    assert hit["hit_tokens"] == asked.loads("/v1/chat/completions", body) == asked.full_tokens
    turns[-1]["content"] += " " + words(100, seed=1)  # the end of the template is elsewhere now
    longer = asked.tells(*told, stdin=json.dumps(body))
    assert longer["hit_tokens"] == asked.loads("/v1/chat/completions", body)
    assert longer["hit_tokens"] >= 2 * BLOCK
    bare = {"messages": turns, **CHATS[kind], "cache_salt": "of another tenant"}
    assert asked.tells(*told, stdin=json.dumps(bare))["hit_tokens"] == 0


def test_a_completion_and_its_request_are_told(asked: Asked) -> None:
    text = words(3 * BLOCK + 5, seed=11)
    line = asked.explain("--prompt", text)
    assert line.startswith(f"0 of {3 * BLOCK} tokens hit; block 0: never-stored: ")
    assert asked.loads("/v1/completions", {"prompt": text}) == 0
    told = asked.tells_saved("--prompt", text)["hit_tokens"]
    assert told == asked.loads("/v1/completions", {"prompt": text}) == 3 * BLOCK
    found = asked.tells("--request-id", asked.request_id)
    assert found["hit_tokens"] == told
    assert asked.request_id in found["request_id"]
    salted = asked.tells("--prompt", text, "--cache-salt", "salt")
    assert salted["first_missing"]["reason"] == "salt"


def test_what_was_evicted_is_told_with_its_node_and_how_long_blocks_live_there(
    asked: Asked,
) -> None:
    text = words(2 * BLOCK + 5, seed=12)
    asked.loads("/v1/completions", {"prompt": text})
    asked.tells_saved("--prompt", text)
    with Client(**asked.node.client_options) as client:
        # None larger than the prompt's blocks: in the place of the last of those alone there is no
        # room for one, so they would stay.
        assert all(client.put_many({f"pressure{i}": os.urandom(1 << 16) for i in range(400)}))
    line = asked.explain("--prompt", text)
    assert "block 0: evicted: node node evicted it to make room, " in line
    assert "half of the blocks it evicted had lived within " in line
    assert asked.loads("/v1/completions", {"prompt": text}) == 0


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": [{"role": "user", "content": [{"text": "a", "uuid": "b"}]}]},
        {"messages": [{"role": "user", "content": "a"}], "reasoning_effort": "low"},
        {"messages": [{"role": "user", "content": "a"}], "prompt_embeds": "AAAA"},
    ],
)
def test_what_tokens_do_not_tell_is_unknown_and_no_miss(asked: Asked, body: dict[str, Any]) -> None:
    said = asked.explain("--messages", "-", stdin=json.dumps(body), code=1)
    assert said.startswith("unknown: ")
    assert "miss" not in said
    assert "never-stored" not in said


def test_wrong_use_is_told(asked: Asked) -> None:
    said = asked.explain("--prompt", "t1", where="http://127.0.0.1:1", code=1)
    assert "name it by --engine-pid" in said
    said = asked.explain("--prompt", "t1", "--model", "other", code=2)
    assert said.startswith("kvstore: model='other': the server has model")
    assert "unknown: no request" in asked.explain("--request-id", "nobody", code=1)
