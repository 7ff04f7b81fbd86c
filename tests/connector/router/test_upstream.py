"""What passes between the router and an engine: connections, ids, and when to come back."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.spi import BlockSession, Locator

pytest.importorskip("aiohttp", reason="the router extra is not installed")
from aiohttp import web
from fake_engines import TOKENS, FakeEngine, saver, talk
from routed import PATIENCE_S, routed

from connector.router import upstream
from connector.router.routing import Engine, Role


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
