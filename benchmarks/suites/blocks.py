"""Suite `blocks` measures `POST /blocks` of kvstore-router, next to a server that only reads."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from aiohttp import web

from benchmarks.local_workers import PATIENT
from benchmarks.processes import NodeProcess, Worker, lone_node
from benchmarks.report import Row, machine, micros, percentile
from connector import PromptKeys
from connector.layout.block_hashes import ALGORITHM
from kvstore import Namespace as KeyNamespace
from kvstore.spi import BlockSession, Reservation, in_batches

BLOCK_TOKENS = 16
BLOCK_BYTES = 8192
AT_ONCE = 256
"""Blocks of one reservation."""
START_TIMEOUT_S, ANSWER_TIMEOUT_S = 60.0, 10.0
READ_BYTES = 1 << 16
END_OF_HEAD = b"\r\n\r\n"
KEYS = PromptKeys(BLOCK_TOKENS, KeyNamespace({"model": "m", "hash_algorithm": ALGORITHM}))
OCTETS = "application/octet-stream"


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--blocks", type=int, default=2000, help="in the store, and asked for")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--requests", type=int, default=50, help="of one kind, in a round")


class Question(NamedTuple):
    """What one way of asking sends."""

    op: str
    path: str
    kind: str
    body: bytes


def questions(tokens: list[int]) -> list[Question]:
    keys = KEYS.of(tokens)
    by_keys = json.dumps({"keys": [key.hex() for key in keys]}).encode()
    by_tokens = json.dumps({"model": "m", "tokens": tokens, "block_size": BLOCK_TOKENS}).encode()
    plain = f"/blocks?model=m&block_size={BLOCK_TOKENS}"
    return [
        Question("keys, bytes", "/blocks", OCTETS, b"".join(keys)),
        Question("keys, JSON", "/blocks", "application/json", by_keys),
        Question("tokens, bytes", plain, OCTETS, array("I", tokens).tobytes()),
        Question("tokens, JSON", "/blocks", "application/json", by_tokens),
    ]


class Beside:
    """Runs a server that reads a body and answers nothing: what HTTP costs here; and the engine
    that the router learns keys from."""

    def __init__(self) -> None:
        self._url = ""
        started = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._run(started)), daemon=True).start()
        if not started.wait(START_TIMEOUT_S):
            raise TimeoutError("the server that answers nothing has not started")

    async def _run(self, started: threading.Event) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(
            [
                web.post("/blocks", self._nothing),
                web.post("/v1/completions", self._complete),
                web.get("/health", self._nothing),
            ]
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        (host, port) = runner.addresses[0][:2]
        self._url = f"http://{host}:{port}"
        started.set()
        await asyncio.Event().wait()

    async def _nothing(self, request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({})

    async def _complete(self, request: web.Request) -> web.Response:
        return web.json_response({"kv_transfer_params": {PromptKeys.ASKED: KEYS.answer([])}})

    def where(self) -> tuple[str, int]:
        """Its URL, and its process."""
        return self._url, os.getpid()

    def close(self) -> None:
        """The thread ends with the process."""


class LateError(RuntimeError):
    """The index has not answered in time: this machine is busy."""


class Caller:
    """Asks one server over one connection that it keeps."""

    def __init__(self, url: str, process: int) -> None:
        where = urlsplit(url)
        self._host = where.netloc
        self._socket = socket.create_connection((where.hostname, where.port), ANSWER_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._process = process

    def request(self, asked: Question) -> bytes:
        head = f"POST {asked.path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: {asked.kind}\r\n"
        return f"{head}Content-Length: {len(asked.body)}\r\n\r\n".encode() + asked.body

    def ask(self, request: bytes) -> bytes:
        """Return the body of the answer. Raises `LateError` when the index has not answered in
        time, `RuntimeError` for any other status than 200."""
        self._socket.sendall(request)
        answer = b""
        while END_OF_HEAD not in answer:
            answer += self._some()
        head, _, body = answer.partition(END_OF_HEAD)
        status, *fields = head.split(b"\r\n")
        (size,) = (int(f[15:]) for f in fields if f.lower().startswith(b"content-length:"))
        while len(body) < size:
            body += self._some()
        if b" 200 " not in status:
            raise (LateError if b" 503 " in status else RuntimeError)(f"{status!r} {body[:300]!r}")
        return body

    def _some(self) -> bytes:
        some = self._socket.recv(READ_BYTES)
        if not some:
            raise RuntimeError("the server hung up")
        return some

    def cpu_s(self) -> float:
        """CPU time of the server's process, all its threads, to the nanosecond."""
        threads = Path(f"/proc/{self._process}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9

    def close(self) -> None:
        self._socket.close()


class Times:
    """What one server took for one way of asking."""

    def __init__(self) -> None:
        self.took_s: list[float] = []
        self.late = 0
        self.cpu_s = 0.0

    def take(self, caller: Caller, request: bytes, count: int) -> None:
        before_s = caller.cpu_s()
        for _ in range(count):
            started = time.perf_counter()
            try:
                caller.ask(request)
            except LateError:
                self.late += 1
                continue
            self.took_s.append(time.perf_counter() - started)
        self.cpu_s += caller.cpu_s() - before_s

    def columns(self, prefix: str) -> Row:
        return {
            f"{prefix}us_p50": micros(percentile(self.took_s, 50)),
            f"{prefix}us_p99": micros(percentile(self.took_s, 99)),
            f"{prefix}cpu_us": micros(self.cpu_s / (len(self.took_s) + self.late)),
        }


def run(options: Namespace) -> tuple[dict[str, Any], list[Row]]:
    tokens = [7919 * i % 128_000 for i in range(options.blocks * BLOCK_TOKENS)]
    with lone_node(options.blocks * BLOCK_BYTES * 3 + (64 << 20), events=True) as node:
        about = machine(node.url)
        _save(node, tokens)
        beside = Worker(Beside)
        try:
            rows = []
            for source in ("events", "index"):
                with _router(node, beside.do("where")[0], source == "events") as (url, process):
                    callers = Caller(url, process), Caller(*beside.do("where"))
                    rows += _measured(source, callers, tokens, options)
        finally:
            beside.stop()
    return about, rows


def _save(node: NodeProcess, tokens: list[int]) -> None:
    session = BlockSession(node.url, run_dir=node.run_dir, limits=PATIENT)
    with closing(session):
        for keys in in_batches(KEYS.of(tokens), AT_ONCE):
            slots = session.reserve(keys, BLOCK_BYTES, KEYS.namespace.id)
            session.commit([slot for slot in slots if isinstance(slot, Reservation)])


@contextmanager
def _router(node: NodeProcess, engine: str, listens: bool) -> Iterator[tuple[str, int]]:
    """A router that knows the model's keys; its URL and process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "connector.router", "--port", str(port), "--url", node.url]
    command += ["--prefill", engine, "--decode", engine, "--save-wait-s", "0"]
    command += ["--events", node.events] if listens else []
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        _wait(lambda: _teach(url))
        yield url, process.pid
    finally:
        process.terminate()
        process.wait()


def _teach(url: str) -> None:
    """Have the router learn keys from the engine, by a prompt."""
    prompt = json.dumps({"model": "m", "prompt": list(range(10 * BLOCK_TOKENS))}).encode()
    caller = Caller(url, os.getpid())
    try:
        asked = Question("", "/v1/completions", "application/json", prompt)
        caller.ask(caller.request(asked))
    finally:
        caller.close()


def _wait(done: Callable[[], None]) -> None:
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            return done()
        except (OSError, RuntimeError):
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.05)


def _measured(
    source: str, callers: tuple[Caller, Caller], tokens: list[int], options: Namespace
) -> list[Row]:
    asked = questions(tokens)
    router, beside = callers
    for question in asked:
        _wait(partial(_is_right, router, question, options.blocks))
    times = {question.op: (Times(), Times()) for question in asked}
    for turn in range(options.rounds):
        for question in asked[turn % len(asked) :] + asked[: turn % len(asked)]:
            pairs = list(zip(callers, times[question.op], strict=True))
            for caller, taken in pairs if turn % 2 else pairs[::-1]:
                taken.take(caller, caller.request(question), options.requests)
    router.close()
    beside.close()
    rows: list[Row] = []
    for question in asked:
        ours, bare = times[question.op]
        row: Row = {"op": question.op, "source": source, "blocks": options.blocks}
        row |= {"body_kib": round(len(question.body) / 1024, 1), "late": ours.late}
        rows.append(row | ours.columns("") | bare.columns("bare_"))
    return rows


def _is_right(router: Caller, question: Question, blocks: int) -> None:
    answer = json.loads(router.ask(router.request(question)))
    if answer["total_hits"] != blocks:
        raise RuntimeError(f"{question.op}: {answer['total_hits']} of {blocks} blocks")
