"""Engines that are slow or hang, clients that go or stop reading, requests that are too much."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore import BlockSession, Holders, Locator, MissReason, UsageError

aiohttp = pytest.importorskip("aiohttp", reason="the router extra is not installed")
from aiohttp import web  # noqa: E402
from fake_engines import TOKENS, FakeEngine, saver, silent, talk  # noqa: E402
from routed import DECODE, FOUND, PATIENCE_S, PREFILL, routed  # noqa: E402

from connector.router import discovery, prefix, server, upstream  # noqa: E402
from connector.router.discovery import Name, resolve  # noqa: E402
from connector.router.routing import Engine, EngineFleet, Role  # noqa: E402
from connector.router.run import is_no_bad_http  # noqa: E402


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is soon suspicious, and engines are soon found to hang."""
    monkeypatch.setattr(upstream, "SILENT_S", 0.1)
    monkeypatch.setattr(server, "PROBE_EVERY_S", 0.1)
    monkeypatch.setattr(server, "PROBE_TIMEOUT_S", 0.1)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_is_only_slow_is_waited_for(
    no_index: Locator, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole answer of thousands of tokens, and a first token behind a queue, take minutes."""
    impatient(monkeypatch)

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.5)
        return await talk(request, body)

    async def scenario() -> None:
        one, other = FakeEngine(slow), FakeEngine(slow)
        async with routed(no_index, [], [one, other]) as router:
            assert (await router.ask(stream=stream))[0].status == 200
        assert one.prompts + other.prompts == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_hangs_costs_no_request(
    no_index: Locator, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(monkeypatch)

    async def scenario() -> None:
        hung, good = FakeEngine(silent()), FakeEngine(talk)
        async with routed(no_index, [], [hung, good]) as router:
            hung.healthy.clear()
            for _ in range(2):
                answer, _ = await router.ask(stream=stream)
                assert (answer.status, answer.headers[DECODE]) == (200, good.url)
            hung.healthy.set()

    asyncio.run(scenario())


def test_a_prefill_engine_that_is_too_slow_leaves_the_decode_engine_its_time(
    no_index: Locator,
) -> None:
    async def scenario() -> None:
        slow = [FakeEngine(silent()) for _ in range(2)]
        async with routed(no_index, slow, [FakeEngine(talk)], timeout_s=1.0) as router:
            answer, _ = await router.ask()
            assert (answer.status, answer.headers[PREFILL]) == (200, "none")

    asyncio.run(scenario())


def test_a_request_whose_time_is_up_is_told_so(no_index: Locator) -> None:
    async def scenario() -> None:
        async with routed(no_index, [], [FakeEngine(silent())], timeout_s=0.2) as router:
            answer, raw = await router.ask()
            assert answer.status == 504
            assert "0.2 s" in json.loads(raw)["error"]["message"]

    asyncio.run(scenario())


def test_blocks_of_the_only_prefill_engine_are_waited_for_once_too(
    locator: Locator, store: BlockSession
) -> None:
    async def scenario() -> None:
        mute = FakeEngine(saver(store, saves=False))
        async with routed(locator, [mute], [FakeEngine(talk)], save_wait_s=0.1) as router:
            ways = [(await router.ask(prompt=[i, *TOKENS]))[0].headers[PREFILL] for i in range(3)]
            assert ways == [mute.url, "none", "none"]

    asyncio.run(scenario())


def test_a_client_that_hangs_up_ends_its_prefill(no_index: Locator) -> None:
    async def scenario() -> None:
        started, ended = asyncio.Event(), asyncio.Event()
        maker, decoder = FakeEngine(silent(started, ended)), FakeEngine(talk)
        async with routed(no_index, [maker], [decoder]) as router:
            asking = asyncio.ensure_future(router.ask())
            await asyncio.wait_for(started.wait(), PATIENCE_S)
            asking.cancel()
            await asyncio.wait_for(ended.wait(), PATIENCE_S)
            assert decoder.prompts == 0

    asyncio.run(scenario())


def test_a_client_that_stops_reading_holds_an_engine_no_longer_than_a_request_may_take(
    no_index: Locator,
) -> None:
    async def scenario() -> None:
        ended = asyncio.Event()

        async def flood(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            out = web.StreamResponse()
            await out.prepare(request)
            try:
                while True:
                    await out.write(bytes(1 << 20))
            finally:
                ended.set()

        async with routed(no_index, [], [FakeEngine(flood)], timeout_s=0.5) as router:
            host, port = router.url.removeprefix("http://").split(":")
            _reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
            body = json.dumps({"model": "m", "prompt": TOKENS, "stream": True})
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: "
            writer.write(f"{head}{len(body)}\r\n\r\n{body}".encode())
            await asyncio.wait_for(ended.wait(), PATIENCE_S)
            writer.close()

    asyncio.run(scenario())


def test_requests_whose_bodies_are_still_coming_count_as_in_flight(
    no_index: Locator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ROUTER_IN_FLIGHT_MAX", 1)

    async def scenario() -> None:
        async with routed(no_index, [], [FakeEngine(talk)]) as router:
            host, port = router.url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")

            async def refused() -> None:
                while True:
                    answer, _ = await router.ask()
                    if answer.status == 503:
                        assert answer.headers["Retry-After"]
                        return
                    await asyncio.sleep(0.01)

            await asyncio.wait_for(refused(), PATIENCE_S)
            writer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"[" * 100_000, "application/json", 400),
        (b"\xff", "application/json", 400),
        (b"{}", "application/json; charset=nonsense", 502),
        (b" " * 2000, "application/json", 413),
    ],
    ids=["deep", "not utf-8", "charset", "large"],
)
def test_what_is_no_request_is_refused_as_openai_does(
    no_index: Locator, body: bytes, kind: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if status == 413:
        monkeypatch.setattr(server, "ROUTER_BODY_BYTES_MAX", 1000)

    async def scenario() -> None:
        async with routed(no_index, [], []) as router, aiohttp.ClientSession() as session:
            url = f"{router.url}/v1/completions"
            async with session.post(url, data=body, headers={"Content-Type": kind}) as answer:
                assert answer.status == status
                assert (await answer.json())["error"]["code"] == status

    asyncio.run(scenario())


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_is_not_packed_as_it_says_is_refused_and_fills_no_log(
    no_index: Locator, encoding: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with (
            routed(no_index, [], []) as router,
            aiohttp.ClientSession() as session,
        ):
            head = {"Content-Type": "application/json", "Content-Encoding": encoding}
            url = f"{router.url}/v1/completions"
            async with session.post(url, data=b"hello", headers=head) as answer:
                assert answer.status == 400
                told = await answer.json()
                assert told["error"]["message"] == "the body cannot be read"

    with caplog.at_level(logging.ERROR, "aiohttp.server"):
        asyncio.run(scenario())
    assert [record for record in caplog.records if is_no_bad_http(record)] == []


def test_a_name_that_cannot_be_looked_up_for_now_keeps_its_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[Any] = [["10.0.0.1"], socket.EAI_AGAIN, ["10.0.0.2"], socket.EAI_NONAME]

    async def scenario() -> None:
        loop, fleet = asyncio.get_running_loop(), EngineFleet()

        async def getaddrinfo(*args: Any, **options: Any) -> Any:
            found = answers.pop(0)
            if not isinstance(found, list):
                raise socket.gaierror(found, "")
            return [(0, 0, 0, "", (address, 8000)) for address in found]

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        names = [Name.parse(Role.DECODE, "dns+http://engines:8000")]
        seen = []
        for _ in range(4):
            await resolve(names, fleet)
            seen.append([engine.url.split("//")[1] for engine in fleet.engines])
        assert seen == [["10.0.0.1:8000"], ["10.0.0.1:8000"], ["10.0.0.2:8000"], []]

    asyncio.run(scenario())


def test_a_name_server_that_does_not_answer_holds_no_other_name_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    async def scenario() -> None:
        loop, fleet = asyncio.get_running_loop(), EngineFleet()
        answer: asyncio.Future[list[Any]] = loop.create_future()

        async def getaddrinfo(host: str, port: int, **options: Any) -> Any:
            asked.append(host)
            return await answer if host == "slow" else [(0, 0, 0, "", ("10.0.0.1", port))]

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        monkeypatch.setattr(discovery, "LOOK_UP_TIMEOUT_S", 0.05)
        names = [Name.parse(Role.DECODE, f"dns+http://{host}:8000") for host in ("slow", "good")]
        for _ in range(3):
            await asyncio.wait_for(resolve(names, fleet), PATIENCE_S)
            assert [engine.url for engine in fleet.engines] == ["http://10.0.0.1:8000"]
        assert asked.count("slow") == 1, "each question has a thread until it is answered"
        answer.set_result([(0, 0, 0, "", ("10.0.0.2", 8000))])
        await resolve(names, fleet)
        assert {engine.url for engine in fleet.engines} == {
            "http://10.0.0.1:8000",
            "http://10.0.0.2:8000",
        }

    asyncio.run(scenario())


def test_an_answer_that_no_thread_reads_in_time_is_too_late(
    no_index: Locator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads are few, and name servers that do not answer hold them."""
    go_on = threading.Event()
    monkeypatch.setattr(upstream, "json", SimpleNamespace(loads=lambda raw: go_on.wait(PATIENCE_S)))

    async def scenario() -> None:
        engine = FakeEngine(talk)
        async with routed(no_index, [], [engine]):
            up = upstream.Upstream()
            one = Engine(engine.url, Role.DECODE)
            body = {"model": "m", "prompt": list(TOKENS)}
            try:
                with pytest.raises(upstream.TooLateError):
                    await up.ask(one, "/v1/completions", body, {}, time.monotonic() + 1.0)
                assert not go_on.is_set()
            finally:
                go_on.set()
                await up.close()

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


def test_a_name_that_can_be_nobodys_is_refused() -> None:
    with pytest.raises(UsageError, match="dns"):
        Name.parse(Role.DECODE, "dns+http://a..b:80")


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


def test_connections_are_given_up_before_an_engine_would(
    no_index: Locator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that closes one at the moment it is used again would cost a request."""
    monkeypatch.setattr(upstream, "KEEPALIVE_S", 0.1)

    async def scenario() -> None:
        ports = []

        async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            assert request.transport is not None
            ports.append(request.transport.get_extra_info("peername")[1])
            return web.json_response({})

        async with routed(no_index, [], [FakeEngine(answer)]) as router:
            await router.ask()
            await asyncio.sleep(0.3)
            await router.ask()
        assert ports[0] != ports[1]

    asyncio.run(scenario())


def test_one_request_has_one_id_everywhere(locator: Locator, store: BlockSession) -> None:
    seen = []

    async def told(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        seen.append(request.headers.get("X-Request-Id"))
        return await (saver(store) if body.get("max_tokens") == 1 else talk)(request, body)

    async def scenario() -> None:
        async with routed(locator, [FakeEngine(told)], [FakeEngine(told)]) as router:
            answer, _ = await router.ask()
            assert seen == [answer.headers["X-Request-Id"]] * 2
            other, _ = await router.ask(prompt=[1, *TOKENS], stream=True)
            assert seen[2:] == [other.headers["X-Request-Id"]] * 2
            assert other.headers["X-Request-Id"] != answer.headers["X-Request-Id"]

    asyncio.run(scenario())


def test_when_to_come_back_is_passed_on(no_index: Locator) -> None:
    async def full(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({}, status=429, headers={"Retry-After": "7"})

    async def scenario() -> None:
        async with routed(no_index, [], [FakeEngine(full)]) as router:
            answer, _ = await router.ask()
            assert (answer.status, answer.headers["Retry-After"]) == (429, "7")

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


def test_metrics_say_what_each_engine_was_given(no_index: Locator) -> None:
    async def scenario() -> None:
        good, gone = FakeEngine(talk), FakeEngine(talk)
        async with routed(no_index, [], [good, gone]) as router:
            one, other = (f'{{engine="{e.url}",role="decode"}}' for e in (good, gone))
            await gone.server.close()
            for _ in range(3):
                await router.ask()
            lines = (await router.read("/metrics")).splitlines()
            assert f"kvstore_router_requests_total{one} 3" in lines
            assert f"kvstore_router_up{one} 1" in lines
            assert f"kvstore_router_up{other} 0" in lines
            assert "# TYPE kvstore_router_in_flight gauge" in lines

    asyncio.run(scenario())


def test_a_client_that_goes_at_the_last_byte_is_no_error(
    no_index: Locator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        write_eof = web.StreamResponse.write_eof

        async def gone(out: web.StreamResponse, data: bytes = b"") -> None:
            await write_eof(out, data)
            if DECODE in out.headers:
                raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

        monkeypatch.setattr(web.StreamResponse, "write_eof", gone)
        async with routed(no_index, [], [FakeEngine(talk)]) as router:
            assert (await router.ask(stream=True))[0].status == 200
        assert "Error handling request" not in caplog.text

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
