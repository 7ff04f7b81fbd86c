"""Real vLLM engines in rarer modes: what one computed another loads, and the tokens are those of
an engine without a store.

Prompts are T + 2 tokens and every engine splits its prefill at T, so that the tail runs through
the same kernel shapes everywhere.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from engines import EngineProcess, EngineSettings, Generated, build_model, kv_transfer
from stores import MIB, NodeProcess

if TYPE_CHECKING:
    from redis_servers import RedisServer

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]
BLOCK = 64
T = 8 * BLOCK
TESTS = Path(__file__).parents[4]
PATH = os.pathsep.join(
    [str(TESTS.parent), str(TESTS / "support" / "vllm_engines"), os.environ.get("PYTHONPATH", "")]
)
DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 2,
}


class Start:
    """Starts engines beside one node, and ends them."""

    def __init__(self, node: NodeProcess, logs: Path) -> None:
        self.transfer = kv_transfer(load_timeout_s=60.0, block_tokens=BLOCK, **node.engine_settings)
        self._logs = logs
        self._engines = ExitStack()

    def __call__(
        self, model: Path, *, name: str, store: bool = True, **extra: Any
    ) -> EngineProcess:
        settings = EngineSettings(
            connector=self.transfer if store else None,
            kv_blocks=512,
            max_batched_tokens=T,
            env={"PYTHONPATH": PATH},
            extra=extra,
        )
        engine = EngineProcess(model, settings, log=self._logs / f"{name}.log")
        return self._engines.enter_context(engine)

    def close(self) -> None:
        self._engines.close()


@pytest.fixture
def start(redis_server: RedisServer, tmp_path: Path) -> Iterator[Start]:
    with NodeProcess(redis_server, size=256 * MIB) as node:
        start = Start(node, tmp_path)
        yield start
        start.close()


@pytest.mark.covers("n-gram drafts", "engine")
def test_prefill_without_drafts_and_decode_with_them_hit_each_others_blocks(
    start: Start, tmp_path: Path
) -> None:
    """A conversation that goes to and fro between an engine that drafts and one that does not.

    In float32: an engine that verifies drafts computes several tokens at a time, and in bfloat16
    near ties would fall otherwise for that.
    """
    model = build_model(tmp_path / "model")
    alone = start(model, name="alone", store=False, dtype="float32")
    plain = start(model, name="plain", dtype="float32")
    drafting = start(
        model,
        name="drafting",
        dtype="float32",
        speculative_config=DRAFTS,
        disable_log_stats=False,
    )
    prompt, asked, answers = prompts(1)[0], [], []
    for engine in (plain, drafting, plain):
        hit = (len(prompt) - 3) // BLOCK * BLOCK if asked else 0
        result = engine.generate([prompt], max_tokens=2 * BLOCK)[0]
        engine.drain()
        assert result.cached_tokens == hit
        asked.append(prompt)
        answers.append(result.tokens)
        prompt = [*prompt, *result.tokens, 2, 3]
    assert drafting.call("counter", name="vllm:spec_decode_num_accepted_tokens") > 0
    assert [alone.generate([one], max_tokens=2 * BLOCK)[0].tokens for one in asked] == answers


@pytest.mark.covers("fp8 KV, scales per tensor", "engine")
def test_fp8_kv_of_one_engine_is_loaded_by_another(start: Start, tmp_path: Path) -> None:
    if not pytest.importorskip("torch").cpu._is_avx512_supported():
        pytest.skip("this CPU has no AVX-512, which vLLM asks for with fp8 KV")
    shared(start, build_model(tmp_path / "model"), kv_cache_dtype="fp8")


def shared(start: Start, model: Path, **extra: Any) -> None:
    """A reader hits what a writer saved, and both answer as an engine without a store."""
    wanted = prompts(3)
    writer = start(model, name="writer", **extra)
    computed = [writer.generate([one])[0] for one in wanted]
    writer.drain()
    assert [result.cached_tokens for result in computed] == [0] * 3
    reader = start(model, name="reader", **extra)
    loaded = [reader.generate([one])[0] for one in wanted]
    assert [result.cached_tokens for result in loaded] == [T] * 3
    alone = start(model, name="alone", store=False, **extra)
    reference = tokens_of([alone.generate([one])[0] for one in wanted])
    assert tokens_of(computed) == reference
    assert tokens_of(loaded) == reference


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(2, 500) for _ in range(T + 2)] for _ in range(count)]


def tokens_of(results: list[Generated]) -> list[list[int]]:
    return [result.tokens for result in results]
