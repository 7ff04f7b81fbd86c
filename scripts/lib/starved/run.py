"""Looks up blocks that are there, beside more busy processes than the machine can serve.

It uses an embedded Redis and memory node, as a user without any settings has them, in one session.
Each round looks up through the connector's scheduler side, as an engine between two steps asks,
once more so as if the blocks were another host's (the index is asked for all), and through
`Client.match_prefix`; reads a prompt's blocks; and saves some, reads them, and has them published.
Every miss and every lost save is one too many: slowness was taken for absence.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from connector.build import EngineShape, open_store
from connector.layout.geometry import KVGeometry
from connector.layout.topology import TpKVTopology
from connector.scheduler.lazy_store import LazyStore
from connector.scheduler.scheduler import SchedulerCore
from connector.scheduler.settings import SchedulerSettings
from connector.settings import ConnectorSettings
from kvstore import BlockSession, BlockStore, Client, Reservation
from kvstore.index.outage import GuardedIndex
from kvstore.index.redis.index import open_index
from kvstore.limits import Limits
from starved.ways import Elsewhere, Saves, prompt_keys, read

BLOCK_TOKENS = 16
BLOCKS = 8
PROMPTS = 32
NODE_BYTES = 64 << 20
SETTLE_S = 1.0
WATCH_EVERY_S = 0.5
IDLE_STEP_S = 0.002
"""Between two steps of an engine that has nothing to compute."""
START_PATIENCE = Limits(redis_timeout_s=30.0, publish_timeout_s=30.0, request_timeout_s=60.0)
"""Saving comes before the machine is made busy, and is not what is tried."""
GEOMETRY = KVGeometry(layers=2, heads=2, channel_bytes=64, engine_block_tokens=BLOCK_TOKENS)
SHAPE = EngineShape.of_one_group(GEOMETRY, TpKVTopology.of(), {"model": "starved"}, saves=False)
BUSY = "while True: pass"


@dataclass
class Request:
    """Holds what the scheduler side reads of an engine's request."""

    request_id: str
    tokens: list[int]
    num_computed_tokens: int = 0
    kv_transfer_params: None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        out = [b""]
        for i in range(0, len(self.tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            raw = repr(self.tokens[i : i + BLOCK_TOKENS]).encode()
            out.append(blake2b(out[-1] + raw, digest_size=16).digest())
        return out[1:]


@dataclass
class Tally:
    """Counts what became of what was done one way."""

    waits_s: list[float] = field(default_factory=list)
    missed: Counter[str] = field(default_factory=Counter)

    def report(self) -> dict[str, Any]:
        waits = sorted(self.waits_s)
        return {
            "count": len(waits),
            "missed": sum(self.missed.values()),
            "reasons": dict(self.missed),
            "wait_ms_p50": round(waits[len(waits) // 2] * 1e3, 2),
            "wait_ms_p99": round(waits[len(waits) * 99 // 100] * 1e3, 2),
            "wait_ms_max": round(waits[-1] * 1e3, 2),
        }


def prompt(number: int) -> list[int]:
    return [number * 1000 + i for i in range(BLOCKS * BLOCK_TOKENS + 1)]


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Start so many processes that compute, in this session as an engine's workers are."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            started.append(subprocess.Popen([sys.executable, "-S", "-c", BUSY]))  # noqa: PERF401
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


class Watch:
    """Counts how often a node that was announced in the index is not any more."""

    def __init__(self, url: str, key_prefix: str) -> None:
        self.gone = 0
        self.index = open_index(url, key_prefix=key_prefix, timeout_s=30.0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        known: set[int] = set()
        while not self._over.wait(WATCH_EVERY_S):
            there = set(self.index.nodes())
            self.gone += len(known - there)
            known = there

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.index.close()


def save(config: ConnectorSettings, client: Client) -> None:
    """Have the store hold every prompt's blocks under the keys of both ways."""
    layout = SHAPE.layout(config)
    (namespace,) = layout.groups[0].namespaces
    size = GEOMETRY.token_bytes * BLOCK_TOKENS
    with closing(BlockSession(run_dir=client.session.run_dir, limits=START_PATIENCE)) as session:
        for number in range(PROMPTS):
            tokens = prompt(number)
            keys = prompt_keys(layout, Request("", tokens).block_hashes)
            slots = session.reserve(keys, size, namespace.id)
            stored = session.commit([slot for slot in slots if isinstance(slot, Reservation)])
            stored += client.put_blocks(tokens, [bytes(size)] * BLOCKS)
            assert all(stored), stored
            assert len(stored) == 2 * BLOCKS, slots


def by_scheduler(core: SchedulerCore, request: Request) -> str:
    """Return why not all of the prompt was offered; empty when it was."""
    core.on_new_request(request)
    while (tokens := core.match(request, 0)) is None:
        core.plan_step([], [], lambda _: None)
        time.sleep(IDLE_STEP_S)
    explanation = core.explain(request.request_id)
    core.plan_step([], [], lambda _: None)
    core.finished(request.request_id)
    if tokens == BLOCKS * BLOCK_TOKENS:
        return ""
    missing = explanation.first_missing if explanation is not None else None
    return str(missing.reason) if missing is not None else "unknown"


def by_client(client: Client, tokens: list[int]) -> str:
    found = client.match_prefix(tokens).found
    return "" if len(found) == BLOCKS else str(getattr(found, "short", "unknown"))


def opened(session: BlockSession) -> int:
    """Return how often its breaker for reading has opened."""
    assert isinstance(session.index, GuardedIndex)
    return session.index.reading.opened


def scheduler_side(stack: ExitStack, config: ConnectorSettings, store: BlockStore) -> SchedulerCore:
    core = SchedulerCore(
        LazyStore(lambda: store),
        SHAPE.layout(config),
        SchedulerSettings(saves=False, lookup_timeout_s=config.lookup_timeout_s),
    )
    stack.callback(core.close)
    return core


def run(rounds: int, busy_per_core: int, run_dir: Path) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))
    config = ConnectorSettings.from_extra({"run_dir": str(run_dir), "block_tokens": BLOCK_TOKENS})
    layout = SHAPE.layout(config)
    payload = bytes(GEOMETRY.token_bytes * BLOCK_TOKENS)
    with ExitStack() as stack:
        saver = stack.enter_context(
            Client(
                run_dir=run_dir,
                block_tokens=BLOCK_TOKENS,
                node_size_bytes=NODE_BYTES,
                limits=START_PATIENCE,
            )
        )
        started = saver.put("start", b"")
        assert started, started
        save(config, saver)
        client = stack.enter_context(Client(run_dir=run_dir, block_tokens=BLOCK_TOKENS))
        here, away = open_store(config), open_store(config)
        core = scheduler_side(stack, config, here)
        far = scheduler_side(stack, config, Elsewhere(away))
        worker = stack.enter_context(closing(open_store(config, patient=True)))
        watch = Watch(here.url, config.key_prefix)
        stack.callback(watch.close)
        saves = Saves(worker, client.session, watch.index)
        stack.enter_context(busy(busy_per_core * cores))
        time.sleep(SETTLE_S)
        ways: dict[str, Callable[[list[int], Request], str]] = {
            "scheduler": lambda _, request: by_scheduler(core, request),
            "index": lambda _, request: by_scheduler(far, request),
            "client": lambda tokens, _: by_client(client, tokens),
            "read": lambda _, request: read(
                worker, prompt_keys(layout, request.block_hashes), payload
            ),
            "save": lambda *_: saves.save(),
            "clear": lambda *_: saves.tidy(),
        }
        tallies = {way: Tally() for way in ways}
        for number in range(rounds):
            tokens = prompt(number % PROMPTS)
            for way, act in ways.items():
                began = time.monotonic()
                why = act(tokens, Request(f"r{number}", tokens))
                tallies[way].waits_s.append(time.monotonic() - began)
                if why:
                    tallies[way].missed[why] += 1
        saves.settle()
        result = {name: tally.report() for name, tally in tallies.items()}
        sessions = {"here": here, "away": away, "worker": worker, "client": client.session}
        breakers = {name: opened(session) for name, session in sessions.items()}
        dropped = sum(session.nodes.gone for session in sessions.values())
        gone = watch.gone
    missed = sum(one["missed"] for one in result.values())
    return {
        "cores": cores,
        "busy_processes": busy_per_core * cores,
        **result,
        "unpublished": saves.unpublished,
        "breakers_opened": breakers,
        "nodes_declared_dead": gone + dropped,
        "passed": not (missed or saves.unpublished or gone or dropped or sum(breakers.values())),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/starved")
    parser.add_argument("--lookups", type=int, default=10_000)
    parser.add_argument("--busy-per-core", type=int, default=4)
    options = parser.parse_args(argv)
    if options.lookups < 1 or options.busy_per_core < 0:
        parser.error("--lookups must be at least 1, --busy-per-core at least 0")
    os.environ.pop("KVSTORE_URL", None)
    with tempfile.TemporaryDirectory(prefix="kvs-", ignore_cleanup_errors=True) as place:
        report = run(options.lookups, options.busy_per_core, Path(place))
    print(json.dumps(report))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
