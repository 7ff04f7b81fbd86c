"""Tells Prometheus what a node holds and has done, and probes how it is, over HTTP.

    /metrics   `FAMILIES`, and what prometheus_client knows of the process
    /live      200 while the node's event loop answers
    /ready     200 when the node is ready (readiness.py), else 503 and why it is not

One thread answers, one request after the other: whoever asks slowly has `REQUEST_TIMEOUT_S`. What
it tells is read by the event loop, which alone has the core (rule 2); a loop that does not answer
within `LOOP_TIMEOUT_S` is a 503 everywhere. Nothing is told that is of use to who may not read
blocks: numbers and names, no keys.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from kvstore.errors import UsageError
from kvstore.machine import REAL
from kvstore.node.config import NodeConfig
from kvstore.nodedir import NodeDir
from kvstore.system.tcp import listen

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

    from prometheus_client.core import Metric

log = logging.getLogger("kvstore.node")

INSTALL = "pip install 'kvstore-llm[metrics]'"
LOOP_TIMEOUT_S = 2.0
REQUEST_TIMEOUT_S = 2.0
POLL_S = 0.2
PREFIX = "kvstore_node_"


class Family(NamedTuple):
    """One gauge or counter, and its name among a node's own (`core.report.stats`)."""

    name: str
    """Prometheus' name behind `PREFIX`; a counter's without "_total"."""
    of: str
    help: str
    counter: bool = False


FAMILIES = (
    Family("capacity_bytes", "capacity_bytes", "Memory for blocks."),
    Family("free_bytes", "free_bytes", "Of it, in no slot."),
    Family("largest_free_bytes", "largest_free_bytes", "Of it, in one piece."),
    Family("value_bytes_max", "value_bytes_max", "The largest value that the node takes."),
    Family("blocks", "blocks", "Blocks that can be found."),
    Family("block_bytes", "block_bytes", "Bytes of their payloads."),
    Family("reserved_slots", "reserved", "Slots that writers hold."),
    Family("oldest_reservation_seconds", "oldest_reservation_s", "Age of the oldest of them."),
    Family("pins", "pinned", "Pins that clients hold."),
    Family("quarantined_slots", "quarantined", "Slots and pins of clients of former starts."),
    Family("retained_blocks", "retained", "Blocks that are kept until a time."),
    Family("retained_bytes", "retained_bytes", "Bytes that they take."),
    Family("unpublished_blocks", "unpublished", "Blocks that the index is still to hear of."),
    Family("pending_removals", "removals_pending", "Records that are still to leave the index."),
    Family("clients", "clients", "Clients that live."),
    Family("ready", "ready", "1 when the node is ready, else 0."),
    Family("index_away", "index_away", "1 when the last publication failed, else 0."),
    Family("stored", "stored", "Blocks stored.", counter=True),
    Family(
        "exists", "exists", "Blocks that were there already when they were saved.", counter=True
    ),
    Family("in_progress", "in_progress", "Blocks that another writer was busy with.", counter=True),
    Family("rejected", "rejected", "Blocks that found no room.", counter=True),
    Family("evicted", "evicted", "Blocks evicted to make room.", counter=True),
    Family("expired", "expired", "Blocks whose time was over.", counter=True),
    Family("dropped", "dropped", "Blocks deleted by request.", counter=True),
    Family("moved", "moved", "Blocks moved to join free memory.", counter=True),
    Family("aborted", "aborted", "Reservations that their writers gave back.", counter=True),
    Family("corrupt", "corrupt", "Blocks found damaged.", counter=True),
    Family("repaired", "repaired", "Records put right in the index.", counter=True),
    Family("writers_died", "writers_died", "Clients that died with slots reserved.", counter=True),
    Family("retentions", "retentions", "Times that blocks were retained.", counter=True),
    Family("retentions_refused", "retentions_refused", "Retentions refused.", counter=True),
    Family("retentions_broken", "retentions_broken", "Retentions that ended early.", counter=True),
    Family("recovered", "recovered", "Blocks that this start took over.", counter=True),
    Family("recovery_dropped", "recovery_dropped", "Headers that it could not.", counter=True),
    Family("removals_forgotten", "removals_forgotten", "Stale records left.", counter=True),
    Family("tasks_failed", "tasks_failed", "Background tasks that failed: a bug.", counter=True),
)

