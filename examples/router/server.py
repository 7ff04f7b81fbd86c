"""The router's HTTP side: OpenAI's completions in, the same out.

A prompt goes to a prefill engine, which computes and saves its KV; then the request
goes to a decode engine, which loads it. Prompts whose blocks are all in the store
skip the first part. Whatever fails on the way costs time, not the request: a decode
engine computes what it does not find.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from aiohttp import ClientResponse, web

from connector import PromptKeys
from examples.router.discovery import Name, keep_resolving, resolve
from examples.router.prefix import Prefix, Prefixes
from examples.router.routing import Engine, Fleet, Role, needs_prefill
from examples.router.upstream import EngineFailedError, Upstream, whole

log = logging.getLogger("kvstore.router")

ATTEMPTS_MAX = 3
"""Engines that one step of a request is tried on."""
IN_FLIGHT_MAX = 4096
"""Requests at a time; one more is told to come back."""
BODY_BYTES_MAX = 16 << 20
TOKENIZE_TIMEOUT_S = 2.0
PROBE_EVERY_S, PROBE_TIMEOUT_S = 2.0, 2.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PASSED_HEADERS = ("Authorization", "X-Request-Id")
TOKENIZED = {
    COMPLETIONS: ("model", "prompt", "add_special_tokens"),
    CHAT: (
        *("model", "messages", "tools", "add_special_tokens", "add_generation_prompt"),
        *("continue_final_message", "chat_template", "chat_template_kwargs"),
    ),
}
"""Fields that decide which tokens a prompt is."""
ANSWER_FIELDS = ("stream_options", "min_tokens", "best_of", "logprobs", "top_logprobs", "echo")
"""Fields about an answer that a prefill engine is not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    timeout_s: float = 600.0
    """One request, all its attempts together."""
    save_wait_s: float = 2.0
    """How long to wait for a prefill engine's blocks to be in the store."""
    tokenize: bool = True
    """Ask an engine for the tokens of prompts that come as text: without them the store
    cannot be asked for their prefix."""


@dataclass(slots=True)
class _Job:
    """One request on its way."""

    path: str
    body: dict[str, Any] | None
    """None: a GET."""
    headers: dict[str, str]
    deadline: float
    prefix: Prefix = field(default_factory=Prefix)
    found_tokens: int = 0
    prefilled_at: str = "none"

    @property
    def model(self) -> str:
        return str((self.body or {}).get("model", ""))

    def left_s(self) -> float:
        return max(0.001, self.deadline - time.monotonic())


