"""Routers of others ask which leading blocks of a prompt are where."""

from __future__ import annotations

import asyncio
import json
from array import array
from typing import Any

import aiohttp
from each_input import each
from fake_engines import KEYS, TOKENS, FakeEngine, saver, talk
from routed import Setup, routed

from connector.layout.block_hashes import extend
from connector.limits import ROUTER_BLOCKS_ASKED_MAX
from kvstore.spi import BlockSession, Key, Locator

MISSING = list(range(1000, 1000 + 4 * KEYS.block_tokens))


def keys_of(tokens: list[int]) -> list[Key]:
    return KEYS.of_hashes(extend([], tokens, KEYS.block_tokens, lambda first, end: None))


async def where(router: Setup, **question: Any) -> tuple[int, Any]:
    answer, raw = await router.ask("/blocks", **question)
    return answer.status, json.loads(raw)


async def octets(router: Setup, path: str, body: bytes) -> tuple[int, Any]:
    headers = {"Content-Type": "application/octet-stream"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(router.url + path, data=body, headers=headers) as answer,
    ):
        return answer.status, await answer.json()


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


def test_tokens_and_keys_as_bytes_are_answered_as_those_in_json(
    locator: Locator, store: BlockSession
) -> None:
    size = KEYS.block_tokens
    longer = [*TOKENS[: len(TOKENS) // size * size], *MISSING]
    keys = keys_of(longer)

    async def scenario() -> None:
        async with routed(locator, [FakeEngine(saver(store))], [FakeEngine(talk)]) as router:
            await router.ask()
            asked = {"tokens": longer, "block_size": size // 2}
            as_bytes = array("I", longer).tobytes()
            path = f"/blocks?model=m&block_size={size // 2}"
            assert await octets(router, path, as_bytes) == await where(router, **asked)
            assert (await octets(router, path, as_bytes))[1]["total_hits"] == 2 * (len(keys) - 4)
            own = await where(router, tokens=longer)
            assert await octets(router, "/blocks?model=m", as_bytes) == own
            by_keys = await where(router, keys=[key.hex() for key in keys])
            assert await octets(router, "/blocks", b"".join(keys)) == by_keys
            assert by_keys[1]["total_hits"] == len(keys) - 4
            nobody = await octets(router, "/blocks?model=other", as_bytes)
            assert nobody[0] == 404

    asyncio.run(scenario())


@each(
    ("query", "body"),
    [
        ("", b"k" * 31),
        ("", b"k" * 33),
        ("", b"k" * 32 * (ROUTER_BLOCKS_ASKED_MAX + 1)),
        ("?block_size=16", b"k" * 32),
        ("?model=m", b"abc"),
        ("?model=m&block_size=0", b"abcd"),
        ("?model=m&block_size=-1", b"abcd"),
        ("?model=m&block_size=x", b"abcd"),
        ("?model=m&block_size=", b"abcd"),
        ("?model=m&block_size=%C2%B2", b"abcd"),
        ("?model=m&block_size=" + "9" * 5000, b"abcd"),
    ],
)
def test_bytes_that_are_no_question_are_refused(no_index: Locator, query: str, body: bytes) -> None:
    async def scenario() -> None:
        async with routed(no_index, [], [FakeEngine(talk)]) as router:
            status, answer = await octets(router, f"/blocks{query}", body)
            assert (status, answer["error"]["code"]) == (400, 400)

    asyncio.run(scenario())


@each(
    "question",
    [
        {},
        {"keys": [], "tokens": []},
        {"keys": "ab"},
        {"keys": [1]},
        {"keys": ["no hexadecimal"]},
        {"keys": ["abcd"]},
        {"keys": ["ab" * 33]},
        {"keys": ["ab" * 31, "ab" * 33]},
        {"keys": ["no" * 32]},
        {"keys": ["\u00df" * 64]},
        {"keys": ["ab" * 32, ["a"] * 64]},
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
