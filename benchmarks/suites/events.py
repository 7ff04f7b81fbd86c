"""Suite `events` measures how well a router knows, by nodes' events, which blocks are where."""

from __future__ import annotations

import random
import threading
import time
from argparse import ArgumentParser, Namespace
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.local_workers import PATIENT
from benchmarks.processes import Worker, lone_node
from benchmarks.report import Row, machine, percentile
from kvstore import Client
from kvstore import Namespace as KeyNamespace
from kvstore.spi import Residency

TIMEOUT_S = 120.0
POLL_S = 0.0005
ASKED_AT_ONCE = 200
ASK_EVERY_S = 0.0005
NAMES = KeyNamespace.named("default")


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--block-bytes", type=int, default=256 << 10)
    parser.add_argument("--node-bytes", type=int, default=1 << 30)
    parser.add_argument("--pressure-s", type=float, default=10.0)
    parser.add_argument("--repetitions", type=int, default=5)


def run(options: Namespace) -> tuple[dict[str, Any], list[Row]]:
    import zmq  # noqa: F401  # what it takes is no part of what is measured

    rows: list[Row] = []
    size_bytes = max(options.blocks * 4096 * 3 // 2, 256 << 20)
    with lone_node(size_bytes, events=True) as node:
        about = machine(node.url)
        names = [f"block-{i}" for i in range(options.blocks)]
        with Client(node.url, run_dir=node.run_dir, limits=PATIENT) as client:
            for start in range(0, len(names), 1000):
                assert all(client.put_many((n, b"x" * 4096) for n in names[start : start + 1000]))
        keys = {NAMES.value_key(name) for name in names}
        rows += [_restarted(node.events, keys) for _ in range(options.repetitions)]
    with lone_node(options.node_bytes, events=True) as node:
        writer = Worker(Writer, node.run_dir, node.url, options.block_bytes)
        try:
            rows += [
                _pressed(node.events, writer, node.run_dir, node.url, options.pressure_s)
                for _ in range(options.repetitions)
            ]
        finally:
            writer.stop()
    return about, rows


def _restarted(events: str, keys: set[bytes]) -> Row:
    """Time from the making of a listener until it knows exactly what is there."""
    started = time.perf_counter()
    with Residency([events]) as residency:
        while residency.blocks() != len(keys):
            time.sleep(POLL_S)
            if time.perf_counter() > started + TIMEOUT_S:
                raise TimeoutError(f"{residency.blocks()} of {len(keys)} blocks are known")
        known_s = time.perf_counter() - started
        assert len(residency.leading(list(keys))) == len(keys)
    return {"op": "restarted", "blocks": len(keys), "exact_ms": round(known_s * 1000, 1)}


class Writer:
    """Saves blocks that nobody has, as fast as it can, so that others are evicted."""

    def __init__(self, run_dir: Path, url: str, block_bytes: int) -> None:
        self._client = Client(url, run_dir=run_dir, limits=PATIENT)
        self._value = b"w" * block_bytes
        self._numbers = count()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._written = 0

    def fill(self, size_bytes: int) -> int:
        """Write so much; the number of blocks written ever."""
        for _ in range(size_bytes // len(self._value)):
            self._write()
        return self._written

    def begin(self) -> None:
        self._ending.clear()
        self._thread = threading.Thread(target=self._go_on)
        self._thread.start()

    def end(self) -> int:
        """The number of blocks written ever."""
        self._ending.set()
        assert self._thread is not None
        self._thread.join()
        return self._written

    def close(self) -> None:
        self._client.close()

    def _go_on(self) -> None:
        while not self._ending.is_set():
            self._write()

    def _write(self) -> None:
        self._client.put(f"pressed-{next(self._numbers)}", self._value)
        self._written += 1


def _pressed(events: str, writer: Worker, run_dir: Path, url: str, for_s: float) -> Row:
    """How many of the blocks that a listener says are there are not, while others push them out:
    each that it knows is as likely to be asked for."""
    with (
        Residency([events]) as residency,
        Client(url, run_dir=run_dir, limits=PATIENT) as client,
    ):
        while not residency.in_sync:
            time.sleep(POLL_S)
        before = writer.do("fill", 3 << 29)
        writer.do("begin")
        rng = random.Random(1)
        said = false = 0
        took: list[float] = []
        until = time.perf_counter() + for_s
        while time.perf_counter() < until:
            known = residency.keys()
            for key in rng.choices(known, k=ASKED_AT_ONCE):
                asked = time.perf_counter()
                there = len(residency.leading([key]))
                took.append(time.perf_counter() - asked)
                if there:
                    said += 1
                    (found,) = client.session.lookup([key])
                    false += found is None or client.session.view(found) is None
                time.sleep(ASK_EVERY_S)  # who asks without a pause keeps its own listener waiting
        written = writer.do("end") - before
        counts = residency.counts()
    return {
        "op": "pressed",
        "evicted_per_s": round(written / for_s),
        "said_there": said,
        "false": false,
        "false_percent": round(100 * false / max(said, 1), 4),
        "gaps": counts["gaps"],
        "leading_us_p50": round(percentile(took, 50) * 1e6, 1),
        "leading_us_p99": round(percentile(took, 99) * 1e6, 1),
    }
