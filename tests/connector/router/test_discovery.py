"""Engines that are found by names: name servers that fail, or do not answer."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from kvstore import UsageError

pytest.importorskip("aiohttp", reason="the router extra is not installed")
from routed import PATIENCE_S

from connector.router import discovery
from connector.router.discovery import Name, resolve
from connector.router.routing import EngineFleet, Role


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


def test_a_name_that_can_be_nobodys_is_refused() -> None:
    with pytest.raises(UsageError, match="dns"):
        Name.parse(Role.DECODE, "dns+http://a..b:80")
