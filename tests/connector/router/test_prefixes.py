"""What the index says of a prompt's beginning: not believed where tokens are not all, never waited
for long, and asked no more often by many."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kvstore import MissReason
from kvstore.spi import BlockSession, Holders, Locator

pytest.importorskip("aiohttp", reason="the router extra is not installed")
from fake_engines import TOKENS, FakeEngine, saver, talk
from routed import DECODE, FOUND, PATIENCE_S, PREFILL, routed

from connector.router import prefix

if TYPE_CHECKING:
    from aiohttp import web


def test_blocks_of_the_only_prefill_engine_are_waited_for_once_too(
    locator: Locator, store: BlockSession
) -> None:
    async def scenario() -> None:
        mute = FakeEngine(saver(store, saves=False))
        async with routed(locator, [mute], [FakeEngine(talk)], save_wait_s=0.1) as router:
            ways = [(await router.ask(prompt=[i, *TOKENS]))[0].headers[PREFILL] for i in range(3)]
            assert ways == [mute.url, "none", "none"]

    asyncio.run(scenario())


def test_where_tokens_are_not_all_that_makes_a_prompt_the_index_is_not_believed(
    locator: Locator, store: BlockSession
) -> None:
    """A LoRA's blocks have other keys than the base model's of the same tokens."""

    async def scenario() -> None:
        base, lora = saver(store), saver(store, extra="lora")

        async def either(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return await (lora if body["model"] == "lora" else base)(request, body)

        async with routed(locator, [FakeEngine(either)], [FakeEngine(talk)]) as router:

            async def found(model: str, prompt: list[int]) -> str:
                answer, _ = await router.ask(model=model, prompt=prompt)
                return str(answer.headers[FOUND])

            other = [1, *TOKENS]
            assert [await found("base", p) for p in (TOKENS, TOKENS, other)] == ["0", "48", "0"]
            assert [await found("lora", p) for p in (other, TOKENS)] == ["0", "0"]
            assert await found("base", TOKENS) == "48"

    asyncio.run(scenario())


def test_lookups_that_are_late_are_not_waited_for(
    locator: Locator, store: BlockSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix, "LOOKUP_TIMEOUT_S", 0.1)
    go_on = threading.Event()

    async def scenario() -> None:
        async with routed(locator, [FakeEngine(saver(store))], [FakeEngine(talk)]) as router:
            await router.ask()
            leading = locator.leading

            def slow(keys: Any) -> Any:
                go_on.wait(PATIENCE_S)
                return leading(keys)

            monkeypatch.setattr(type(locator), "leading", lambda self, keys: slow(keys))
            answers = await asyncio.gather(*(router.ask() for _ in range(8)))
            assert {a.headers[PREFILL] for a, _ in answers} == {"none"}
            go_on.set()

    asyncio.run(scenario())


def test_images_are_no_text(locator: Locator, store: BlockSession) -> None:
    """They are part of the KV and not of the tokens."""
    parts = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {}}]

    async def scenario() -> None:
        async with routed(locator, [FakeEngine(saver(store))], [FakeEngine(talk)]) as router:
            for _ in range(2):
                messages = [{"role": "user", "content": parts}]
                answer, _ = await router.ask("/v1/chat/completions", messages=messages)
                assert answer.headers[FOUND] == "0"

    asyncio.run(scenario())


def test_an_index_that_is_late_once_ends_no_wait_for_blocks(
    locator: Locator, store: BlockSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    leading, asked = locator.leading, []

    def late_at_first(self: Locator, keys: Any) -> Holders:
        asked.append(keys)
        return Holders(MissReason.DEADLINE) if len(asked) < 3 else leading(keys)

    monkeypatch.setattr(Locator, "leading", late_at_first)

    async def scenario() -> None:
        far, near = FakeEngine(talk), FakeEngine(talk)
        maker = FakeEngine(saver(store))
        async with routed(locator, [maker], [far, near], at=("other", "node")) as router:
            assert (await router.ask())[0].headers[DECODE] == near.url

    asyncio.run(scenario())


def test_many_that_wait_ask_the_index_no_more_often_together(
    no_index: Locator, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, asked = 200, []

    def nobody(self: Locator, keys: Any) -> Holders:
        asked.append(keys)
        return Holders(MissReason.ABSENT)

    monkeypatch.setattr(Locator, "leading", nobody)
    monkeypatch.setattr(prefix, "POLLS_PER_S_MAX", 100)

    async def scenario() -> None:
        prefixes = prefix.Prefixes(no_index)
        found = await asyncio.gather(*(prefixes.wait_for(bytes(32), 1.0) for _ in range(waiting)))
        assert found == [{}] * waiting
        prefixes.close()

    asyncio.run(scenario())
    assert len(asked) <= 5 * waiting
