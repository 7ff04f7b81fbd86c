"""Suite `crowd` measures puts beside clients that ask the same node for thousands of keys at a
time."""

from __future__ import annotations

import os
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.processes import NodeProcess, Worker, lone_node
from benchmarks.report import Row, machine, percentile
from kvstore import Client
from kvstore.client.nodes.control import ControlChannel
from kvstore.errors import PeerError
from kvstore.limits import BATCH_KEYS_MAX
from kvstore.nodedir import node_dirs
from kvstore.protocol.control import Op
from kvstore.types import KEY_BYTES

SIZE_BYTES = 256 << 20
PUT_BYTES = 4096
SMALL_BYTES = 500
BETWEEN_PUTS_S = 0.002
PATIENCE_S = 60.0
KINDS = ("none", "look up", "save what is there", "save new ones")


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--crowd", type=int, default=16, help="clients that ask for much (16)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of puts, a row (8)")


def run(options: Namespace) -> tuple[dict[str, Any], list[Row]]:
    with lone_node(SIZE_BYTES) as node:
        about = machine(node.url)
        there = os.urandom(BATCH_KEYS_MAX * KEY_BYTES)
        Asker(node.run_dir, there).save()
        workers = [Worker(Asker, node.run_dir, there) for _ in range(options.crowd)]
        rows = [_beside(kind, workers, node, options.seconds) for kind in KINDS]
        return about, rows


class Asker:
    """Sends a node requests of `BATCH_KEYS_MAX` keys, the next with the last one's answer."""

    def __init__(self, run_dir: Path, there: bytes) -> None:
        """`there`: keys that the node has."""
        (directory,) = node_dirs(run_dir)
        word = directory.announcement()
        assert word is not None
        start = (word.node_id, word.epoch)
        self._channel = ControlChannel(directory, start, PATIENCE_S, lambda: ((), ()))
        self._there = there
        self._ended = threading.Event()
        self._requests = 0
        self._thread: threading.Thread | None = None

    def save(self) -> None:
        """Have values under the keys that are to be there."""
        self._reserve(self._there)

    def begin(self, kind: str) -> None:
        ask: Callable[[], object] = {
            "none": lambda: self._ended.wait(PATIENCE_S),
            "look up": lambda: self._channel.request(Op.EXPLAIN, self._there),
            "save what is there": lambda: self._reserve(self._there),
            "save new ones": lambda: self._reserve(os.urandom(len(self._there))),
        }[kind]

        def run() -> None:
            while not self._ended.is_set():
                try:
                    ask()
                except PeerError:
                    time.sleep(0.1)
                self._requests += 1

        self._ended.clear()
        self._requests = 0
        self._thread = threading.Thread(target=run)
        self._thread.start()

    def end(self) -> int:
        """Return how many requests there were."""
        self._ended.set()
        assert self._thread is not None
        self._thread.join()
        return self._requests

    def _reserve(self, keys: bytes) -> None:
        values = [bytes(SMALL_BYTES)] * (len(keys) // KEY_BYTES)
        self._channel.request(Op.RESERVE, 1, keys, SMALL_BYTES, 0, 0, values, 0)


def _beside(kind: str, workers: list[Worker], node: NodeProcess, seconds: float) -> Row:
    _all(workers, "begin", kind)
    took: list[float] = []
    not_stored = 0
    with Client(node.url, run_dir=node.run_dir) as client:
        client.put(f"{kind}-first", b"v")
        numbers, until = count(), time.monotonic() + seconds
        while time.monotonic() < until:
            value = os.urandom(PUT_BYTES)
            started = time.perf_counter()
            not_stored += not client.put(f"{kind}-{next(numbers)}", value)
            took.append(time.perf_counter() - started)
            time.sleep(BETWEEN_PUTS_S)
    asked = sum(_all(workers, "end"))
    return {
        "crowd": kind,
        "puts": len(took),
        "not_stored": not_stored,
        **{f"p{part}_ms": round(percentile(took, part) * 1e3, 2) for part in (50, 90, 99)},
        "max_ms": round(max(took) * 1e3, 1),
        "their_requests": asked if kind != "none" else 0,
    }


def _all(workers: list[Worker], method: str, *args: Any) -> list[Any]:
    for worker in workers:
        worker.call(method, *args)
    return [worker.answer() for worker in workers]
