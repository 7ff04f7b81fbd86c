"""The router before engines that are real servers in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp.test_utils import TestServer
from fake_engines import TOKENS, FakeEngine

from connector.router.discovery import Name
from connector.router.prefix import Prefixes
from connector.router.routing import Engine, EngineFleet, Role
from connector.router.server import Router, RouterSettings
from kvstore.spi import Locator

FOUND, PREFILL, DECODE = "X-KVStore-Found-Tokens", "X-KVStore-Prefill", "X-KVStore-Decode"
PATIENCE_S = 20.0


class Setup:
    """A router before engines; `ask` is one client."""

    def __init__(self, url: str, session: Any) -> None:
        self.url = url
        self._session = session

    async def ask(self, path: str = "/v1/completions", **body: Any) -> tuple[Any, bytes]:
        """The answer and all its bytes. Raises what aiohttp raises for a broken one."""
        if path == "/v1/completions":
            body.setdefault("prompt", TOKENS)
        async with self._session.post(self.url + path, json={"model": "m", **body}) as answer:
            return answer, await answer.read()

    async def read(self, path: str) -> str:
        async with self._session.get(self.url + path) as answer:
            return str(await answer.text())

    async def get(self, path: str) -> Any:
        async with self._session.get(self.url + path) as answer:
            await answer.read()
            return answer


@asynccontextmanager
async def routed(
    locator: Locator,
    prefill: list[FakeEngine],
    decode: list[FakeEngine],
    *,
    at: tuple[str, ...] = (),
    save_wait_s: float = PATIENCE_S,
    names: tuple[Name, ...] = (),
    timeout_s: float = 600.0,
) -> AsyncIterator[Setup]:
    """`at`: where each decode engine is."""
    everyone = [*prefill, *decode]
    for engine in everyone:
        await engine.server.start_server()
    at = at or ("",) * len(decode)
    fleet = EngineFleet(
        [Engine(engine.url, Role.PREFILL) for engine in prefill]
        + [Engine(e.url, Role.DECODE, where) for e, where in zip(decode, at, strict=True)]
    )
    settings = RouterSettings(save_wait_s=save_wait_s, timeout_s=timeout_s)
    server = TestServer(Router(fleet, Prefixes(locator), settings, names).app())
    await server.start_server()
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            yield Setup(str(server.make_url("")).rstrip("/"), session)
    finally:
        await server.close()
        for engine in everyone:
            await engine.server.close()
