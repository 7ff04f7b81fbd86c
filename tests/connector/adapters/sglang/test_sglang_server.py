"""Whole SGLang servers, with real nodes: one answers from what another one computed.

What stands in for what there is only on GPUs: support/engine_parts/sglang_server.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from sglang_asks import WHOLE_PAGES_TOKENS, prompt, save
from sglang_server import PAGE_TOKENS, SGLangServer, SGLangServers
from stores import NodeProcess
from tiny_models import ModelShape, build_model

if TYPE_CHECKING:
    from pathlib import Path

    from redis_servers import RedisServer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

CHUNK_TOKENS = 8 * PAGE_TOKENS


@pytest.fixture(scope="module")
def shared(redis_server: RedisServer) -> Iterator[NodeProcess]:
    with NodeProcess(redis_server) as node:
        yield node


@pytest.fixture(scope="module")
def one(servers: SGLangServers, model: Path, shared: NodeProcess) -> SGLangServer:
    """A server that computes prompts in chunks."""
    chunks = ("--chunked-prefill-size", str(CHUNK_TOKENS))
    return servers.start(model, shared.engine_settings, *chunks).wait()


@pytest.fixture(scope="module")
def other(servers: SGLangServers, model: Path, shared: NodeProcess) -> SGLangServer:
    return servers.start(model, shared.engine_settings).wait()


@pytest.mark.covers("full attention", "engine")
@pytest.mark.covers("chunked prefill", "engine")
def test_a_server_answers_from_what_another_one_computed(
    without: SGLangServer, one: SGLangServer, other: SGLangServer
) -> None:
    asked = prompt(1)
    expected = without.generate(asked).tokens
    assert len(set(expected)) > 2, "the model says something"
    assert without.generate(prompt(2)).tokens != expected, "which depends on the prompt"
    assert save(one, asked) == expected
    answer = other.generate(asked)
    assert answer.tokens == expected
    assert answer.from_storage == WHOLE_PAGES_TOKENS
    metrics = other.metrics()
    assert metrics["sglang:prefetched_tokens_total"] == WHOLE_PAGES_TOKENS
    assert metrics["sglang:cached_tokens_total{storage}"] == WHOLE_PAGES_TOKENS
    longer = [*asked, *prompt(3)[:100]]
    assert one.generate(longer).tokens == without.generate(longer).tokens


def test_a_prompt_that_begins_alike_loads_only_that(
    without: SGLangServer, one: SGLangServer, other: SGLangServer
) -> None:
    asked = prompt(4)
    save(one, asked)
    half = 20 * PAGE_TOKENS
    branched = [*asked[:half], *prompt(5)[half:]]
    answer = other.generate(branched)
    assert answer.from_storage == half
    assert answer.tokens == without.generate(branched).tokens


def test_nothing_is_shared_with_other_weights(
    servers: SGLangServers, shared: NodeProcess, one: SGLangServer, tmp_path: Path
) -> None:
    asked = prompt(6)
    tokens = save(one, asked)
    changed = build_model(tmp_path / "m", ModelShape(weights_std=0.2, seed=8))
    stranger = servers.start(changed, shared.engine_settings).wait()
    answer = stranger.generate(asked)
    assert (answer.cached_tokens, answer.from_storage) == (0, 0)
    assert answer.tokens != tokens
    stranger.close()


@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
def test_nothing_is_shared_with_another_salt_or_adapter(
    one: SGLangServer, other: SGLangServer, name: str
) -> None:
    asked = prompt({"cache_salt": 7, "extra_key": 8}[name])
    expected = save(one, asked, **{name: "a"})
    for stranger in ({}, {name: "b"}):
        answer = other.generate(asked, **stranger)
        assert (answer.tokens, answer.cached_tokens) == (expected, 0)
    answer = other.generate(asked, **{name: "a"})
    assert (answer.tokens, answer.from_storage) == (expected, WHOLE_PAGES_TOKENS)


def test_requests_are_answered_alike_while_and_after_the_node_dies(
    without: SGLangServer, one: SGLangServer, other: SGLangServer, shared: NodeProcess
) -> None:
    """The last test of this file: nobody is there to save or to be loaded from afterwards."""
    asked = [prompt(seed) for seed in range(20, 26)]
    expected = [without.generate(each).tokens for each in asked]
    for each in asked[:4]:
        save(one, each)
    with ThreadPoolExecutor(3) as askers:
        answers = [askers.submit(other.generate, each) for each in asked]
        answers[0].result()
        shared.process.kill()
        assert [answer.result().tokens for answer in answers] == expected
    assert answers[0].result().from_storage == WHOLE_PAGES_TOKENS
    late = prompt(30)
    assert other.generate(late).tokens == one.generate(late).tokens == without.generate(late).tokens
