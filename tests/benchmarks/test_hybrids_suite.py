"""Suite `hybrids`: bytes of states are counted, and the store finds enough of hybrid prompts."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hybrids.layouts import LAYOUTS
from benchmarks.hybrids.replay import PROMPT_BLOCK_TOKENS, Engine, Prompt
from benchmarks.suites.hybrids import compared, trace

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def vllm() -> None:
    pytest.importorskip("vllm")


@pytest.fixture
def qwen(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(LAYOUTS["Qwen3.5"](), 64 << 30, tmp_path)
    yield engine
    engine.close()


def test_bytes_of_states_are_counted_in_the_store_and_in_the_live_set(qwen: Engine) -> None:
    attention, *states = qwen.sizes
    assert len(states) == 3
    tokens = 4 * qwen.layout.block_tokens
    prompt = [7] * (tokens // PROMPT_BLOCK_TOKENS + 1)
    assert qwen.ask(prompt) == 0
    assert qwen.needed_bytes(tokens + PROMPT_BLOCK_TOKENS) == 4 * attention + sum(states)
    assert qwen.store.used_bytes == qwen.saved_bytes == qwen.needed_bytes(tokens)
    assert qwen.ask(prompt) == tokens


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_prompt_finds_itself_and_nothing_of_another(name: str, tmp_path: Path) -> None:
    engine = Engine(LAYOUTS[name](), 64 << 30, tmp_path)
    per = math.lcm(engine.layout.block_tokens, PROMPT_BLOCK_TOKENS)
    ends = [4 * per // PROMPT_BLOCK_TOKENS + 1, 2 * per // PROMPT_BLOCK_TOKENS]
    try:
        assert engine.ask([7] * ends[0]) == 0
        assert engine.ask([9] * ends[0]) == 0, "other tokens, at the same places"
        assert engine.ask([7] * ends[0]) == 4 * per
        parted = [7] * ends[1] + [5] * (ends[1] + 1)
        assert engine.ask(parted) in (0, 2 * per), "a state is not everywhere"
        assert engine.ask(parted) == 4 * per
    finally:
        engine.close()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> list[Prompt]:
    """60 sessions that grow by some thousand tokens a request, about 40 at the same time."""
    source, lines = random.Random(7), []
    for _ in range(60):
        at, total, requests = 0.0, source.randint(600, 2500), []
        for turn in range(source.randint(8, 18)):
            kept = total if turn else 0
            total += source.randint(4, 80)
            requests.append([round(at, 1), kept, total])
            at += source.expovariate(1 / 100)
        lines.append(json.dumps(requests))
    file = tmp_path_factory.mktemp("trace") / "sessions.jsonl"
    file.write_text("\n".join(lines))
    return trace(file, 1, 40)


@pytest.mark.parametrize("name", ["GLM-5-Next", "Kimi-K3", "Qwen3.5"])
def test_a_full_store_finds_of_states_nine_tenths_of_what_attention_alone_finds(
    prompts: list[Prompt], name: str
) -> None:
    (row,) = compared(name, LAYOUTS[name](), prompts, 1.0, [-1])
    assert row["refused"] == 0
    assert row["attention"] > 0.5, "the store holds what is worth comparing"
    assert row["ratio"] >= 0.9, row