Numbers = Mapping[str, int | float]


class NodeMetrics:
    """The HTTP server of one start of one node."""

    def __init__(
        self,
        config: NodeConfig,
        medium: str,
        loop: asyncio.AbstractEventLoop,
        numbers: Callable[[], Numbers],
        directory: NodeDir,
    ) -> None:
        """It listens at once, at `config.metrics`. The loop's thread calls `numbers`. Raises
        `UsageError` when the address cannot be used, or prometheus_client is not there."""
        assert config.metrics is not None
        address = config.metrics
        shown = f"{address[0]}:{address[1]}"
        try:
            from prometheus_client import CollectorRegistry, ProcessCollector
        except ImportError as e:
            raise UsageError("metrics", shown, f"needs prometheus_client: {INSTALL}") from e
        self._loop = loop
        self._numbers = numbers
        self._directory = directory
        self._about = {
            "node": config.name,
            "host": socket.gethostname(),
            "key_prefix": config.key_prefix,
            "policy": config.policy,
            "medium": medium,
        }
        self._read: Numbers = {}
        """What the loop has told last, for the answer under way."""
        self._stopping = threading.Event()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self._server = _Server(address, _Handler, bind_and_activate=False)
        self._server.socket.close()  # of IPv4 alone
        try:
            self._server.socket = listen(*address)
        except (OSError, OverflowError, TypeError, ValueError) as e:  # in use, or can be none
            raise UsageError("metrics", shown, f"cannot be used: {e}") from e
        self._server.timeout = POLL_S
        self._server.server_name = self._about["host"]
        self._server.server_port = self.port = self._server.socket.getsockname()[1]
        self._server.setup_environ()
        self._server.set_app(self._answer)

    def start(self) -> None:
        REAL.start_thread(self._serve, "kvstore-metrics")

    def stop(self) -> None:
        """Have the thread end. The loop's thread calls this, for which that one may be waiting: so
        nobody waits for it."""
        self._stopping.set()

    def _serve(self) -> None:
        with self._server:
            while not self._stopping.is_set():
                self._server.handle_request()

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO")
        if path not in ("/metrics", "/live", "/ready"):
            return _said(start, "404 Not Found", "try /metrics, /live or /ready")
        try:
            self._read = self._ask()
        except (TimeoutError, RuntimeError):  # the loop is busy, or has ended
            why = f"the node's loop has not answered within {LOOP_TIMEOUT_S:.0f} s"
            return _said(start, "503 Service Unavailable", why)
        if path == "/metrics":
            from prometheus_client import make_wsgi_app

            told: Iterable[bytes] = make_wsgi_app(self._registry)(environ, start)
            return told
        why_not = self._directory.why_not_ready() if path == "/ready" else ""
        return _said(start, "503 Service Unavailable" if why_not else "200 OK", why_not or "yes")

    def _ask(self) -> Numbers:
        """What the node counts. Raises `TimeoutError`, and `RuntimeError` when its loop ended."""
        future: concurrent.futures.Future[Numbers] = concurrent.futures.Future()

        def read() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(self._numbers())

        self._loop.call_soon_threadsafe(read)
        try:
            return future.result(LOOP_TIMEOUT_S)
        finally:
            future.cancel()

    def describe(self) -> Iterator[Metric]:
        """Nothing: a registry need not ask for numbers to know the names."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client's registry asks for, of the numbers that were just read."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        node = self._about["node"]
        yield InfoMetricFamily("kvstore_node", "This start of the node.", value=self._about)
        for family in FAMILIES:
            kind = CounterMetricFamily if family.counter else GaugeMetricFamily
            made = kind(PREFIX + family.name, family.help, labels=["node"])
            made.add_metric([node], self._read[family.of])
            yield made


class _Server(WSGIServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Note what went wrong with one connection: others find it by a scan of ports, too."""
        log.debug("metrics: the connection of %s ended early", client_address, exc_info=True)


class _Handler(WSGIRequestHandler):
    """One request, then the connection ends: nobody holds it."""

    timeout = REQUEST_TIMEOUT_S

    def log_message(self, *words: object) -> None:
        """Say nothing: who probes every second would fill a log."""


def _said(start: StartResponse, status: str, text: str) -> list[bytes]:
    body = f"{text}\n".encode()
    start(
        status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))]
    )
    return [body]
