"""Suite `deadlines` measures what calls cost while the node or Redis is stopped (SIGSTOP)."""

from __future__ import annotations

import os
import signal
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import redis

from benchmarks.processes import NodeProcess, lone_node
from benchmarks.report import Row, machine, percentile
from kvstore import Client
from kvstore.limits import Limits

SIZE_BYTES = 256 << 20
BETWEEN_CALLS_S = 0.001
READY_TIMEOUT_S = 20.0
AT_ONCE_S = 0.001
"""What a call may take while its dependency is known to be away."""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=8.0, help="of calls, a row (8)")


def run(options: Namespace) -> tuple[dict[str, Any], list[Row]]:
    limits = Limits()
    with lone_node(SIZE_BYTES) as node:
        about = machine(node.url)
        redis_pid = int(redis.Redis.from_url(node.url).info("server")["process_id"])
        pids = {"redis": redis_pid, "node": node.process.pid}
        deadlines_s = {
            ("redis", "get"): limits.redis_timeout_s,
            ("redis", "put"): limits.publish_timeout_s,  # the node's, for the first alone
            ("node", "get"): 0.0,  # reading asks no node
            ("node", "put"): limits.request_timeout_s,
        }
        rows = [
            {"stopped": stopped, "op": op, "deadline_ms": round(deadline_s * 1e3)}
            | _stop(pids[stopped], op, f"{stopped}-{op}", node, options.seconds)
            for (stopped, op), deadline_s in deadlines_s.items()
        ]
        return about, rows


def _stop(pid: int, op: str, name: str, node: NodeProcess, seconds: float) -> Row:
    """Make calls one after the other, each with a key that nobody has used, while `pid` stands
    still."""
    numbers = count()
    with Client(node.url, run_dir=node.run_dir) as client:

        def call() -> None:
            key = f"{name}-{next(numbers)}"
            if op == "put":
                client.put(key, b"value")
            else:
                client.get(key)

        give_up_at = time.monotonic() + READY_TIMEOUT_S
        while not client.put(f"{name}-{next(numbers)}", b"value"):
            if time.monotonic() > give_up_at:
                raise TimeoutError("the node did not answer again after SIGCONT: see its log")
            time.sleep(0.1)
        for _ in range(100):
            call()
        usual_s = _timed(call)
        before = _counted(client)
        with _stopped(pid):
            first_s = _timed(call)
            took: list[float] = []
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                took.append(_timed(call))
                time.sleep(BETWEEN_CALLS_S)
            counted = _counted(client)
    return {
        "usual_ms": _ms(usual_s),
        "first_ms": _ms(first_s),
        "calls": len(took),
        "p50_ms": _ms(percentile(took, 50)),
        "p99_ms": _ms(percentile(took, 99)),
        "max_ms": _ms(max(took)),
        "over_1_ms": sum(t > AT_ONCE_S for t in took),
        "counted": " ".join(
            f"{name} +{n - before.get(name, 0)}"
            for name, n in counted.items()
            if n > before.get(name, 0)
        )
        or "-",
    }


def _counted(client: Client) -> dict[str, int]:
    """Return what `Client.stats` says of this client and why it missed."""
    told = client.stats()
    counts = {name: int(n) for name, n in told["client"].items()}
    counts |= {f"missed_{name}": int(n) for name, n in told["missed"].items()}
    return {name: n for name, n in counts.items() if name not in ("misses", "hits")}


def _timed(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
