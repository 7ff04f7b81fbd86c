"""Whole SGLang servers of other kinds than a Llama on one rank: adapters, ranks and latents.

Each pair of servers has a memory layout and a way of copying of its own, so that all of SGLang's
have run. What a server that computes answers is what one that loads must answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from sglang_asks import PROMPT_TOKENS, WHOLE_PAGES_TOKENS, prompt, save
from stores import NodeProcess
from tiny_models import ModelShape, build_adapter, build_deepseek

if TYPE_CHECKING:
    from pathlib import Path

    from redis_servers import RedisServer
    from sglang_server import SGLangServer, SGLangServers

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

LARGE_PAGE_TOKENS = 64
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
"""The only kind of positions that SGLang computes for such models on a CPU."""


def memory(layout: str, copies: str) -> tuple[str, ...]:
    return ("--hicache-mem-layout", layout, "--hicache-io-backend", copies)


@pytest.fixture(scope="module")
def shared(redis_server: RedisServer) -> Iterator[NodeProcess]:
    with NodeProcess(redis_server) as node:
        yield node


@pytest.fixture
def start(servers: SGLangServers, shared: NodeProcess) -> Iterator[Any]:
    """Starts servers with the store, which end with the test."""
    made: list[SGLangServer] = []

    def start(model: Path, *options: str, ranks: int = 1, **settings: Any) -> SGLangServer:
        store = {**shared.engine_settings, **settings}
        made.append(servers.start(model, store, *options, ranks=ranks))
        return made[-1]

    yield start
    for server in made:
        server.close()


@pytest.mark.covers("LoRA", "engine")
def test_two_adapters_and_none_share_nothing_but_with_themselves(
    start: Any, model: Path, without: SGLangServer, tmp_path: Path
) -> None:
    """In the layout and with the copies that docs/engines.md recommends, and large pages."""
    shape = ModelShape(weights_std=0.2)
    paths = [build_adapter(tmp_path / name, i, shape) for i, name in enumerate("ab")]
    options = (
        *("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "8"),
        *("--max-loras-per-batch", "3", "--lora-target-modules", "q_proj", "k_proj", "v_proj"),
        *("--lora-paths", *(f"{path.name}={path}" for path in paths)),
        *("--page-size", str(LARGE_PAGE_TOKENS), *memory("page_first", "kernel")),
    )
    one, other = start(model, *options), start(model, *options)
    one.wait()
    asked = prompt(40)
    each: list[dict[str, str]] = [{}, {"lora_path": "a"}, {"lora_path": "b"}]
    expected = [save(one, asked, LARGE_PAGE_TOKENS, **request) for request in each]
    assert len({tuple(tokens) for tokens in expected}) == 3, "an adapter changes the answer"
    assert expected[0] == without.generate(asked).tokens
    other.wait()
    whole = PROMPT_TOKENS // LARGE_PAGE_TOKENS * LARGE_PAGE_TOKENS
    for tokens, request in zip(expected, each, strict=True):
        answer = other.generate(asked, **request)
        assert (answer.tokens, answer.from_storage) == (tokens, whole)
    fresh = prompt(41)
    save(one, fresh, LARGE_PAGE_TOKENS, lora_path="a")
    assert other.generate(fresh, lora_path="b").cached_tokens == 0
    assert other.generate(fresh).cached_tokens == 0


@pytest.mark.covers("tensor parallel 1 and 2, mixed", "engine")
def test_one_rank_and_two_answer_from_what_the_other_computed(
    start: Any, model: Path, without: SGLangServer
) -> None:
    options = memory("page_head", "kernel")
    single = start(model, *options, tp_lcm_size=2)
    double = start(model, *options, ranks=2, tp_lcm_size=2)
    for saves, loads, seed in ((single, double, 50), (double, single, 51)):
        saves.wait()
        asked = prompt(seed)
        expected = without.generate(asked).tokens
        assert save(saves, asked) == expected
        answer = loads.wait().generate(asked)
        assert (answer.tokens, answer.from_storage) == (expected, WHOLE_PAGES_TOKENS)


@pytest.mark.covers("MLA (DeepSeek-V2, V3)", "engine")
def test_latents_are_shared_by_servers_of_one_rank_and_two(start: Any, tmp_path: Path) -> None:
    model = build_deepseek(tmp_path / "deepseek", rope_scaling=YARN)
    options = memory("layer_first", "direct")
    double, single = start(model, *options, ranks=2), start(model, *options)
    for saves, loads, seed in ((double, single, 60), (single, double, 61)):
        saves.wait()
        expected = save(saves, prompt(seed))
        assert len(set(expected)) > 2
        answer = loads.wait().generate(prompt(seed))
        assert (answer.tokens, answer.from_storage) == (expected, WHOLE_PAGES_TOKENS)
