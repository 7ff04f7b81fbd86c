"""Suite `replicas` replays agents' sessions against data-parallel replicas of one host, in turn:
what each finds in its own pool, and what all find of each other's work in the store."""

from __future__ import annotations

import threading
import time
from argparse import ArgumentParser, Namespace
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.processes import NodeProcess, Worker, lone_node
from benchmarks.report import Row, machine
from benchmarks.serving.sessions import Request, Session, sessions
from kvstore import Client

SIZE_BYTES = 512 << 20
BLOCK_TOKENS = 32
BLOCK_BYTES = 4096
TOKENS_PER_S = 20_000.0
"""At which a model engine computes prompts, by waiting."""
OWN_BLOCKS = 256
"""Of each engine's own pool: 8,192 tokens, as the engines of suite `serve` have."""
SEED = 7


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--sessions", type=Path, help="trace, a session a line; default: made")
    parser.add_argument("--replicas", type=int, default=8, help="model engines (8)")
    parser.add_argument("--count", type=int, default=24, help="sessions (24)")
    parser.add_argument("--live", type=int, default=12, help="of these at a time (12)")


def run(options: Namespace) -> tuple[dict[str, Any], list[Row]]:
    made = sessions(options.sessions, count=options.count, requests_max=14, seed=SEED)
    tokens = sum(len(request.prompt) for session in made for request in session)
    every = tokens // BLOCK_TOKENS  # more than there are
    pools = (1, every, False), (options.replicas, OWN_BLOCKS, False)
    more = (options.replicas, every, False), (options.replicas, OWN_BLOCKS, True)
    with lone_node(SIZE_BYTES) as node:
        about = machine(node.url) | {"prompt_tokens": tokens}
        rows = [_row(made, options.live, node, *one) for one in pools + more]
    for row in rows:
        row["of_one_engine"] = round(row["hit"] / rows[0]["hit"], 4)
    return about, rows


def _row(
    made: Sequence[Session], live: int, node: NodeProcess, replicas: int, own: int, stored: bool
) -> Row:
    engines = [Worker(ModelEngine, node.url, node.run_dir, own, stored) for _ in range(replicas)]
    try:
        started = time.perf_counter()
        answers = Replay(made, engines).run(live)
        wall_s = time.perf_counter() - started
    finally:
        for engine in engines:
            engine.stop()
    prompts = sum(answer.tokens for answer in answers)
    return {
        "engines": replicas,
        "own_blocks": own,
        "store": "kvstore" if stored else "none",
        "hit": round(sum(answer.hit for answer in answers) / prompts, 4),
        "wrong": sum(answer.wrong for answer in answers),
        "wall_s": round(wall_s, 1),
    }


class Answer(NamedTuple):
    """Says of one prompt's tokens how many were not computed, and how many blocks were others'."""

    tokens: int
    hit: int
    wrong: int


class ModelEngine:
    """Computes prompts by waiting, keeps blocks in a pool of its own, and has the store or not."""

    def __init__(self, url: str, run_dir: Path, own_blocks: int, stored: bool) -> None:
        self._own: OrderedDict[bytes, None] = OrderedDict()
        self._own_blocks = own_blocks
        self._store = None
        if stored:
            self._store = Client(url, run_dir=run_dir, block_tokens=BLOCK_TOKENS)

    def prefill(self, prompt: Sequence[int]) -> Answer:
        names = _names(prompt)
        most = (len(prompt) - 1) // BLOCK_TOKENS  # the last token is computed
        own = next((i for i, name in enumerate(names) if name not in self._own), len(names))
        found, wrong = min(own, most), 0
        if self._store is not None:
            there = min(self._store.match_prefix(prompt).blocks, most)
            outs = [bytearray(BLOCK_BYTES) for _ in range(there)]
            there = self._store.get_blocks(prompt, outs)
            wrong = sum(out != _kv(n) for out, n in zip(outs[:there], names, strict=False))
            found = max(found, there)
        time.sleep((len(prompt) - found * BLOCK_TOKENS) / TOKENS_PER_S)
        if self._store is not None:
            self._store.put_blocks(prompt, [_kv(name) for name in names])
        for name in reversed(names):  # the head is the last to go
            self._own[name] = None
            self._own.move_to_end(name)
        while len(self._own) > self._own_blocks:
            self._own.popitem(last=False)
        return Answer(len(prompt), found * BLOCK_TOKENS, wrong)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


class Replay:
    """Sends sessions, each a closed loop in a thread of its own, to the engines in turn."""

    def __init__(self, made: Sequence[Session], engines: Sequence[Worker]) -> None:
        self._waiting = list(reversed(made))
        self._engines = [(engine, threading.Lock()) for engine in engines]
        self._turn = count()
        self._answers: list[Answer] = []

    def run(self, live: int) -> list[Answer]:
        threads = [threading.Thread(target=self._loop, daemon=True) for _ in range(live)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._answers

    def _loop(self) -> None:
        while self._waiting:
            try:
                session = self._waiting.pop()
            except IndexError:  # another thread has the last one
                return
            for request in session:
                self._answers.append(self._ask(request))

    def _ask(self, request: Request) -> Answer:
        time.sleep(request.think_s)
        engine, alone = self._engines[next(self._turn) % len(self._engines)]
        with alone:
            answer: Answer = engine.do("prefill", request.prompt)
        return answer


def _names(prompt: Sequence[int]) -> list[bytes]:
    """Name each full block by all tokens up to its end."""
    names, last = [], b""
    for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS):
        tokens = prompt[end - BLOCK_TOKENS : end]
        last = blake2b(last + repr(tokens).encode(), digest_size=16).digest()
        names.append(last)
    return names


def _kv(name: bytes) -> bytes:
    return name * (BLOCK_BYTES // len(name))
