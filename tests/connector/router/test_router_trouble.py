"""Engines that are slow or hang, clients that go or stop reading, requests that are too much."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from kvstore.spi import Locator

aiohttp = pytest.importorskip("aiohttp", reason="the router extra is not installed")
from aiohttp import web  # noqa: E402
from fake_engines import TOKENS, FakeEngine, silent, talk  # noqa: E402
from routed import DECODE, PATIENCE_S, PREFILL, routed  # noqa: E402

from connector.router import incoming, server, upstream  # noqa: E402
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
    monkeypatch.setattr(incoming, "ROUTER_IN_FLIGHT_MAX", 1)

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
        (b"{}", "application/json; charset=nonsense", None),
        (b" " * 2000, "application/json", 413),
    ],
    ids=["deep", "not utf-8", "charset", "large"],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/blocks"])
def test_what_is_no_request_is_refused_as_openai_does(
    no_index: Locator,
    path: str,
    body: bytes,
    kind: str,
    status: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if status is None:  # an engine is to say it, and there is none
        status = 400 if path == "/blocks" else 502
    if status == 413:
        monkeypatch.setattr(server, "ROUTER_BODY_BYTES_MAX", 1000)

    async def scenario() -> None:
        async with routed(no_index, [], []) as router, aiohttp.ClientSession() as session:
            url = f"{router.url}{path}"
            async with session.post(url, data=body, headers={"Content-Type": kind}) as answer:
                assert answer.status == status
                assert (await answer.json())["error"]["code"] == status

    asyncio.run(scenario())


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_says_it_is_packed_is_refused_and_fills_no_log(
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
                assert answer.status == 415
                told = await answer.json()
                assert "Content-Encoding" in told["error"]["message"]

    with caplog.at_level(logging.ERROR, "aiohttp.server"):
        asyncio.run(scenario())
    assert [record for record in caplog.records if is_no_bad_http(record)] == []


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
