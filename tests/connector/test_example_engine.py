"""The engine of docs/connector.md, which uses nothing but `connector`: it shares its KV."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from connector import KVTransferConfig

if TYPE_CHECKING:
    from stores import NodeProcess

pytest.importorskip("torch")

PAGE = Path(__file__).parents[2] / "docs" / "connector.md"
PROMPT = list(range(100, 150))
STORE_BLOCK = 16


@pytest.fixture(scope="module")
def source() -> str:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (program,) = (block for block in blocks if "class Engine" in block)
    return str(program)


@pytest.fixture
def example(source: str) -> ModuleType:
    module = ModuleType("example_engine")
    exec(compile(source, str(PAGE), "exec"), module.__dict__)
    return module


def settings(node: NodeProcess) -> dict[str, Any]:
    return {
        "url": node.redis.url,
        "key_prefix": node.key_prefix,
        "run_dir": str(node.run_dir),
        "block_tokens": STORE_BLOCK,
        "lookup_timeout_s": 10.0,
        "load_timeout_s": 30.0,
        "save_timeout_s": 30.0,
    }


def config(node: NodeProcess, role: Any = "kv_both", **changes: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="KVStoreConnector",
        kv_role=role,
        kv_connector_extra_config={**settings(node), **changes},
    )


def run(example: Any, config: KVTransferConfig, tokens: list[int]) -> int:
    """Tokens that a fresh engine loaded for a prompt; its KV was right."""
    engine = example.Engine(config)
    seen, loaded = engine.run(example.Request("r", tokens))
    engine.close()
    assert not any(engine.pool.users.values()), "every block is free again"
    right = b"".join(example.digests(tokens))
    assert seen.transpose(0, 1).contiguous().numpy().tobytes() == right
    return int(loaded)


@pytest.mark.long
def test_second_process_loads_what_the_first_has_computed(
    source: str, node: NodeProcess, tmp_path: Path
) -> None:
    program = tmp_path / "engine.py"
    program.write_text(source)
    document = json.dumps({"kv_connector": "KVStoreConnector", "kv_role": "kv_both"})
    environ = {
        **os.environ,
        "KVSTORE_KV_TRANSFER_CONFIG": document,
        "KVSTORE_KV_CONNECTOR_EXTRA_CONFIG": json.dumps(settings(node)),
    }
    said = [
        subprocess.run(
            [sys.executable, str(program), *map(str, PROMPT)],
            env=environ,
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        ).stdout.strip()
        for _ in range(2)
    ]
    assert said == [
        "loaded 0 of 50 tokens; the KV is right",
        "loaded 48 of 50 tokens; the KV is right",
    ]


def test_two_engines_share_the_prefix_and_only_the_prefix(example: Any, node: NodeProcess) -> None:
    assert run(example, config(node), PROMPT) == 0
    assert run(example, config(node), [*PROMPT[:40], 7, 7, 7, 7, 7, 7, 7, 7]) == 32
    assert run(example, config(node), [7, *PROMPT]) == 0


def test_prompt_that_is_there_as_a_whole_is_computed_from_its_last_token(
    example: Any, node: NodeProcess
) -> None:
    assert run(example, config(node), PROMPT[:48]) == 0
    assert run(example, config(node), PROMPT[:48]) == 47


def test_producer_only_saves_and_consumer_only_loads(example: Any, node: NodeProcess) -> None:
    consumer, producer = config(node, "kv_consumer"), config(node, "kv_producer")
    assert run(example, consumer, PROMPT) == 0
    assert run(example, producer, PROMPT) == 0
    assert run(example, producer, PROMPT) == 0
    assert run(example, consumer, PROMPT) == 48


def test_blocks_lost_after_the_match_are_computed(example: Any, node: NodeProcess) -> None:
    run(example, config(node), PROMPT)
    engine, other = example.Engine(config(node)), example.Engine(config(node))
    match = engine.scheduler.get_num_new_matched_tokens

    def match_then_lose(*asked: Any) -> Any:
        answer = match(*asked)
        if answer[0]:
            assert answer == (48, True)
            assert other.scheduler.reset_cache()
        return answer

    engine.scheduler.get_num_new_matched_tokens = match_then_lose
    seen, loaded = engine.run(example.Request("r", PROMPT))
    assert loaded == 0
    assert seen.transpose(0, 1).contiguous().numpy().tobytes() == b"".join(example.digests(PROMPT))
    engine.close()
    other.close()
