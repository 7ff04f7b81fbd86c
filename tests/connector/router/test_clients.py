"""Crowds at the router's port: silent, slow and many clients, few file descriptors. Real processes
where descriptors count, else the router's own loop."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from each_input import each

from kvstore.spi import Locator
from kvstore.testing.ports import held_ports

aiohttp = pytest.importorskip("aiohttp", reason="the router extra is not installed")
from aiohttp import web  # noqa: E402
from fake_engines import FakeEngine, talk  # noqa: E402
from routed import PATIENCE_S, routed  # noqa: E402

from connector.limits import ROUTER_HEADERS_BYTES_MAX  # noqa: E402
from connector.router import clients, incoming, outgoing, server  # noqa: E402
from connector.router.prefix import Prefixes  # noqa: E402
from connector.router.routing import Engine, EngineFleet, Role  # noqa: E402

FILES = 256
TIMEOUT_S = 60.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@contextmanager
def process(engine: str, head_timeout_s: float | None = None) -> Iterator[tuple[int, Path]]:
    """The port and the log of a router that may open `FILES` files."""
    code = "from connector.router import clients, run\n"
    if head_timeout_s is not None:
        code += f"clients.ROUTER_HEAD_TIMEOUT_S = {head_timeout_s}\n"
    with tempfile.TemporaryDirectory(prefix="kvr-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "log"
        words = [sys.executable, "-c", f"{code}raise SystemExit(run.main())"]
        words += ["--decode", engine, "--no-tokenize"]
        limited = f'ulimit -n {FILES}; exec "$@"'
        with held_ports(1) as (port,), log.open("wb") as out:
            running = subprocess.Popen(
                ["sh", "-c", limited, "sh", *words, "--port", str(port)],
                env={**os.environ, "KVSTORE_RUN_DIR": folder},
                stderr=out,
            )
            try:
                give_up_at = time.monotonic() + TIMEOUT_S
                while not answers(port):
                    assert running.poll() is None, log.read_text()
                    assert time.monotonic() < give_up_at, log.read_text()
                    time.sleep(0.1)
                yield port, log
                assert running.poll() is None, log.read_text()
            finally:
                running.kill()
                running.wait(TIMEOUT_S)


def answers(port: int, path: str = "/engines", timeout_s: float = 5.0) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout_s) as one:
            one.settimeout(timeout_s)
            one.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            return one.recv(12).startswith(b"HTTP/1.1 ")
    except OSError:
        return False


def ended(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_silent_clients_keep_nobody_out_and_are_hung_up_on() -> None:
    """300 of them at 256 descriptors: it answered nobody any more, and logged it without end."""
    with process("http://127.0.0.1:1", head_timeout_s=2.0) as (port, log):
        crowd = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(2 * FILES)]
        for one in crowd[::2]:
            with_head(one)
        assert answers(port)
        give_up_at = time.monotonic() + 20
        while not all(ended(one) for one in crowd):
            assert answers(port)
            assert time.monotonic() < give_up_at
            time.sleep(0.2)
        assert "Traceback" not in log.read_text()
        assert len(log.read_text().splitlines()) < 20


def with_head(one: socket.socket) -> None:
    with suppress(OSError):  # hung up on already
        one.sendall(HEAD)


@pytest.mark.usefixtures("many_files")
def test_more_streams_than_descriptors_are_told_to_come_back() -> None:
    """700 at 1,024 descriptors gave 80,000 lines of log and no answer."""

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        out = web.StreamResponse()
        await out.prepare(request)
        await out.write(b"data: 1\n\n")
        await go_on.wait()
        await out.write(b"data: 2\n\n")
        return out

    go_on = asyncio.Event()

    body = b'{"model": "m", "prompt": "x", "stream": true}'
    head = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)

    def ask(port: int) -> socket.socket:
        one = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        one.sendall(head + body)
        return one

    def answer(one: socket.socket) -> bytes:
        with one, one.makefile("rb") as said:
            return said.read()

    async def scenario() -> None:
        engine, started = FakeEngine(slow), ExitStack()
        await engine.server.start_server()
        port, log = await asyncio.to_thread(started.enter_context, process(engine.url))
        for _ in range(2):  # what was closed is there again
            go_on.clear()
            asked = [await asyncio.to_thread(ask, port) for _ in range(2 * FILES)]
            assert await asyncio.to_thread(answers, port, "/health", TIMEOUT_S)
            go_on.set()
            said = [await asyncio.to_thread(answer, one) for one in asked]
            good = [one for one in said if one.startswith(b"HTTP/1.1 200") and b"data: 2" in one]
            later = [one for one in said if one.startswith(b"HTTP/1.1 503")]
            assert len(good) + len(later) == len(said)
            assert len(good) >= FILES // 4
            assert all(b"Retry-After" in one for one in later)
        told = await asyncio.to_thread(urlopen, f"http://127.0.0.1:{port}/engines")
        assert [one["failures"] for one in json.load(told)] == [0]
        assert len(log.read_text().splitlines()) < 20
        await asyncio.to_thread(started.close)
        await engine.server.close()

    asyncio.run(scenario())


# --- in this process -----------------------------------------------------------------


@asynccontextmanager
async def served(locator: Locator, *engines: FakeEngine) -> AsyncIterator[tuple[str, int]]:
    """Where a router before these decode engines accepts its clients itself."""
    for engine in engines:
        await engine.server.start_server()
    fleet = EngineFleet([Engine(engine.url, Role.DECODE) for engine in engines])
    settings = server.RouterSettings(tokenize=False)
    runner = web.AppRunner(server.Router(fleet, Prefixes(locator), settings).app())
    await runner.setup()
    accepting = clients.Acceptor(runner.server)
    await accepting.listen("127.0.0.1", 0)
    try:
        yield accepting._listeners[0].getsockname()
    finally:
        accepting.close()
        await runner.cleanup()
        for engine in engines:
            await engine.server.close()


async def hangs_up(reader: asyncio.StreamReader) -> None:
    """Wait until the router has."""
    with suppress(ConnectionError):
        await asyncio.wait_for(reader.read(), PATIENCE_S)


@pytest.mark.parametrize("said", [b"", HEAD], ids=["nothing", "half a head"])
def test_a_head_has_its_time_as_a_whole(
    no_index: Locator, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(clients, "ROUTER_HEAD_TIMEOUT_S", 0.3)

    async def scenario() -> None:
        async with served(no_index) as at:
            reader, writer = await asyncio.open_connection(*at)
            writer.write(said)
            gone = asyncio.ensure_future(hangs_up(reader))
            while not gone.done():
                writer.write(b"x" if said else b"")
                await asyncio.sleep(0.05)
            writer.close()

    asyncio.run(scenario())


def test_a_connection_stays_for_a_while_after_an_answer(
    no_index: Locator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "ROUTER_HEAD_TIMEOUT_S", 600.0)
    monkeypatch.setattr(clients, "ROUTER_IDLE_TIMEOUT_S", 0.3)

    async def scenario() -> None:
        async with served(no_index) as at:
            reader, writer = await asyncio.open_connection(*at)
            for _ in range(2):
                writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
                assert head.startswith(b"HTTP/1.1 503")
            await hangs_up(reader)
            writer.close()

    asyncio.run(scenario())


def test_a_request_under_way_is_not_hung_up_on(
    no_index: Locator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for its time, nor for the crowd."""
    monkeypatch.setattr(clients, "ROUTER_HEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(clients, "ROUTER_IDLE_CLIENTS_MAX", 2)

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        started.set()
        await asyncio.sleep(1.0)
        return await talk(request, body)

    started = asyncio.Event()

    async def scenario() -> None:
        async with served(no_index, FakeEngine(slow)) as (host, port), aiohttp.ClientSession() as s:
            url = f"http://{host}:{port}/v1/completions"
            asking = asyncio.ensure_future(s.post(url, json={"model": "m", "prompt": "x"}))
            await asyncio.wait_for(started.wait(), PATIENCE_S)
            crowd = [await asyncio.open_connection(host, port) for _ in range(6)]
            for reader, _ in crowd[:4]:
                await hangs_up(reader)
            assert (await asyncio.wait_for(asking, PATIENCE_S)).status == 200
            for _, writer in crowd:
                writer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("size_bytes", "status"),
    [(9_000, 200), (ROUTER_HEADERS_BYTES_MAX - 2000, 200), (ROUTER_HEADERS_BYTES_MAX + 1, 400)],
)
def test_heads_are_as_large_as_engines_take_them(
    no_index: Locator, size_bytes: int, status: int
) -> None:
    """One of 9 KB was refused; vLLM's server takes 64."""

    async def scenario() -> None:
        engine = FakeEngine(talk)
        async with routed(no_index, [], [engine]) as router, aiohttp.ClientSession() as session:
            head = {"Cookie": "x" * size_bytes}
            body = {"model": "m", "prompt": [1]}
            url = f"{router.url}/v1/completions"
            async with session.post(url, json=body, headers=head) as answer:
                assert answer.status == status

    asyncio.run(scenario())


