"""The measurement's verdict: it must see an answer that differs, one that is missing, and a
prompt that was computed although it was in the store; and a run without fault is none of these."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

aiohttp = pytest.importorskip("aiohttp", reason="the router extra is not installed")
from aiohttp import web  # noqa: E402
from aiohttp.test_utils import TestServer  # noqa: E402

from connector.router import measure  # noqa: E402

Reply = Callable[[int], tuple[list[int], int]]
"""From the number of the request, from 0, to (tokens, prompt tokens loaded)."""
RIGHT = list(range(measure.NEW_TOKENS))
PROMPTS, ROUNDS = 2, 2
WHOLE = measure.PREFIX_TOKENS + measure.TAIL_TOKENS - 1
"""All tokens but the last one: its output is wanted, so it is computed."""
COUNTER = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="demo",source="%s"} %s\n'


def server(reply: Reply, cached_tokens: int = 0) -> TestServer:
    """A router and its one decode engine in one. `cached_tokens` are what answers say of the
    prefill engine's cache, as vLLM's do after a hand-over."""
    asked = 0
    loaded_by_now = 700  # by somebody else, before

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal asked, loaded_by_now
        tokens, loaded = reply(asked)
        asked += 1
        loaded_by_now += loaded
        usage = {"prompt_tokens_details": {"cached_tokens": cached_tokens}}
        chunks = [{"choices": [{"token_ids": [token]}]} for token in tokens]
        chunks.append({"choices": [], "usage": usage})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        here = {"X-KVStore-Decode": str(request.url.origin())}
        return web.Response(text="".join([*lines, "data: [DONE]\n\n"]), headers=here)

    async def engines(request: web.Request) -> web.Response:
        gone = {"url": "http://127.0.0.1:1", "role": "decode"}
        prefill = {"url": "http://127.0.0.1:2", "role": "prefill"}
        return web.json_response([gone, prefill, {**gone, "url": str(request.url.origin())}])

    async def metrics(request: web.Request) -> web.Response:
        text = "# TYPE vllm:prompt_tokens_by_source counter\n" + COUNTER % ("local_compute", "9.0")
        return web.Response(text=text + COUNTER % ("external_kv_transfer", float(loaded_by_now)))

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete), web.get("/health", health)])
    app.add_routes([web.get("/engines", engines), web.get("/metrics", metrics)])
    return TestServer(app)


def loads_all(number: int) -> tuple[list[int], int]:
    return RIGHT, WHOLE


def loads_in_round_two(number: int) -> tuple[list[int], int]:
    return RIGHT, 0 if number < PROMPTS else measure.PREFIX_TOKENS


def loads_one_but_in_part(number: int) -> tuple[list[int], int]:
    return RIGHT, WHOLE if number < 3 else measure.PREFIX_TOKENS - 1


def never_loads(number: int) -> tuple[list[int], int]:
    return RIGHT, 0


def one_differs(number: int) -> tuple[list[int], int]:
    tokens, loaded = loads_in_round_two(number)
    return ([*tokens[:-1], 999] if number == 1 else tokens), loaded


def one_ends_early(number: int) -> tuple[list[int], int]:
    tokens, loaded = loads_in_round_two(number)
    return (tokens[:-1] if number == 3 else tokens), loaded


def run(router: TestServer) -> int:
    """The exit status of a measurement of this router, beside a single engine that is right."""

    async def scenario() -> int:
        single = server(never_loads)
        for each in (router, single):
            await each.start_server()
        try:
            words = ["--router", str(router.make_url("")), "--single", str(single.make_url(""))]
            words += ["--prompts", str(PROMPTS), "--rounds", str(ROUNDS)]
            return await measure.run(measure.parser().parse_args(words))
        finally:
            for each in (router, single):
                await each.close()

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("router", "answered", "identical", "status"),
    [
        (loads_all, 4, 4, 0),
        (loads_in_round_two, 4, 4, 0),
        (loads_one_but_in_part, 4, 4, 1),
        (never_loads, 4, 4, 1),
        (one_differs, 4, 3, 1),
        (one_ends_early, 3, 3, 1),
    ],
)
def test_only_a_run_without_fault_passes(
    router: Reply, answered: int, identical: int, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server(router)) == status
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["answered"], summary["identical"]) == (answered, identical)
    assert summary["requests"] == PROMPTS * ROUNDS


@pytest.mark.parametrize("of_prefill_engines", [0, measure.PREFIX_TOKENS])
def test_what_was_loaded_is_what_the_decode_engine_loaded(
    of_prefill_engines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM's `cached_tokens` are the prefill engine's after a hand-over."""
    assert run(server(loads_all, of_prefill_engines)) == 0
    assert run(server(never_loads, of_prefill_engines)) == 1
    good, bad = [json.loads(s) for s in capsys.readouterr().out.splitlines() if s[:1] == "{"]
    assert good["tokens_loaded"] == [good["tokens_possible"]] * ROUNDS == [PROMPTS * WHOLE] * ROUNDS
    assert bad["tokens_loaded"] == [0] * ROUNDS


@pytest.mark.parametrize("option", ["--prompts", "--rounds"])
def test_nothing_measured_is_no_success(option: str) -> None:
    with pytest.raises(SystemExit):
        measure.parser().parse_args(["--router", "r", "--single", "s", option, "0"])