class Router:
    def __init__(
        self,
        fleet: Fleet,
        prefixes: Prefixes,
        settings: RouterSettings,
        names: Sequence[Name] = (),
    ) -> None:
        """`names` are looked up again and again, for engines that come and go."""
        self._names = list(names)
        self._fleet = fleet
        self._prefixes = prefixes
        self._settings = settings
        self._in_flight = 0
        self._upstream: Upstream | None = None

    def app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.add_routes(
            [
                web.post(COMPLETIONS, self._complete),
                web.post(CHAT, self._complete),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/engines", self._engines),
            ]
        )
        app.cleanup_ctx.append(self._life)
        return app

    async def _life(self, app: web.Application) -> AsyncIterator[None]:
        self._upstream = Upstream()
        await resolve(self._names, self._fleet)
        await self._probe()
        tasks = [
            asyncio.ensure_future(self._keep_probing()),
            asyncio.ensure_future(keep_resolving(self._names, self._fleet)),
        ]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._upstream.close()
        self._prefixes.close()

    @property
    def _up(self) -> Upstream:
        assert self._upstream is not None, "the application has not started"
        return self._upstream

    async def _probe(self) -> None:
        async def one(engine: Engine) -> None:
            if await self._up.healthy(engine, PROBE_TIMEOUT_S):
                engine.answered()
            else:
                engine.failed(time.monotonic())

        await asyncio.gather(*map(one, self._fleet.engines))

    async def _keep_probing(self) -> None:
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            await self._probe()

    # One request

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if self._in_flight >= IN_FLIGHT_MAX:
            return _error(503, f"{IN_FLIGHT_MAX} requests are in flight")
        try:
            body = await request.json()
        except ValueError:
            return _error(400, "the body is not JSON")
        if not isinstance(body, dict):
            return _error(400, "the body is not a JSON object")
        headers = {
            name: request.headers[name] for name in PASSED_HEADERS if name in request.headers
        }
        deadline = time.monotonic() + self._settings.timeout_s
        job = _Job(request.path, body, headers, deadline, Prefix())
        self._in_flight += 1
        try:
            job.prefix = await self._prefixes.find(job.model, await self._tokens(job))
            await self._prefill(job)
            return await self._decode(request, job)
        except ClientGoneError:
            return web.Response(status=499)  # to nobody
        finally:
            self._in_flight -= 1

    def _job(self, request: web.Request, body: dict[str, Any] | None) -> _Job:
        headers = {
            name: request.headers[name] for name in PASSED_HEADERS if name in request.headers
        }
        return _Job(request.path, body, headers, time.monotonic() + self._settings.timeout_s)

    async def _tokens(self, job: _Job) -> list[int] | None:
        """The prompt's tokens; None where they are not all that makes its KV, or not known."""
        body = job.body or {}
        prompt = body.get("prompt") if job.path == COMPLETIONS else body.get("messages")
        if body.get("cache_salt") or not prompt:
            return None
        if job.path == COMPLETIONS and isinstance(prompt, list):
            return prompt if all(type(token) is int for token in prompt) else None
        if not self._settings.tokenize or (job.path == CHAT and not _text_only(prompt)):
            return None
        engine = self._fleet.choose(Role.DECODE, {}, time.monotonic())
        if engine is None:
            return None
        question = {name: body[name] for name in TOKENIZED[job.path] if name in body}
        timeout_s = min(TOKENIZE_TIMEOUT_S, job.left_s())
        try:
            answer = await self._up.ask(engine, "/tokenize", question, job.headers, timeout_s)
        except EngineFailedError as e:
            log.warning("tokens not known: %s", e)
            return None
        tokens = (answer or {}).get("tokens")
        return tokens if isinstance(tokens, list) else None

    async def _prefill(self, job: _Job) -> None:
        """Have what is missing of the prompt computed and saved, if anybody can."""
        prefix = job.prefix
        job.found_tokens = prefix.blocks * (prefix.block_tokens or 0)
        tokens = None if prefix.tokens is None else len(prefix.tokens)
        if prefix.index_away or not needs_prefill(tokens, prefix.block_tokens, prefix.blocks):
            return
        body = prefill_body(job.path, job.body or {})
        tried: list[Engine] = []
        while len(tried) < ATTEMPTS_MAX:
            now = time.monotonic()
            engine = self._fleet.take(Role.PREFILL, prefix.held, now, tried)
            if engine is None:
                return
            tried.append(engine)
            try:
                answer = await self._up.ask(engine, job.path, body, job.headers, job.left_s())
            except EngineFailedError as e:
                log.warning("prefill: %s", e)
                engine.failed(time.monotonic())
                continue
            if answer is not None:
                job.prefilled_at = engine.url
                last = self._prefixes.learn(job.model, answer)
                if last is not None:
                    held = await self._prefixes.wait_for(last, self._settings.save_wait_s)
                    job.prefix = Prefix(prefix.tokens, held=held or {})
                    if held is not None and not held:
                        engine.unsaved(time.monotonic())
            return  # a refusal is the client's fault: the decode engine tells it so

    async def _decode(self, request: web.Request, job: _Job) -> web.StreamResponse:
        tried: list[Engine] = []
        reason = "no decode engine"
        while len(tried) < ATTEMPTS_MAX and time.monotonic() < job.deadline:
            engine = self._fleet.take(Role.DECODE, job.prefix.held, time.monotonic(), tried)
            if engine is None:
                break
            tried.append(engine)
            out: web.StreamResponse | None = None
            try:
                async with self._up.send(
                    engine, job.path, job.body, job.headers, job.left_s()
                ) as answer:
                    head = _head(job, engine, answer)
                    if not (job.body or {}).get("stream"):
                        # Whole, so that an engine that dies half way costs no request.
                        all_of_it = await whole(answer)
                        return web.Response(status=answer.status, headers=head, body=all_of_it)
                    part = await answer.content.readany()
                    out = web.StreamResponse(status=answer.status, headers=head)
                    await _pass_on(out, request, part)
                    async for part in answer.content.iter_any():
                        await _pass_on(out, request, part)
                await out.write_eof()
                return out
            except EngineFailedError as e:
                log.warning("decode: %s", e)
                engine.failed(time.monotonic())
                reason = str(e)
                if out is not None:
                    # The client has had a part: an end without the last chunk says that it broke.
                    if request.transport is not None:
                        request.transport.abort()
                    return out
        return _error(502, reason, _head(job))

    # About the router

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return await self._decode(request, self._job(request, None))

    async def _health(self, request: web.Request) -> web.Response:
        """Whether anybody can answer: one decode engine is enough."""
        now = time.monotonic()
        up = any(e.up(now) for e in self._fleet.engines if e.role is Role.DECODE)
        return web.Response(status=200 if up else 503)

    async def _engines(self, request: web.Request) -> web.Response:
        now = time.monotonic()
        return web.json_response([asdict(e) | {"up": e.up(now)} for e in self._fleet.engines])


class ClientGoneError(Exception):
    """The client hung up: nobody's fault here."""


async def _pass_on(out: web.StreamResponse, request: web.Request, part: bytes) -> None:
    """Raises `ClientGoneError`, so that the client's broken connection is not the engine's."""
    try:
        if not out.prepared:
            await out.prepare(request)
        await out.write(part)
    except ConnectionError as e:
        raise ClientGoneError from e


def prefill_body(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The same prompt, for one token and no stream, and with the question for its keys."""
    out = {name: value for name, value in body.items() if name not in ANSWER_FIELDS}
    out |= {"stream": False, "max_tokens": 1, "n": 1}
    if path == CHAT:
        out["max_completion_tokens"] = 1
    params = out.get("kv_transfer_params")
    out["kv_transfer_params"] = {
        **(params if isinstance(params, dict) else {}),
        PromptKeys.ASKED: True,
    }
    return out


def _text_only(messages: Any) -> bool:
    """Images and the like are part of the KV and not of the tokens."""
    if not isinstance(messages, list):
        return False
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    return all(content is None or isinstance(content, str) for content in contents)


def _head(
    job: _Job, engine: Engine | None = None, answer: ClientResponse | None = None
) -> dict[str, str]:
    """Headers of an answer: what it is, and which way it came."""
    head = {
        "X-KVStore-Found-Tokens": str(job.found_tokens),
        "X-KVStore-Prefill": job.prefilled_at,
        "X-KVStore-Decode": engine.url if engine is not None else "none",
    }
    if answer is not None:
        head["Content-Type"] = answer.headers.get("Content-Type", "application/json")
    return head


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """As OpenAI's API says it."""
    body = {"error": {"message": message, "type": "router_error", "code": status}}
    return web.Response(
        status=status, text=json.dumps(body), content_type="application/json", headers=headers
    )
