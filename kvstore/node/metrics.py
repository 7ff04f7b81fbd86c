"""Tells Prometheus what a node holds and has done, and probes how it is, over HTTP.

    /metrics   `FAMILIES`, and what prometheus_client knows of the process
    /live      200 while the node's event loop answers
    /ready     200 when the node is ready (readiness.py), else 503 and why it is not
    /          the page (page/page.py), where it was asked for; /explain too, with its password

One thread answers all connections, each as its bytes come: a request has `REQUEST_TIMEOUT_S` for
its last byte, and so has its answer. Whoever can connect shows no secret, so connections are few,
and when they are too many the oldest is closed, of the address that has most. What is told is read
by the event loop, which alone has the core (rule 2); a loop that does not answer within
`LOOP_TIMEOUT_S` is a 503 for all who ask then. Nothing is told that is of use to who may not read
blocks: numbers and names, no keys.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kvstore.core.outgoing.departures import GONE_KEYS_MAX
from kvstore.core.outgoing.watched import AGE_BOUNDS_S
from kvstore.errors import UsageError
from kvstore.machine import REAL
from kvstore.node.config import NodeConfig
from kvstore.node.page.page import EXPLAIN, PATHS, Page, rendered
from kvstore.node.seldom import Seldom
from kvstore.nodedir import NodeDir
from kvstore.system.descriptors import share
from kvstore.system.tcp import listen
from kvstore.system.waiting import Waiting

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

    from prometheus_client.core import Metric

log = logging.getLogger("kvstore.node")

INSTALL = "pip install prometheus-client"
LOOP_TIMEOUT_S = 2.0
LATE = f"the node's loop has not answered within {LOOP_TIMEOUT_S:.0f} s"
REQUEST_TIMEOUT_S = 2.0
CONNECTIONS_MAX = 256
ACCEPTED_AT_ONCE = 16
"""Connections that are accepted before existing ones are served again."""
HEAD_BYTES_MAX = 16 << 10
HEAD_END = b"\r\n\r\n"
POLL_S = 0.2
PREFIX = "kvstore_node_"


class Family(NamedTuple):
    """One gauge or counter, and its name among a node's own (`core.report.stats`)."""

    name: str
    """Prometheus' name after `PREFIX`; a counter's without "_total"."""
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
    Family("moved", "moved", "Retained blocks moved out of the way of a new one.", counter=True),
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
    Family("stored_bytes", "stored_bytes", "Bytes of blocks stored.", counter=True),
    Family("served_bytes", "served_bytes", "Bytes of blocks that other hosts read.", counter=True),
    Family(
        "ever_read_bytes",
        "ever_read_bytes",
        "Of stored_bytes, those of blocks that somebody has read since they were stored.",
        counter=True,
    ),
    Family(
        "asked_tokens",
        "asked_tokens",
        "Prompt tokens in full blocks that this host asked for: engine + hit + missed.",
        counter=True,
    ),
    Family("engine_tokens", "engine_tokens", "Of them, in the engine's own cache.", counter=True),
    Family("hit_tokens", "hit_tokens", "Of them, loaded from the store.", counter=True),
    Family("client_hits", "client_hits", "Values and blocks that clients got.", counter=True),
    Family("client_misses", "client_misses", "Those that they did not get.", counter=True),
    Family("client_hit_bytes", "client_hit_bytes", "Bytes of those they got.", counter=True),
)
DISK_FAMILIES = (
    Family("disk_devices", "disk_devices", "Disks that blocks are written to and read from."),
    Family("disk_closed", "disk_closed", "Disks that do not work: look at the node's log."),
    Family("disk_adopting", "disk_adopting", "Disks of which a start has not read everything yet."),
    Family("disk_capacity_bytes", "disk_capacity_bytes", "Room for blocks on disks."),
    Family("disk_blocks", "disk_blocks", "Blocks on disks that can be found."),
    Family("disk_bytes", "disk_bytes", "Bytes of their payloads."),
    Family("disk_written_bytes", "disk_written_bytes", "Bytes of blocks written.", counter=True),
    Family(
        "disk_again_bytes",
        "disk_again_bytes",
        "Of them, of blocks that were on a disk since they were saved: at most a tenth of others.",
        counter=True,
    ),
    Family("disk_regions_evicted", "disk_regions_evicted", "Regions reused.", counter=True),
    Family("disk_evicted", "disk_evicted", "Blocks that left disks for others.", counter=True),
    Family("disk_damaged", "disk_damaged", "Blocks on disks found damaged.", counter=True),
    Family("disk_promoted", "disk_promoted", "Blocks read back into memory.", counter=True),
    Family("disk_adopted", "disk_adopted", "Blocks that this start found on disks.", counter=True),
)
"""What a node with disks tells too."""
DISK_SKIPPED = "disk_skipped"
"""What a reason stands behind, in the name of a number: "disk_skipped_small"."""
MISSED = "missed_tokens"
"""What a reason stands behind, in the name of a number: "missed_tokens:evicted"."""
HISTOGRAMS = (
    Family("evicted_age_seconds", "evicted_age", "Ages of evicted blocks since they were stored."),
    Family("evicted_idle_seconds", "evicted_idle", "The same, since they were last used."),
    Family(
        "returned_seconds",
        "returned",
        "From a block's eviction until somebody stored it again, of the last "
        f"{GONE_KEYS_MAX} that left: while these are short, the node is too small.",
    ),
    Family("read_gap_seconds", "read_gap", "From a block's last use, or its save, until a read."),
)

