"""Engines that are real HTTP servers in this process, and answer as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from connector import PromptKeys
from connector.layout.block_hashes import ALGORITHM, extend
from kvstore import Namespace
from kvstore.spi import BlockSession, Reservation

KEYS = PromptKeys(16, Namespace({"model": "m", "hash_algorithm": ALGORITHM}))
TOKENS = list(range(100, 100 + 3 * 16 + 2))
SSE = [b'data: {"choices": [{"text": "a"}]}\n\n', b"data: [DONE]\n\n"]

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class FakeEngine:
    """Answers completions as `answer` says, and remembers what it was asked."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.healthy = asyncio.Event()
        """Cleared, probes of its health get no answer: it hangs."""
        self.healthy.set()
        self._answer = answer
        app = web.Application()
        app.add_routes(
            [
                web.post("/v1/completions", self._complete),
                web.post("/v1/chat/completions", self._complete),
                web.post("/tokenize", self._tokenize),
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
            ]
        )
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")

    @property
    def prompts(self) -> int:
        return sum(path.startswith("/v1") for path, _ in self.asked)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append((request.path, body))
        return await self._answer(request, body)

    async def _tokenize(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, await request.json()))
        return web.json_response({"tokens": TOKENS, "count": len(TOKENS)})

    async def _health(self, request: web.Request) -> web.Response:
        await self.healthy.wait()
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": []})


def saver(
    store: BlockSession,
    *,
    saves: bool = True,
    extra: str = "",
    hands_over: dict[str, Any] | None = None,
) -> Answer:
    """A prefill engine: computes, saves, tells its keys. `extra` is in them beside the tokens.
    `hands_over` is what it wants a decode engine told."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert body["max_tokens"] == 1
        assert body["stream"] is False
        prompt = body["prompt"] if isinstance(body.get("prompt"), list) else TOKENS
        hashes = extend(
            [], prompt, KEYS.block_tokens, lambda first, end: (extra,) if extra else None
        )
        if saves:
            reserved = store.reserve(KEYS.of_hashes(hashes), 8192, KEYS.namespace.id)
            store.commit([slot for slot in reserved if isinstance(slot, Reservation)])
        told = KEYS.answer(hashes) if body["kv_transfer_params"][PromptKeys.ASKED] else None
        handed = {**(hands_over or {}), PromptKeys.ASKED: told}
        return web.json_response({"kv_transfer_params": handed})

    return answer


async def talk(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A decode engine."""
    if not body.get("stream"):
        return web.json_response({"choices": [{"text": "a"}]})
    out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await out.prepare(request)
    for part in SSE:
        await out.write(part)
    return out


def silent(started: asyncio.Event | None = None, ended: asyncio.Event | None = None) -> Answer:
    """Says nothing until its client goes."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if started is not None:
            started.set()
        try:
            await asyncio.Event().wait()
        finally:
            if ended is not None:
                ended.set()
        raise AssertionError

    return answer


def fails_with(status: int) -> Answer:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": "no"}, status=status)

    return answer


def dies_after(parts: int) -> Answer:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        out = web.StreamResponse()
        await out.prepare(request)
        for part in SSE[:parts]:
            await out.write(part)
        await asyncio.sleep(0.1)  # so that what was written leaves before the connection breaks
        assert request.transport is not None
        request.transport.abort()
        return out

    return answer
