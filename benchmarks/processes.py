"""Starts the processes of a run: a node that owns the memory, workers that are told what to do."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from ctypes import c_double, c_longlong
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawArray, RawValue
from pathlib import Path
from typing import Any

from services import Service, node_command, node_up

from kvstore.index.embedded_redis.server import EmbeddedRedis
from kvstore.index.outage import GuardedIndex
from kvstore.index.redis.index import open_index
from kvstore.node import Node, NodeConfig
from kvstore.nodedir import NodeDir, sweep

ANSWER_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
GATE_POLL_S = 50e-6
GATE_LEAD_S = 500e-6
"""From the last arrival to the common start: long enough for every waiter to see it."""

_context = multiprocessing.get_context("spawn")


class Gate:
    """Lets several processes start a step at the same time, within about 0.1 ms."""

    def __init__(self, count: int) -> None:
        self._arrived = RawArray(c_longlong, count)
        self._open = RawValue(c_longlong, 0)
        self._start = RawValue(c_double, 0.0)

    def wait(self, me: int, step: int) -> None:
        """Return when all have come to `step` (1, 2, ...). The first in line opens the gate."""
        self._arrived[me] = step
        if len(self._arrived) == 1:
            return
        if me == 0:
            while min(self._arrived) < step:
                time.sleep(GATE_POLL_S)
            self._start.value = time.perf_counter() + GATE_LEAD_S
            self._open.value = step
        while self._open.value < step:
            time.sleep(GATE_POLL_S)
        time.sleep(max(self._start.value - time.perf_counter(), 0.0))


class Worker:
    """Runs an object of class `kind` in a process of its own; `call` and `answer` are its
    methods'."""

    def __init__(self, kind: Callable[..., Any], *args: Any) -> None:
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_work, args=(theirs, kind, args), daemon=True)
        self._process.start()
        theirs.close()
        self.answer()

    def call(self, method: str, *args: Any) -> None:
        """Have the worker call a method; `answer` waits for what it returns."""
        self._pipe.send((method, args))

    def answer(self) -> Any:
        if not self._pipe.poll(ANSWER_TIMEOUT_S):
            raise TimeoutError(f"a worker did not answer within {ANSWER_TIMEOUT_S} s")
        failed, answer = self._pipe.recv()
        if failed:
            raise RuntimeError(f"in a worker:\n{answer}")
        return answer

    def do(self, method: str, *args: Any) -> Any:
        self.call(method, *args)
        return self.answer()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(("close", ()))
        self._process.join(STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _work(pipe: Connection, kind: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        made = kind(*args)
        pipe.send((False, None))
        while True:
            method, arguments = pipe.recv()
            answer = getattr(made, method)(*arguments)
            if method == "close":
                return
            pipe.send((False, answer))
    except EOFError:
        return
    except BaseException:
        pipe.send((True, traceback.format_exc()))


class Owner:
    """Runs the memory node."""

    def __init__(self, run_dir: Path, url: str, size_bytes: int) -> None:
        config = NodeConfig(run_dir=run_dir, size_bytes=size_bytes)
        self._node = Node(config, GuardedIndex(open_index(url))).start()

    def close(self) -> None:
        self._node.stop()


class House:
    """Holds one run's directory, Redis and node; workers are added to it."""

    def __init__(self, run_dir: Path, url: str) -> None:
        self.run_dir = run_dir
        self.url = url
        self._workers: list[Worker] = []

    def worker(self, kind: Callable[..., Any], *args: Any) -> Worker:
        worker = Worker(kind, self.run_dir, self.url, *args)
        self._workers.append(worker)
        return worker

    def dismiss(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.stop()

    def stop_workers(self) -> None:
        """Stop the workers in reverse order: the node last."""
        while self._workers:
            self._workers.pop().stop()


@contextlib.contextmanager
def house(node_bytes: int) -> Iterator[House]:
    """Start a Redis and a memory node of `node_bytes`; they are gone at the end."""
    with tempfile.TemporaryDirectory(prefix="kvb-") as where:
        run_dir = Path(where)
        os.environ.pop("KVSTORE_URL", None)
        server = EmbeddedRedis.acquire(run_dir)
        made = House(run_dir, server.url)
        try:
            made.worker(Owner, node_bytes)
            yield made
        finally:
            made.stop_workers()
            server.close()


@contextlib.contextmanager
def lone_redis() -> Iterator[str]:
    """Start a Redis and return its URL."""
    # It ends some time after its last user, and removes its files itself.
    with tempfile.TemporaryDirectory(prefix="kvb-", ignore_cleanup_errors=True) as where:
        server = EmbeddedRedis.acquire(Path(where))
        try:
            yield server.url
        finally:
            server.close()


@contextlib.contextmanager
def lone_node(size_bytes: int, *, events: bool = False) -> Iterator[NodeProcess]:
    """Start a Redis, and a node of `size_bytes` that is ready and may be stopped and killed; with
    `events`, it publishes them."""
    with tempfile.TemporaryDirectory(prefix="kvb-") as where:
        run_dir = Path(where)
        server = EmbeddedRedis.acquire(run_dir)
        node = NodeProcess(server.url, run_dir, size_bytes, events=events)
        try:
            node.wait_ready()
            yield node
        finally:
            node.stop(signal.SIGTERM)
            sweep(run_dir, kept=True)
            server.close()


class NodeProcess:
    """Runs `kvstore node` as a process of its own."""

    def __init__(self, url: str, run_dir: Path, size_bytes: int, *, events: bool = False) -> None:
        self.url = url
        self.run_dir = run_dir
        self.events = f"ipc://{run_dir}/events"
        self.directory = NodeDir(run_dir, "node")
        options = ["--events", self.events] if events else []
        self._command = node_command(run_dir, size_bytes, "--url", url, *options)
        self.start()

    def start(self) -> None:
        # Modules compiled once, as in an installed package, whatever our own environment says.
        compiled = {
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": str(self.directory.path.parent.parent / "compiled"),
        }
        self.process = Service(self._command, self.run_dir / "node.log", env=compiled)

    def wait_ready(self) -> None:
        self.process.wait(node_up(self.run_dir))

    def stop(self, number: signal.Signals) -> None:
        self.process.end(number)
