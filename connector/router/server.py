"""Takes OpenAI's completions over HTTP and gives them to engines: the router's side to clients.

A prompt goes to a prefill engine, which computes and saves its KV; then the request
goes to a decode engine, which loads it. Prompts whose blocks are all in the store
skip the first part. Whatever fails on the way costs time, not the request: a decode
engine computes what it does not find.

Must never happen: a wait without a deadline; a request that is tried again once its client
has had a part of an answer (the connection is broken off then); an engine that is marked as failed
because a client hung up, its own time was over, or by any answer: one request that makes engines
say 500 would have all of them passed over.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated

from aiohttp import web

from connector.limits import (
    ROUTER_BODY_BYTES_MAX,
    ROUTER_HEADERS_BYTES_MAX,
    ROUTER_TOKENIZE_TIMEOUT_S,
)
from connector.messages import named
from connector.router.blocks import BlocksAsked, UnknownModelError, where_blocks
from connector.router.bodies import (
    CHAT,
    COMPLETIONS,
    NOT_TOLD,
    TOKENIZED,
    decode_body,
    prefill_body,
    text_only,
    token_list,
)
from connector.router.clients import busy
from connector.router.discovery import Name, keep_resolving, resolve
from connector.router.incoming import Incoming, most_in_flight
from connector.router.metrics import exposition
from connector.router.outgoing import BRIEF_S, Handler, come_back, error, sent, to_client
from connector.router.prefix import Prefix, Prefixes
from connector.router.routing import Engine, EngineFleet, Role, needs_prefill
from connector.router.upstream import (
    SERVER_ERROR,
    Answer,
    EngineFailedError,
    NoAnswerError,
    NoDescriptorsError,
    TooLateError,
    Upstream,
)
from kvstore import UsageError
from kvstore.spi import NumberRange, check_settings

log = logging.getLogger("kvstore.router")

ATTEMPTS_MAX = 3
"""Engines that one step of a request is tried on."""
PREFILL_SHARE = 0.5
"""Share of a request's time for all attempts to have it prefilled: decoding needs some, too."""
PROBE_EVERY_S, PROBE_TIMEOUT_S = 2.0, 2.0
REQUEST_ID = "X-Request-Id"
PASSED_HEADERS = ("Authorization", REQUEST_ID, "traceparent", "tracestate")
PASSED_BACK = ("Content-Type", "Content-Encoding", "Retry-After")
BRIEF = ("/health", "/engines", "/metrics")
"""Paths that are answered however much is in flight."""
OCTETS = "application/octet-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Holds what an operator may set of the router. Raises `UsageError` naming field and value."""

    timeout_s: Annotated[float, NumberRange(above=0)] = 600.0
    """Time for one request, all its attempts together."""
    save_wait_s: Annotated[float, NumberRange(0)] = 2.0
    """Time to wait for a prefill engine's blocks to be in the store."""
    tokenize: bool = True
    """Whether to ask an engine for the tokens of prompts that come as text: without them the store
    cannot be asked for their prefix."""

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(slots=True)
class _Job:
    """Holds one request on its way."""

    path: str
    body: dict[str, object] | None
    """The body; None for a GET."""
    headers: dict[str, str]
    deadline: float
    prefix: Prefix = field(default_factory=Prefix)
    found_tokens: int = 0
    prefilled_at: str = "none"

    @property
    def model(self) -> str:
        return str((self.body or {}).get("model", ""))

    @property
    def name(self) -> str:
        """What log lines call it: the id that the engine is given, and its trace's."""
        return named(self.headers[REQUEST_ID], self.headers)

    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())


