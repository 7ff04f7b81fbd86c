"""Suite `restart` measures how a node comes back after SIGKILL, and an index that was emptied."""

from __future__ import annotations

import signal
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import redis

from benchmarks.local_workers import PATIENT
from benchmarks.processes import NodeProcess, lone_node
from benchmarks.report import Row, machine, percentile
from kvstore import Client
from kvstore import Namespace as KeyNamespace
from kvstore.client.nodes.control import ControlChannel
from kvstore.limits import BATCH_KEYS_MAX
from kvstore.protocol.control import Op
from kvstore.types import Key

TIMEOUT_S = 120.0
POLL_S = 0.005
ASK_EVERY_S = 0.002


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--block-bytes", type=int, default=4096)
    parser.add_argument("--repetitions", type=int, default=3)


def run(options: Namespace) -> tuple[dict[str, Any], list[Row]]:
    rows: list[Row] = []
    namespace = KeyNamespace.named("default")
    names = [f"block-{i}" for i in range(options.blocks)]
    keys = [namespace.value_key(name) for name in names]
    # Room for a quarter more than the slots need: nothing is evicted.
    size_bytes = max(options.blocks * options.block_bytes * 3 // 2, 256 << 20)
    with lone_node(size_bytes) as node:
        about = machine(node.url)
        value = bytes(options.block_bytes)
        with _client(node) as client:
            for start in range(0, len(names), 1000):
                batch = names[start : start + 1000]
                assert all(client.put_many((name, value) for name in batch))
        for step in (_restarted, _emptied):
            rows += [step(node, keys) for _ in range(options.repetitions)]
        return about, rows


def _client(node: NodeProcess) -> Client:
    return Client(node.url, run_dir=node.run_dir, limits=PATIENT)


def _restarted(node: NodeProcess, keys: list[Key]) -> Row:
    """Time from the start of the process until the index names every block at its new place."""
    node.stop(signal.SIGKILL)
    started = time.perf_counter()
    node.start()
    node.wait_ready()
    ready_s = time.perf_counter() - started
    with _client(node) as client:
        _wait(_Search(client, keys).over)
        indexed_s = time.perf_counter() - started
        read = sum(client.session.view(found) is not None for found in _found(client, keys))
        assert read == len(keys), f"{len(keys) - read} blocks cannot be read"
    return _row("restart", keys, ready_s, indexed_s, [])


def _emptied(node: NodeProcess, keys: list[Key]) -> Row:
    """Time from FLUSHALL until every record is back; meanwhile the node is asked something all the
    time."""
    word = node.directory.announcement()
    assert word is not None
    control = ControlChannel(
        node.directory, (word.node_id, word.epoch), TIMEOUT_S, lambda: ((), ())
    )
    took: list[float] = []
    done = threading.Event()

    def ask() -> None:
        while not done.wait(ASK_EVERY_S):
            asked = time.perf_counter()
            control.request(Op.PIN, keys[0])
            took.append(time.perf_counter() - asked)

    asking = threading.Thread(target=ask)
    with _client(node) as client:
        bare = redis.Redis.from_url(node.url)
        asking.start()
        try:
            started = time.perf_counter()
            bare.flushall()
            _wait(_Search(client, keys).over)
            refilled_s = time.perf_counter() - started
        finally:
            done.set()
            asking.join()
            control.close()
    return _row("refill", keys, 0.0, refilled_s, took)


def _found(client: Client, keys: list[Key]) -> list[Any]:
    found: list[Any] = []
    for start in range(0, len(keys), BATCH_KEYS_MAX):
        found += client.session.lookup(keys[start : start + BATCH_KEYS_MAX])
    return [f for f in found if f is not None]


class _Search:
    """Looks for all blocks, batch by batch; goes on with the batch that had a gap."""

    def __init__(self, client: Client, keys: list[Key]) -> None:
        self._client = client
        self._left = [keys[i : i + BATCH_KEYS_MAX] for i in range(0, len(keys), BATCH_KEYS_MAX)]

    def over(self) -> bool:
        """Tell whether each batch was found whole, and its node reached. What was saved first is
        published last: it is looked for first."""
        look = self._client.session.lookup
        while self._left:
            # One key first: looking costs Redis time that the node is waiting for.
            if None in look(self._left[0][:1]) or None in look(self._left[0]):
                return False
            del self._left[0]
        return True


def _wait(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"blocks are missing after {TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)


def _row(op: str, keys: list[Key], ready_s: float, all_s: float, asked: list[float]) -> Row:
    return {
        "op": op,
        "blocks": len(keys),
        "ready_s": round(ready_s, 2),
        "all_found_s": round(all_s, 2),
        "asked": len(asked),
        "answer_ms_max": round(max(asked, default=0.0) * 1e3, 1),
        "answer_ms_p50": round(percentile(asked, 50) * 1e3, 1) if asked else 0.0,
    }
