"""Listens to which blocks nodes store and remove, so that a router knows without asking anybody.

A thread reads the nodes' events (protocol/block_events.py) and adds them up (view.py); whoever
looks keys up looks into sets of this process (compiled/key_set.py). What is there when it begins,
and what was missed, is asked for.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType, TracebackType
from typing import Any, Self, TypeAlias

from kvstore.client.arguments import Uncopied
from kvstore.client.explanation import MissReason
from kvstore.client.locator import Holder, HolderRun, HolderRuns, Holders
from kvstore.client.residency.view import NodeView, message_of
from kvstore.compiled.key_set import count_keys
from kvstore.errors import PeerError, UsageError
from kvstore.limits import EVENT_MESSAGE_BYTES_MAX, EVENT_MESSAGES_WAITING_MAX, EVENT_SOURCES_MAX
from kvstore.protocol.block_events import PREFIX, endpoints_of, sequence_bytes
from kvstore.types import Key

log = logging.getLogger("kvstore.client")

# pyzmq's, which need not be here.
Context: TypeAlias = Any
Socket: TypeAlias = Any
Poller: TypeAlias = Any

POLL_S = 0.25
"""How often it looks whose answer is overdue."""
CLOSE_TIMEOUT_S = 2.0
"""How long `close` waits for the thread, which ends with the process."""
AT_ONCE = 64
"""Messages of one node that are read before it is another's turn."""


class Residency(Uncopied):
    """Which blocks are on which nodes, as these say themselves. Thread-safe.

    What it says is a hint (rule 7), milliseconds old; of a node that is silent for
    `EVENTS_SILENT_S`, nothing is there.
    """

    def __init__(self, events: Sequence[str]) -> None:
        """`events` are the nodes' own settings of that name (`kvstore node --events`). Raises
        `UsageError`, without pyzmq too."""
        if not 0 < len(events) <= EVENT_SOURCES_MAX:
            raise UsageError("events", len(events), f"must name 1 to {EVENT_SOURCES_MAX} nodes")
        endpoints = [endpoints_of(one) for one in events]
        try:
            import zmq
        except ImportError as e:
            remedy = "needs pyzmq: pip install pyzmq"
            raise UsageError("events", events[0], remedy) from e
        self._zmq: ModuleType = zmq
        self._context = self._zmq.Context()
        self._nodes = [_Node(self._zmq, self._context, *one) for one in endpoints]
        self._ending = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kvstore-residency", daemon=True)
        self._thread.start()

    @property
    def in_sync(self) -> bool:
        """Return whether each node was heard lately, and nothing of what it said is missing."""
        now = time.monotonic()
        return all(node.view.in_sync(now) for node in self._nodes)

    def blocks(self) -> int:
        """Return how many blocks are on all nodes together."""
        now = time.monotonic()
        return sum(len(node.view.keys) for node in self._nodes if node.view.alive(now))

    def keys(self) -> list[Key]:
        """Return the keys of all blocks that are known, of each node that has one."""
        now = time.monotonic()
        nodes = [node.view for node in self._nodes if node.view.alive(now)]
        return [key for view in nodes for key in view.keys.tolist()]

    def leading(self, keys: Sequence[Key] | bytes) -> Holders:
        """Return the holders of the longest leading run of `keys`, one each, as `Locator.leading`:
        the node that has most of the run first. `keys` may be the bytes of all, one after the
        other."""
        runs = self.runs(keys)
        holders = Holders(runs.short)
        for run in runs:
            holders += [run.holder] * run.blocks
        return holders

    def runs(self, keys: Sequence[Key] | bytes) -> HolderRuns:
        """Return the same, as runs of blocks that one node holds."""
        runs, found, count = HolderRuns(), 0, count_keys(keys)
        now = time.monotonic()
        there = [
            (view.keys, Holder(view.source.name, view.source.host))
            for view in (node.view for node in self._nodes)
            if view.source is not None and view.alive(now)
        ]
        if not there:
            runs.short = MissReason.NODE_DEAD
            return runs
        while found < count:
            each = [HolderRun(holder, held.leading(keys, found)) for held, holder in there]
            longest = max(each, key=lambda run: run.blocks)
            if not longest.blocks:
                runs.short = MissReason.ABSENT
                break
            runs.append(longest)
            found += longest.blocks
        return runs

    def counts(self) -> dict[str, int]:
        """Return how many gaps were seen and snapshots taken, of all nodes together."""
        return {
            "gaps": sum(node.view.gaps for node in self._nodes),
            "snapshots": sum(node.view.snapshots for node in self._nodes),
        }

    def close(self) -> None:
        """End the thread and give connections back. Safe to call twice."""
        if self._ending:
            return
        self._ending = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():  # else it may still look at the descriptor
            os.close(self._wake_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- in the thread ----------------------------------------------------

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._wake_fd, self._zmq.POLLIN)
        for node in self._nodes:
            poller.register(node.events, self._zmq.POLLIN)
        try:
            while not self._ending:
                for node in self._nodes:
                    node.look_after(poller)
                ready = dict(poller.poll(POLL_S * 1000))
                for node in self._nodes:
                    if ready.get(node.answers):
                        node.read_answers(poller)
                    if ready.get(node.events):
                        node.read_events(poller)
        except Exception as e:
            log.critical("listening to nodes' events ends: %s", e, exc_info=e)
        finally:
            self._context.destroy(0)