class Router:
    """Answers clients: a request goes to a prefill engine where that pays, then to a decode one."""

    def __init__(
        self,
        fleet: EngineFleet,
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
        self._incoming = Incoming()
        self._upstream: Upstream | None = None

    def app(self) -> web.Application:
        app = web.Application(
            client_max_size=ROUTER_BODY_BYTES_MAX,
            middlewares=[self._bounded],
            handler_args={
                # aiohttp would unpack a body in the loop, before anybody has asked for it.
                "auto_decompress": False,
                "max_line_size": ROUTER_HEADERS_BYTES_MAX,
                "max_field_size": ROUTER_HEADERS_BYTES_MAX,
            },
        )
        app.add_routes(
            [
                web.post(COMPLETIONS, self._complete),
                web.post(CHAT, self._complete),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/engines", self._engines),
                web.post("/blocks", self._blocks),
                web.get("/metrics", self._metrics),
            ]
        )
        app.cleanup_ctx.append(self._life)
        app.on_shutdown.append(self._incoming.hang_up)
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
            healthy = await self._up.healthy(engine, PROBE_TIMEOUT_S)
            if healthy:
                engine.answered()
            elif healthy is not None:
                engine.missed_probe(time.monotonic())

        await asyncio.gather(*map(one, self._fleet.engines))

    async def _keep_probing(self) -> None:
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            await self._probe()

    # One request

    @web.middleware  # type: ignore[untyped-decorator]
    async def _bounded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request, unless too many are in flight, within its time."""
        brief = request.path in BRIEF
        with busy(request):
            if not brief and self._in_flight >= most_in_flight():
                refused = come_back(f"{most_in_flight()} requests are in flight")
                refused.force_close()
                return refused
            self._in_flight += not brief  # a body that is slow to come is memory, too
            try:
                return await sent(request, handler, BRIEF_S if brief else self._settings.timeout_s)
            finally:
                self._in_flight -= not brief

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        job = self._job(request)
        job.body = await self._incoming.body(request, job.left_s())
        job.prefix = await self._prefixes.find(job.model, await self._tokens(job))
        await self._prefill(job)
        return await self._decode(request, job)

    def _job(self, request: web.Request) -> _Job:
        headers = {
            name: request.headers[name] for name in PASSED_HEADERS if name in request.headers
        }
        headers.setdefault(REQUEST_ID, uuid.uuid4().hex)
        return _Job(request.path, None, headers, time.monotonic() + self._settings.timeout_s)

    async def _tokens(self, job: _Job) -> list[int] | None:
        """Return the prompt's tokens; None where they are not all that makes its KV, or not
        known."""
        body = job.body or {}
        prompt = body.get("prompt") if job.path == COMPLETIONS else body.get("messages")
        if not prompt or any(body.get(name) for name in NOT_TOLD):
            return None
        if job.path == COMPLETIONS and isinstance(prompt, list):
            return token_list(prompt)
        if not self._settings.tokenize or (job.path == CHAT and not text_only(prompt)):
            return None
        engine = self._fleet.choose(Role.DECODE, {}, time.monotonic())
        if engine is None:
            return None
        question = {name: body[name] for name in TOKENIZED[job.path] if name in body}
        deadline = min(time.monotonic() + ROUTER_TOKENIZE_TIMEOUT_S, job.deadline)
        try:
            answer = await self._up.ask(engine, "/tokenize", question, job.headers, deadline)
        except EngineFailedError as e:
            text = "request %s: the prompt's tokens are not known, its prefix is not looked up: %s"
            log.warning(text, job.name, e)
            return None
        return token_list((answer or {}).get("tokens"))

    async def _prefill(self, job: _Job) -> None:
        """Have what is missing of the prompt computed and saved, if anybody can."""
        prefix = job.prefix
        job.found_tokens = prefix.blocks * (prefix.block_tokens or 0)
        tokens = None if prefix.tokens is None else len(prefix.tokens)
        if prefix.index_away or not needs_prefill(tokens, prefix.block_tokens, prefix.blocks):
            return
        body = prefill_body(job.path, job.body or {})
        deadline = time.monotonic() + job.left_s() * PREFILL_SHARE
        tried: list[Engine] = []
        while len(tried) < ATTEMPTS_MAX:
            engine = self._fleet.take(Role.PREFILL, prefix.held, time.monotonic(), tried)
            if engine is None:
                return
            tried.append(engine)
            try:
                answer = await self._up.ask(engine, job.path, body, job.headers, deadline)
            except NoDescriptorsError:
                return
            except TooLateError as e:
                log.warning("request %s: prefill: %s", job.name, e)
                return
            except EngineFailedError as e:
                log.warning("request %s: prefill: %s", job.name, e)
                if isinstance(e, NoAnswerError):
                    engine.failed(time.monotonic())
                continue
            if answer is not None:
                job.prefilled_at = engine.url
                handed = decode_body(job.body or {}, answer)
                last = await self._prefixes.learn(job.model, answer, prefix.tokens)
                if last is not None:
                    wait_s = min(self._settings.save_wait_s, job.left_s() * PREFILL_SHARE)
                    held = await self._prefixes.wait_for(last, wait_s)
                    job.prefix = Prefix(prefix.tokens, held=held or {})
                    if held is not None and not held:
                        engine.unsaved(time.monotonic())
                        return  # nobody is to wait for its blocks once more
                job.body = handed
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
                    engine, job.path, job.body, job.headers, job.deadline
                ) as answer:
                    if answer.status >= SERVER_ERROR:
                        engine.failures += 1
                        reason = f"{engine.url} answered {answer.status}"
                        others = {e for e in self._fleet.engines if e.role is Role.DECODE}
                        if len(tried) < ATTEMPTS_MAX and others - set(tried):
                            log.warning("request %s: decode: %s", job.name, reason)
                            continue  # else the client is told as the engine says it
                    head = _head(job, engine, answer)
                    if not (job.body or {}).get("stream"):
                        # Whole, so that an engine that dies half way costs no request.
                        all_of_it = await answer.whole()
                        return web.Response(status=answer.status, headers=head, body=all_of_it)
                    part = await answer.part()
                    out = web.StreamResponse(status=answer.status, headers=head)
                    async with to_client(request, job.left_s()):
                        await out.prepare(request)
                    while part:
                        async with to_client(request, job.left_s()):
                            await out.write(part)
                        part = await answer.part()
                async with to_client(request, job.left_s()):
                    await out.write_eof()
                return out
            except EngineFailedError as e:
                reason = str(e)
                if isinstance(e, NoDescriptorsError) and out is None:
                    return come_back("no file descriptor is left")
                log.warning("request %s: decode: %s", job.name, e)
                if isinstance(e, NoAnswerError):
                    engine.failed(time.monotonic())
                if out is not None:
                    # The client has had a part: an end without the last chunk says that it broke.
                    if request.transport is not None:
                        request.transport.abort()
                    return out
        if time.monotonic() >= job.deadline:
            return error(504, f"no answer in {self._settings.timeout_s:g} s: {reason}", _head(job))
        return error(502, reason, _head(job))

    # About the router

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return await self._decode(request, self._job(request))

    async def _health(self, request: web.Request) -> web.Response:
        """Answer whether requests can be served: one decode engine is enough."""
        now = time.monotonic()
        up = any(e.up(now) for e in self._fleet.engines if e.role is Role.DECODE)
        return web.Response(status=200 if up else 503)

    async def _engines(self, request: web.Request) -> web.Response:
        now = time.monotonic()
        return web.json_response([asdict(e) | {"up": e.up(now)} for e in self._fleet.engines])

    async def _blocks(self, request: web.Request) -> web.Response:
        """Return which leading blocks of a prompt are where, for routers of others."""
        timeout_s = self._settings.timeout_s
        try:
            if request.content_type == OCTETS:
                raw = await self._incoming.octets(request, timeout_s)
                asked = BlocksAsked.of_octets(request.query, raw)
            else:
                asked = BlocksAsked.of(await self._incoming.body(request, timeout_s))
            return web.json_response(await where_blocks(self._prefixes, asked))
        except UsageError as e:
            return error(400, str(e))
        except UnknownModelError as e:
            return error(404, str(e))
        except TimeoutError:
            return come_back("the index does not answer")

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=exposition(self._fleet.engines, time.monotonic()))


def _head(job: _Job, engine: Engine | None = None, answer: Answer | None = None) -> dict[str, str]:
    """Return the headers of an answer: what it is, and which way it came."""
    head = {
        "X-KVStore-Found-Tokens": str(job.found_tokens),
        "X-KVStore-Prefill": job.prefilled_at,
        "X-KVStore-Decode": engine.url if engine is not None else "none",
        REQUEST_ID: job.headers[REQUEST_ID],
    }
    if answer is not None:
        head["Content-Type"] = "application/json"
        head |= {name: answer.headers[name] for name in PASSED_BACK if name in answer.headers}
    return head
