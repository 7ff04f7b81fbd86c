"""Engines and clients that say what nobody expects: it costs time, never a request of others."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from each_input import each
from hypothesis import given
from hypothesis import strategies as st

from kvstore import UsageError
from kvstore.spi import BlockSession, Locator

aiohttp = pytest.importorskip("aiohttp", reason="the router extra is not installed")
from aiohttp import web  # noqa: E402
from fake_engines import FakeEngine, saver, talk  # noqa: E402
from routed import FOUND, PATIENCE_S, routed  # noqa: E402

from connector import PromptKeys  # noqa: E402
from connector.limits import ROUTER_LISTS_MAX, ROUTER_VALUES_MAX  # noqa: E402
from connector.router import incoming  # noqa: E402
from connector.router.routing import Engine, Role  # noqa: E402

DEEP = b"[" * 100_000


async def deep(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(body=DEEP, content_type="application/json")


def test_a_prefill_engine_whose_answer_cannot_be_read_costs_no_request(no_index: Locator) -> None:
    async def scenario() -> None:
        broken = FakeEngine(deep)
        async with routed(no_index, [broken], [FakeEngine(talk)]) as router:
            answer, _ = await router.ask()
            assert (answer.status, broken.prompts) == (200, 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("told", [b'{"tokens": ["a"]}', b'{"tokens": [[1]]}', b"[]", DEEP])
def test_what_an_engine_says_are_tokens_and_are_none_costs_no_request(
    locator: Locator, store: BlockSession, told: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tokenize(self: FakeEngine, request: web.Request) -> web.Response:
        return web.Response(body=told.replace(b'"a"', b'"a", ' * 40 + b'"a"'))

    monkeypatch.setattr(FakeEngine, "_tokenize", tokenize)

    async def scenario() -> None:
        async with routed(locator, [FakeEngine(saver(store))], [FakeEngine(talk)]) as router:
            for _ in range(2):  # the second knows how the model's blocks are named
                answer, _ = await router.ask(prompt="some text")
                assert (answer.status, answer.headers[FOUND]) == (200, "0")

    asyncio.run(scenario())


@pytest.mark.parametrize("last", ["ab", "no hexadecimal", 7, [1], "00" * 33])
def test_a_key_that_is_none_costs_no_request(
    locator: Locator, store: BlockSession, last: object
) -> None:
    computes = saver(store)

    async def lies(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = await computes(request, body)
        assert isinstance(answer, web.Response)
        told = json.loads(answer.text or "")
        told["kv_transfer_params"][PromptKeys.ASKED]["last_key"] = last
        return web.json_response(told)

    async def scenario() -> None:
        async with routed(locator, [FakeEngine(lies)], [FakeEngine(talk)]) as router:
            assert (await router.ask())[0].status == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/v1/completions", "/blocks"])
@pytest.mark.parametrize(
    ("request_s", "body_s"), [(0.2, incoming.ROUTER_BODY_TIMEOUT_S), (600.0, 0.2)]
)
def test_a_body_is_waited_for_as_long_as_a_request_at_most_and_not_for_that_long(
    no_index: Locator, path: str, request_s: float, body_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else 4096 slow senders would keep everybody out for as long as the longest answer takes."""
    monkeypatch.setattr(incoming, "ROUTER_BODY_TIMEOUT_S", body_s)

    async def scenario() -> None:
        async with routed(no_index, [], [FakeEngine(talk)], timeout_s=request_s) as router:
            host, port = router.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 9000\r\n\r\n{{"
            writer.write(head.encode())
            status = await asyncio.wait_for(reader.readline(), PATIENCE_S)
            assert status.split()[1] == b"408"
            writer.close()

    asyncio.run(scenario())


@each("path", ["/v1/completions", "/blocks"])
@each("element", ["[]", "{}", '{"a":[1]}', "1"])
def test_a_body_of_very_many_values_is_refused_before_they_are_made(
    no_index: Locator, path: str, element: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 MiB of empty lists are 6 million objects, and of digits 8 million: the loop makes them in
    one go."""
    made: list[int] = []
    loads = incoming.json.loads
    monkeypatch.setattr(
        incoming.json, "loads", lambda raw, **how: made.append(len(raw)) or loads(raw, **how)
    )
    count = ROUTER_VALUES_MAX + 1 if element == "1" else ROUTER_LISTS_MAX
    raw = f'{{"model": "m", "tokens": [{",".join([element] * count)}]}}'

    async def scenario() -> None:
        async with routed(no_index, [], []) as router, aiohttp.ClientSession() as session:
            headers = {"Content-Type": "application/json"}
            async with session.post(router.url + path, data=raw, headers=headers) as answer:
                assert answer.status == 413
            assert len(raw) not in made

    asyncio.run(scenario())


@each("marks", [",", "[", "{", "[],", '\\",[', "\\\\,", "∀,"])
def test_what_looks_like_values_in_a_text_is_none(no_index: Locator, marks: str) -> None:
    """A prompt of a million commas was refused as a million values."""
    many = (ROUTER_VALUES_MAX + 10) // marks.count(",") if "," in marks else ROUTER_LISTS_MAX + 10
    raw = f'{{"model": "m", "prompt": "{marks * many}"}}'.encode()

    async def scenario() -> None:
        async with (
            routed(no_index, [], []) as router,
            aiohttp.ClientSession() as session,
            session.post(f"{router.url}/v1/completions", data=raw) as answer,
        ):
            assert answer.status == 502, "nobody is there who could answer"

    asyncio.run(scenario())


@each(
    "raw",
    [
        b'{"a": "x", "tokens": [' + b"[]," * (1 << 18) + b"[]]}",
        b'{"a": "\\\\", "tokens": [' + b"[]," * (1 << 18) + b"[]]}",
        b'{"a": "\\"", "tokens": [' + b"[]," * (1 << 18) + b"[]]}",
        ('{"a": "\u2200", "tokens": [' + "[]," * (1 << 18) + "[]]}").encode("utf-16-le"),
        ('{"a": "\u2200", "tokens": [' + "[]," * (1 << 18) + "[]]}").encode("utf-16"),
        b'{"a": [' + b'"",' * (1 << 20) + b'"",""]}',
        b'{"a": [' + b'{"":""},' * (1 << 18) + b"{}]}",
        b'{"a": "' + b"," * (1 << 20) + b'", "b": {' + b'"":"",' * (1 << 19) + b'"":""}}',
    ],
)
def test_a_text_hides_no_values(raw: bytes) -> None:
    with pytest.raises(incoming.BodyRefusedError, match="more than") as refused:
        incoming._json_object(raw)
    assert refused.value.status == 413


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig"])
def test_values_are_counted_in_every_encoding_of_json(encoding: str) -> None:
    """Chinese characters whose bytes are a comma's and a bracket's were refused as values."""
    text = "\u2c2c\u5b5b\u7b7b" * (ROUTER_VALUES_MAX // 2)
    raw = json.dumps({"model": "m", "prompt": text}, ensure_ascii=False).encode(encoding)
    assert incoming._json_object(raw) == {"model": "m", "prompt": text}


@given(
    st.recursive(
        st.text('",[]{}\\∀\n') | st.integers(0, 9),
        lambda some: st.lists(some) | st.dictionaries(st.text('",[{\\'), some),
    )
)
def test_values_are_counted_as_a_parser_finds_them(value: Any) -> None:
    def lists(one: Any) -> int:
        inside = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        return isinstance(one, dict | list) + sum(map(lists, inside))

    too_much = incoming._too_much
    for ascii_only in (True, False):
        raw = json.dumps(value, ensure_ascii=ascii_only).encode()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(incoming, "ROUTER_LISTS_MAX", lists(value))
            assert "lists" not in (too_much(raw) or "")
            patched.setattr(incoming, "ROUTER_LISTS_MAX", lists(value) - 1)
            assert not lists(value) or "lists" in (too_much(raw) or "")


@pytest.mark.parametrize("path", ["/v1/completions", "/blocks"])
def test_whoever_asks_for_blocks_is_in_flight_as_others_are(
    no_index: Locator, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "ROUTER_IN_FLIGHT_MAX", 0)

    async def scenario() -> None:
        async with routed(no_index, [], [FakeEngine(talk)]) as router:
            answer, _ = await router.ask(path)
            assert (answer.status, "Retry-After" in answer.headers) == (503, True)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "text", ["http://", "http://[::1", "http://a:99999", "http://a b:1", "a:1"]
)
def test_an_engine_that_cannot_be_anywhere_is_refused_at_start(text: str) -> None:
    with pytest.raises(UsageError, match="must be http"):
        Engine.parse(Role.DECODE, text)
