"""The router over HTTP: real Redis, a real node, engines that are real servers in this process.

A stand-in for a prefill engine saves blocks under the keys that the connector would use;
what the router looks up, it computes by itself from tokens.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from redis_servers import RedisServer
from stores import PATIENT

from connector import PromptKeys
from kvstore.spi import BlockSession, Locator

aiohttp = pytest.importorskip("aiohttp", reason="the router extra is not installed")
from aiohttp import web  # noqa: E402
from fake_engines import (  # noqa: E402
    SSE,
    TOKENS,
    Answer,
    FakeEngine,
    dies_after,
    fails_with,
    saver,
    talk,
)
from routed import DECODE, FOUND, PATIENCE_S, PREFILL, routed  # noqa: E402

from connector.router import server, upstream  # noqa: E402
from connector.router.bodies import prefill_body  # noqa: E402
from connector.router.discovery import Name  # noqa: E402
from connector.router.routing import Role  # noqa: E402


def test_a_new_prompt_is_prefilled_once_and_decoded_where_its_blocks_are(
    locator: Locator, store: BlockSession
) -> None:
    async def scenario() -> None:
        maker, far, near = FakeEngine(saver(store)), FakeEngine(talk), FakeEngine(talk)
        async with routed(locator, [maker], [far, near], at=("other", "node")) as router:
            first, _ = await router.ask()
            assert (first.headers[FOUND], first.headers[PREFILL]) == ("0", maker.url)
            again, _ = await router.ask()
            assert (again.headers[FOUND], again.headers[PREFILL]) == ("48", "none")
            longer, _ = await router.ask(prompt=[*TOKENS, *range(100)])
            assert (longer.headers[FOUND], longer.headers[PREFILL]) == ("48", maker.url)
            assert {a.headers[DECODE] for a in (first, again, longer)} == {near.url}
        assert maker.prompts == 2

    asyncio.run(scenario())


def test_decode_engines_get_the_request_as_it_came_and_their_stream_is_passed_on(
    locator: Locator, store: BlockSession
) -> None:
    async def scenario() -> None:
        decoder = FakeEngine(talk)
        async with routed(locator, [FakeEngine(saver(store))], [decoder]) as router:
            body = {"stream": True, "max_tokens": 9, "temperature": 0.5, "unknown": [1]}
            answer, raw = await router.ask(**body)
            assert raw == b"".join(SSE)
            assert answer.content_type == "text/event-stream"
            assert decoder.asked == [("/v1/completions", {"model": "m", "prompt": TOKENS, **body})]

    asyncio.run(scenario())


@pytest.mark.parametrize("saves", [True, False])
def test_a_decode_engine_is_told_what_is_handed_over_once_it_is_there(
    locator: Locator, store: BlockSession, saves: bool
) -> None:
    handed = {"do_remote_prefill": True, "do_remote_decode": False, "kvstore_tokens": 50}

    async def scenario() -> None:
        decoder = FakeEngine(talk)
        maker = FakeEngine(saver(store, saves=saves, hands_over=handed))
        wait_s = 10.0 if saves else 0.1
        async with routed(locator, [maker], [decoder], save_wait_s=wait_s) as router:
            await router.ask(kv_transfer_params={"retain_s": 5})
        ((_, asked),) = decoder.asked
        told = {"retain_s": 5, **(handed if saves else {})}
        assert asked["kv_transfer_params"] == told

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("broken", [fails_with(503), dies_after(0)], ids=["503", "dies"])
def test_an_engine_that_fails_before_its_first_byte_costs_no_request(
    no_index: Locator, broken: Answer, stream: bool
) -> None:
    async def scenario() -> None:
        bad, good = FakeEngine(broken), FakeEngine(talk)
        async with routed(no_index, [], [bad, good]) as router:
            for _ in range(2):
                answer, _ = await router.ask(stream=stream)
                assert answer.status == 200
                assert answer.headers[DECODE] == good.url

    asyncio.run(scenario())


def test_an_engine_that_is_gone_costs_no_request(no_index: Locator) -> None:
    async def scenario() -> None:
        gone, good = FakeEngine(talk), FakeEngine(talk)
        async with routed(no_index, [], [gone, good]) as router:
            await gone.server.close()
            for _ in range(3):
                assert (await router.ask())[0].headers[DECODE] == good.url

    asyncio.run(scenario())


def test_a_stream_that_breaks_off_is_seen_to_be_broken(no_index: Locator) -> None:
    async def scenario() -> None:
        async with routed(no_index, [], [FakeEngine(dies_after(1)), FakeEngine(talk)]) as router:
            with pytest.raises(aiohttp.ClientPayloadError):
                await router.ask(stream=True)
            answer, raw = await router.ask(stream=True)
            assert raw == b"".join(SSE)
            assert answer.status == 200

    asyncio.run(scenario())


def test_a_refusal_is_the_clients_and_is_not_tried_elsewhere(no_index: Locator) -> None:
    async def scenario() -> None:
        one, other = FakeEngine(fails_with(422)), FakeEngine(fails_with(422))
        async with routed(no_index, [], [one, other]) as router:
            answer, raw = await router.ask()
            assert (answer.status, json.loads(raw)) == (422, {"error": "no"})
        assert one.prompts + other.prompts == 1

    asyncio.run(scenario())


def huge() -> Answer:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=bytes(4096))

    return answer


def no_http() -> Answer:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(headers={"X": "x" * 100_000})

    return answer


@pytest.mark.parametrize(
    ("bad", "status", "stream"),
    [
        (fails_with(500), 500, False),
        (fails_with(500), 500, True),
        (fails_with(503), 503, False),
        (huge(), 502, False),
        (no_http(), 502, False),
        (no_http(), 502, True),
    ],
    ids=["500", "500 streamed", "503", "too long", "not readable", "not readable, streamed"],
)
def test_one_request_marks_no_engine_down_by_how_it_is_answered(
    no_index: Locator, monkeypatch: pytest.MonkeyPatch, bad: Answer, status: int, stream: bool
) -> None:
    """It was tried on three, which were passed over for seconds, and `/health` was 503."""
    monkeypatch.setattr(upstream, "ROUTER_ANSWER_BYTES_MAX", 1024)
    monkeypatch.setattr(server, "PROBE_EVERY_S", 600.0)

    async def scenario() -> None:
        makers, decoders = ([FakeEngine(bad) for _ in range(2)] for _ in range(2))
        async with routed(no_index, makers, decoders) as router:
            answer, raw = await router.ask(stream=stream)
            assert answer.status == status
            if status != 502:
                assert json.loads(raw) == {"error": "no"}, "as the engine says it"
            assert (await router.get("/health")).status == 200
            engines = json.loads(await router.read("/engines"))
            assert all(one["up"] for one in engines)
        assert sum(one.prompts for one in decoders) <= 2

    asyncio.run(scenario())


def test_without_a_prefill_engine_the_decode_engine_does_it_all(no_index: Locator) -> None:
    async def scenario() -> None:
        broken = [FakeEngine(fails_with(500)), FakeEngine(dies_after(0))]
        async with routed(no_index, broken, [FakeEngine(talk)]) as router:
            answer, _ = await router.ask()
            assert (answer.status, answer.headers[PREFILL]) == (200, "none")

    asyncio.run(scenario())


def test_blocks_that_do_not_come_are_waited_for_once(locator: Locator, store: BlockSession) -> None:
    async def scenario() -> None:
        mute, maker = FakeEngine(saver(store, saves=False)), FakeEngine(saver(store))
        async with routed(locator, [mute, maker], [FakeEngine(talk)], save_wait_s=0.1) as router:
            ways = []
            for i in range(4):
                answer, _ = await router.ask(prompt=[i, *TOKENS])
                assert answer.status == 200
                ways.append(answer.headers[PREFILL])
            assert ways == [mute.url, maker.url, maker.url, maker.url]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "some text"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "some text"}]}),
        ("/v1/chat/completions", {"messages": [{"content": [{"type": "text", "text": "some"}]}]}),
    ],
)
def test_texts_are_tokenized_by_an_engine(
    locator: Locator, store: BlockSession, path: str, body: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with routed(locator, [FakeEngine(saver(store))], [FakeEngine(talk)]) as router:
            found = [(await router.ask(path, **body))[0].headers[FOUND] for _ in range(2)]
            assert found == ["0", "48"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "body",
    [
        {"cache_salt": "s"},
        {"truncate_prompt_tokens": 8},
        {"reasoning_effort": "low"},
        {"prompt": [TOKENS, TOKENS]},
        {"prompt": ["a", "b"]},
        {"prompt": [-1, -2]},
        {"prompt": None},
    ],
)
def test_prompts_that_tokens_do_not_tell_are_never_said_to_be_found(
    locator: Locator, store: BlockSession, body: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with routed(locator, [FakeEngine(saver(store))], [FakeEngine(talk)]) as router:
            await router.ask()
            answer, _ = await router.ask(**body)
            assert (answer.status, answer.headers[FOUND]) == (200, "0")

    asyncio.run(scenario())


def test_while_the_index_is_away_nothing_is_prefilled_or_waited_for(store: BlockSession) -> None:
    async def scenario(redis: RedisServer, locator: Locator) -> None:
        maker = FakeEngine(saver(store))
        async with routed(locator, [maker], [FakeEngine(talk)], save_wait_s=0.1) as router:
            await router.ask()
            redis.kill()
            answer, _ = await router.ask()
            assert (answer.status, answer.headers[PREFILL]) == (200, "none")

    async def never_known(locator: Locator) -> None:
        """The keys are learned with the index away: then the wait must end by itself."""
        maker = FakeEngine(saver(store))
        async with routed(locator, [maker], [FakeEngine(talk)], save_wait_s=1000) as router:
            answer, _ = await router.ask()
            assert (answer.status, answer.headers[PREFILL]) == (200, maker.url)

    with RedisServer() as redis:
        asyncio.run(scenario(redis, Locator(redis.url, run_dir=store.run_dir, limits=PATIENT)))
        asyncio.run(never_known(Locator(redis.url, run_dir=store.run_dir)))


def test_a_client_that_hangs_up_ends_its_request_in_the_engine(no_index: Locator) -> None:
    async def scenario() -> None:
        started, ended = asyncio.Event(), asyncio.Event()

        async def hang(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            out = web.StreamResponse()
            await out.prepare(request)
            started.set()
            try:
                while True:
                    await out.write(SSE[0])
                    await asyncio.sleep(0.01)
            finally:
                ended.set()

        async with routed(no_index, [], [FakeEngine(hang)]) as router:
            asking = asyncio.ensure_future(router.ask(stream=True))
            await asyncio.wait_for(started.wait(), PATIENCE_S)
            asking.cancel()
            await asyncio.wait_for(ended.wait(), PATIENCE_S)

    asyncio.run(scenario())


def test_names_bring_engines_and_health_says_whether_anybody_answers(no_index: Locator) -> None:
    async def scenario() -> None:
        async with routed(no_index, [], []) as router:
            assert (await router.get("/health")).status == 503
            assert (await router.ask())[0].status == 502
        engine = FakeEngine(talk)
        sleeping = Name.parse(Role.DECODE, "dns+http://localhost:1")
        async with routed(no_index, [], [], names=(sleeping,)) as router:
            assert (await router.get("/health")).status == 503
        await engine.server.start_server()
        name = Name.parse(Role.DECODE, f"dns+http://localhost:{engine.server.port}@node")
        unknown = Name.parse(Role.PREFILL, "dns+http://no-such-name.invalid:1")
        async with routed(no_index, [], [], names=(name, unknown)) as router:
            assert (await router.get("/health")).status == 200
            assert (await router.get("/v1/models")).status == 200
            assert (await router.ask())[0].headers[DECODE].endswith(f":{engine.server.port}")
        await engine.server.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("raw", [b"no json", b"[1]", b""])
def test_what_is_no_request_is_refused(no_index: Locator, raw: bytes) -> None:
    async def scenario() -> None:
        engine = FakeEngine(talk)
        async with routed(no_index, [], [engine]) as router, aiohttp.ClientSession() as session:
            url = f"{router.url}/v1/completions"
            async with session.post(url, data=raw) as answer:
                assert answer.status == 400
        assert engine.asked == []

    asyncio.run(scenario())


def test_a_prefill_is_asked_for_one_token_whatever_the_request_wants() -> None:
    body = {"messages": [], "max_completion_tokens": 99, "stream": True, "stream_options": {}}
    asked = prefill_body("/v1/chat/completions", {**body, "n": 4, "min_tokens": 5, "echo": True})
    assert asked == {
        "messages": [],
        "max_completion_tokens": 1,
        "max_tokens": 1,
        "stream": False,
        "n": 1,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            PromptKeys.ASKED: True,
        },
    }