@each("path", ["/v1/completions", "/v1/chat/completions", "/blocks"])
@each("packed", ["gzip", "deflate", "br", "zstd", "gzip, identity"])
@each("kind", ["application/json", "application/octet-stream"])
def test_packed_bodies_are_refused_and_not_unpacked(
    no_index: Locator, path: str, packed: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """298 KiB of gzip were 300 MiB in the loop."""
    monkeypatch.setattr(zlib, "decompressobj", lambda *_, **__: pytest.fail("it unpacks"))
    bomb = zlib.compress(b"[" * (8 << 20), wbits=31)

    async def scenario() -> None:
        async with routed(no_index, [], []) as router:
            host, port = router.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\n"
            more = f"Content-Encoding: {packed}\r\nContent-Length: {len(bomb)}\r\n\r\n"
            writer.write((head + more).encode() + bomb)
            assert (await reader.readline()).startswith(b"HTTP/1.1 415")
            writer.close()

    asyncio.run(scenario())


def test_slow_bodies_take_half_of_what_may_be_in_flight(
    no_index: Locator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "ROUTER_IN_FLIGHT_MAX", 4)

    async def scenario() -> None:
        async with routed(no_index, [], [FakeEngine(talk)]) as router:
            host, port = router.url.removeprefix("http://").split(":")
            slow = [await asyncio.open_connection(host, int(port)) for _ in range(8)]
            for _, writer in slow:
                writer.write(HEAD + b"Content-Length: 9\r\n\r\n{")
                await asyncio.sleep(0.05)
            for reader, _ in slow[:6]:
                await hangs_up(reader)
            assert (await router.ask())[0].status == 200
            for _, writer in slow:
                writer.close()

    asyncio.run(scenario())


class TalksMuch(FakeEngine):
    async def _models(self, request: web.Request) -> web.Response:
        return large()


def large(_: object = None) -> web.Response:
    """More than lies in the buffers of a connection."""
    return web.Response(body=bytes(16 << 20))


@pytest.mark.parametrize("path", ["/v1/models", "/engines"])
def test_an_answer_that_is_not_read_has_its_time(
    no_index: Locator, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    given_up = asyncio.Event()

    class Noted(outgoing.ClientGoneError):
        def __init__(self) -> None:
            given_up.set()

    monkeypatch.setattr(outgoing, "ClientGoneError", Noted)
    monkeypatch.setattr(server, "BRIEF_S", 0.3)
    monkeypatch.setattr(outgoing, "BRIEF_S", 0.3)
    monkeypatch.setattr(server.web, "json_response", large)

    async def scenario() -> None:
        async with routed(no_index, [], [TalksMuch(talk)], timeout_s=1.0) as router:
            host, port = router.url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port), limit=1024)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            await asyncio.wait_for(given_up.wait(), PATIENCE_S)
            writer.close()

    asyncio.run(scenario())