class _Node:
    """The two sockets to one node, and what it said. For the thread, but for `view`'s keys."""

    def __init__(self, zmq: ModuleType, context: Context, events_at: str, answers_at: str) -> None:
        self._zmq = zmq
        self._context = context
        self._events_at, self._answers_at = events_at, answers_at
        self.view = NodeView()
        self.events = self._connected(zmq.SUB, self._events_at)
        self.events.setsockopt(zmq.SUBSCRIBE, PREFIX)
        self.answers: Socket | None = None

    def _connected(self, kind: int, endpoint: str) -> Socket:
        zmq = self._zmq
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, EVENT_MESSAGES_WAITING_MAX)
        socket.setsockopt(zmq.MAXMSGSIZE, EVENT_MESSAGE_BYTES_MAX)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1 if "[" in endpoint else 0)
        socket.connect(endpoint)
        return socket

    def look_after(self, poller: Poller) -> None:
        """Ask when nothing is known or an answer is overdue."""
        start = self.view.overdue(time.monotonic())
        if start is not None:
            self._ask(start, poller)

    def _ask(self, start: int, poller: Poller) -> None:
        """Ask for what came from `start` on, by a new connection: nothing of an earlier answer
        comes through it."""
        if self.answers is not None:
            poller.unregister(self.answers)
            self.answers.close(0)
        self.answers = self._connected(self._zmq.DEALER, self._answers_at)
        poller.register(self.answers, self._zmq.POLLIN)
        with suppress(self._zmq.Again):  # it is overdue then
            self.answers.send_multipart([b"", sequence_bytes(start)], self._zmq.NOBLOCK)

    def read_events(self, poller: Poller) -> None:
        for _ in range(AT_ONCE):
            try:
                parts = self.events.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            try:
                if len(parts) != 3:
                    raise PeerError(f"an event of {len(parts)} parts")
                start = self.view.published(message_of(*parts), time.monotonic())
            except PeerError as e:
                log.warning("%s: %s", self._events_at, e)
                continue
            if start is not None:
                self._ask(start, poller)

    def read_answers(self, poller: Poller) -> None:
        assert self.answers is not None  # it is what the poller spoke of
        for _ in range(AT_ONCE):
            try:
                _, *parts = self.answers.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            try:
                start = self.view.answered(parts, time.monotonic())
            except PeerError as e:
                log.warning("%s: %s", self._answers_at, e)
                continue
            if start is not None:
                self._ask(start, poller)
                return
