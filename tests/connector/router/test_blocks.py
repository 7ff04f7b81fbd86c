"""Routers of others ask which leading blocks of a prompt are where."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_engines import KEYS, TOKENS, FakeEngine, saver, talk
from routed import Setup, routed

from connector.layout.block_hashes import extend
from connector.limits import ROUTER_BLOCKS_ASKED_MAX
from kvstore import BlockSession, Key, Locator

MISSING = list(range(1000, 1000 + 4 * KEYS.block_tokens))


def keys_of(tokens: list[int]) -> list[Key]:
    return KEYS.of_hashes(extend([], tokens, KEYS.block_tokens, lambda first, end: None))


async def where(router: Setup, **question: Any) -> tuple[int, Any]:
    answer, raw = await router.ask("/blocks", **question)
    return answer.status, json.loads(raw)


def test_blocks_are_told_by_tokens_and_by_keys(locator: Locator, store: BlockSession) -> None:
    size = KEYS.block_tokens
    blocks = len(TOKENS) // size

    async def scenario() -> None:
        async with routed(locator, [FakeEngine(saver(store))], [FakeEngine(talk)]) as router:
            status, answer = await where(router, tokens=TOKENS)
            assert (status, answer["error"]["type"]) == (404, "router_error")
            await router.ask()
            longer = [*TOKENS[: blocks * size], *MISSING]
            status, answer = await where(router, tokens=longer)
            held = [{"node": "node", "host": answer["holders"][0]["host"], "start": 0}]
            assert (status, answer) == (
                200,
                {
                    "block_size": size,
                    "ranges": [{"start": 0, "end": blocks}],
                    "total_hits": blocks,
                    "store_block_size": size,
                    "holders": [{**held[0], "end": blocks}],
                },
            )
            _, finer = await where(router, tokens=longer, block_size=size // 2)
            assert (finer["total_hits"], finer["ranges"]) == (
                2 * blocks,
                [{"start": 0, "end": 2 * blocks}],
            )
            _, coarser = await where(router, tokens=longer, block_size=2 * size)
            assert coarser["total_hits"] == blocks // 2, "a part of a block is no hit"
            _, by_keys = await where(router, keys=[key.hex() for key in keys_of(longer)])
            assert by_keys == {**answer, "block_size": None, "store_block_size": None}
            status, nothing = await where(router, tokens=MISSING)
            assert (status, nothing["ranges"], nothing["holders"]) == (200, [], [])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "question",
    [
        {},
        {"keys": [], "tokens": []},
        {"keys": "ab"},
        {"keys": [1]},
        {"keys": ["no hexadecimal"]},
        {"keys": ["abcd"]},
        {"keys": ["00"] * (ROUTER_BLOCKS_ASKED_MAX + 1)},
        {"keys": [], "block_size": 16},
        {"tokens": "text"},
        {"tokens": [1, "2"]},
        {"tokens": [1], "block_size": 0},
        {"tokens": [1], "block_size": True},
    ],
)
def test_a_question_that_is_none_is_refused(no_index: Locator, question: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with routed(no_index, [], [FakeEngine(talk)]) as router:
            status, answer = await where(router, **question)
            assert (status, answer["error"]["code"]) == (400, 400)

    asyncio.run(scenario())


def test_an_index_that_is_away_is_not_taken_for_an_empty_store(no_index: Locator) -> None:
    async def scenario() -> None:
        async with routed(no_index, [], [FakeEngine(talk)]) as router:
            status, _ = await where(router, keys=[key.hex() for key in keys_of(TOKENS)])
            assert status == 503

    asyncio.run(scenario())