Numbers = Mapping[str, int | float]
_T = TypeVar("_T")


class NodeMetrics:
    """The HTTP server of one start of one node."""

    def __init__(
        self,
        config: NodeConfig,
        medium: str,
        loop: asyncio.AbstractEventLoop,
        numbers: Callable[[], Numbers],
        directory: NodeDir,
        page: Page | None = None,
    ) -> None:
        """Listen at once, at `config.metrics`. The loop's thread calls `numbers`. Raises
        `UsageError` when the address cannot be used, or prometheus_client is not there."""
        self._page = page
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
            # Not a plain import: by its names the package leads to what is above a node.
            "version": import_module("kvstore").__version__,
            "host": socket.gethostname(),
            "key_prefix": config.key_prefix,
            "policy": config.policy,
            "medium": medium,
        }
        self._read: Numbers | None = None
        """The numbers that the loop gave last, for the answers being made."""
        self._asked = False
        """Whether the loop was asked for them: once for all who ask in one round."""
        self._stopping = threading.Event()
        self._say = Seldom(log)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        try:
            self._listener = listen(*address)
        except (OSError, OverflowError, TypeError, ValueError) as e:  # in use, or can be none
            raise UsageError("metrics", shown, f"cannot be used: {e}") from e
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._poll = select.poll()
        self._guests: dict[int, _Guest] = {}
        """Connections by descriptor."""
        self._waiting = Waiting[_Guest]()

    def start(self) -> None:
        REAL.start_thread(self._serve, "kvstore-metrics")

    def stop(self) -> None:
        """Have the thread end without waiting for it. The loop's thread calls this, and the other
        thread may be waiting for the loop."""
        self._stopping.set()

    def _serve(self) -> None:
        with self._listener:
            self._poll.register(self._listener, select.POLLIN)
            while not self._stopping.is_set():
                ready = [fd for fd, _ in self._poll.poll(POLL_S * 1e3)]
                self._asked = False
                # Those that are there first: new ones may push them out.
                for guest in [self._guests[fd] for fd in ready if fd in self._guests]:
                    self._attend(guest)
                if self._listener.fileno() in ready:
                    self._accept()
                now = time.monotonic()
                for guest in [one for one in self._waiting if one.give_up_at < now]:
                    self._hang_up(guest)
            for guest in list(self._waiting):
                self._hang_up(guest)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, (address, *_) = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as e:
                self._say.warning("metrics: a connection cannot be taken: %s", e.strerror)
                self._stopping.wait(POLL_S)
                return
            connection.setblocking(False)
            guest = self._guests[connection.fileno()] = _Guest(connection)
            self._poll.register(connection, select.POLLIN)
            goes = self._waiting.enter(guest, address, share(CONNECTIONS_MAX, 8))
            if goes is not None:
                self._hang_up(goes)
            self._attend(guest)

    def _attend(self, guest: _Guest) -> None:
        """Read what has come of a request, or send on of its answer."""
        try:
            if not guest.left:
                data = guest.connection.recv(HEAD_BYTES_MAX)
                guest.head += data
                if HEAD_END not in guest.head:
                    if not data or len(guest.head) > HEAD_BYTES_MAX:
                        self._hang_up(guest)
                    return
                head, _, begun = guest.head.partition(HEAD_END)
                environ = _environ(head.decode("latin-1"))
                page = self._page
                if page is not None and environ["PATH_INFO"] == EXPLAIN and page.takes(environ):
                    self._forget(guest)
                    page.explain(guest.connection, bytes(begun), environ)
                    return
                guest.left = self._response(environ)
                guest.give_up_at = time.monotonic() + REQUEST_TIMEOUT_S
                self._poll.modify(guest.connection, select.POLLOUT)
            guest.left = guest.left[guest.connection.send(guest.left) :]
            if not guest.left:
                self._hang_up(guest)
        except BlockingIOError:
            pass
        except Exception as e:
            if not isinstance(e, OSError):  # our bug; others are answered all the same
                self._say.warning("metrics: a request cannot be answered: %r", e, exc_info=e)
            self._hang_up(guest)

    def _forget(self, guest: _Guest) -> None:
        self._waiting.leave(guest)
        if self._guests.pop(guest.connection.fileno(), None) is not None:
            self._poll.unregister(guest.connection)

    def _hang_up(self, guest: _Guest) -> None:
        self._forget(guest)
        with guest.connection, suppress(OSError):
            guest.connection.shutdown(socket.SHUT_WR)

    def _response(self, environ: WSGIEnvironment) -> bytes:
        """Return the whole answer to a request; the connection ends then."""
        told: list[tuple[str, list[tuple[str, str]]]] = []
        parts: list[bytes] = []

        def start(
            status: str, headers: list[tuple[str, str]], error: object = None, /
        ) -> Callable[[bytes], object]:
            told[:] = [(status, headers)]
            return parts.append

        parts += self._answer(environ, start)
        is_head = environ["REQUEST_METHOD"] == "HEAD"
        return rendered(*told[0], b"".join(parts), is_head=is_head)

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        page = self._page
        if page is not None and path in (*PATHS, EXPLAIN):
            try:
                status, headers, body = page.answer(path, environ, lambda: self._ask(page.state))
            except (TimeoutError, RuntimeError):
                return _text_answer(start, "503 Service Unavailable", LATE)
            start(status, headers)
            return [body]
        if path not in ("/metrics", "/live", "/ready"):
            return _text_answer(start, "404 Not Found", "try /metrics, /live or /ready")
        if not self._asked:
            self._asked, self._read = True, None
            with suppress(TimeoutError, RuntimeError):  # the loop is busy, or has ended
                self._read = self._ask(self._numbers)
        if self._read is None:
            return _text_answer(start, "503 Service Unavailable", LATE)
        if path == "/metrics":
            from prometheus_client import make_wsgi_app

            answer: Iterable[bytes] = make_wsgi_app(self._registry)(environ, start)
            return answer
        why_not = self._directory.why_not_ready() if path == "/ready" else ""
        return _text_answer(
            start, "503 Service Unavailable" if why_not else "200 OK", why_not or "yes"
        )

    def _ask(self, question: Callable[[], _T]) -> _T:
        """Return what the loop's thread answers. Raises `TimeoutError`, and `RuntimeError` when
        the loop ended."""
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def read() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(question())

        self._loop.call_soon_threadsafe(read)
        try:
            return future.result(LOOP_TIMEOUT_S)
        finally:
            future.cancel()

    def describe(self) -> Iterator[Metric]:
        """Return nothing: a registry need not ask for numbers to know the names."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Return what prometheus_client's registry asks for, of the numbers that were just read."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
            InfoMetricFamily,
        )

        numbers = self._read
        assert numbers is not None
        node = self._about["node"]
        yield InfoMetricFamily("kvstore_node", "This start of the node.", value=self._about)
        for family in (*FAMILIES, *DISK_FAMILIES):
            if family.of not in numbers:
                continue
            kind = CounterMetricFamily if family.counter else GaugeMetricFamily
            made = kind(PREFIX + family.name, family.help, labels=["node"])
            made.add_metric([node], numbers[family.of])
            yield made
        for start, what in (
            (f"{MISSED}:", "Of asked_tokens, computed, by reason."),
            (f"{DISK_SKIPPED}_", "Evicted blocks that are on no disk, by reason."),
        ):
            by_reason = CounterMetricFamily(PREFIX + start[:-1], what, labels=["node", "reason"])
            for name in numbers:
                if name.startswith(start):
                    by_reason.add_metric([node, name.removeprefix(start)], numbers[name])
            yield by_reason
        for family in HISTOGRAMS:
            ages = HistogramMetricFamily(PREFIX + family.name, family.help, labels=["node"])
            bounds = [(f"{bound:.1f}", f"{family.of}_le_{bound}") for bound in AGE_BOUNDS_S]
            buckets = [(bound, numbers[name]) for bound, name in [*bounds, ("+Inf", family.of)]]
            ages.add_metric([node], buckets, numbers[f"{family.of}_s"])
            yield ages


class _Guest:
    """One connection, for one request."""

    __slots__ = ("connection", "give_up_at", "head", "left")

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.give_up_at = time.monotonic() + REQUEST_TIMEOUT_S
        self.head = bytearray()
        self.left = b""
        """The part of the answer that is still to be sent."""


def _environ(head: str) -> WSGIEnvironment:
    """Return what the head of a request says."""
    words, *fields = head.split("\r\n")
    method, target = (*words.split(" "), "")[:2]
    path, _, query = target.partition("?")
    environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query}
    for name, _, value in (field.partition(":") for field in fields):
        environ["HTTP_" + name.upper().replace("-", "_")] = value.strip()
    return environ


def _text_answer(start: StartResponse, status: str, text: str) -> list[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{text}\n".encode()]
