"""The measurement's verdict: it must see an answer that differs, one that is missing, and a
prompt that was computed although it was in the store."""

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


def server(reply: Reply) -> TestServer:
    asked = 0

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        tokens, loaded = reply(asked)
        asked += 1
        usage = {"prompt_tokens_details": {"cached_tokens": loaded}}
        chunks = [{"choices": [{"token_ids": [token]}]} for token in tokens]
        chunks.append({"choices": [], "usage": usage})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        return web.Response(text="".join([*lines, "data: [DONE]\n\n"]))

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete), web.get("/health", health)])
    return TestServer(app)


def loads_in_round_two(number: int) -> tuple[list[int], int]:
    return RIGHT, 0 if number < PROMPTS else measure.PREFIX_TOKENS


def never_loads(number: int) -> tuple[list[int], int]:
    return RIGHT, 0


def one_differs(number: int) -> tuple[list[int], int]:
    tokens, loaded = loads_in_round_two(number)
    return ([*tokens[:-1], 999] if number == 1 else tokens), loaded


def one_ends_early(number: int) -> tuple[list[int], int]:
    tokens, loaded = loads_in_round_two(number)
    return (tokens[:-1] if number == 3 else tokens), loaded


@pytest.mark.parametrize(
    ("router", "answered", "identical", "status"),
    [
        (loads_in_round_two, 4, 4, 0),
        (never_loads, 4, 4, 1),
        (one_differs, 4, 3, 1),
        (one_ends_early, 3, 3, 1),
    ],
)
def test_only_a_run_without_fault_passes(
    router: Reply, answered: int, identical: int, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> int:
        one, other = server(router), server(never_loads)
        for each in (one, other):
            await each.start_server()
        try:
            words = ["--router", str(one.make_url("")), "--single", str(other.make_url(""))]
            words += ["--prompts", str(PROMPTS), "--rounds", str(ROUNDS)]
            return await measure.run(measure.parser().parse_args(words))
        finally:
            for each in (one, other):
                await each.close()

    assert asyncio.run(scenario()) == status
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["answered"], summary["identical"]) == (answered, identical)
    assert summary["requests"] == PROMPTS * ROUNDS


@pytest.mark.parametrize("option", ["--prompts", "--rounds"])
def test_nothing_measured_is_no_success(option: str) -> None:
    with pytest.raises(SystemExit):
        measure.parser().parse_args(["--router", "r", "--single", "s", option, "0"])
