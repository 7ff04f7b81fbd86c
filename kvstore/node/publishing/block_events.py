"""Publishes which blocks a node stores and removes, for routers: vLLM's KV events over ZeroMQ.

The node's loop only collects: what changed in one turn of it is one message with the next number
of the sequence (protocol/block_events.py), appended to a queue. A thread packs and sends it, keeps
it for those who missed it, and answers them. It asks the loop for a snapshot where what it keeps
does not reach back far enough; the loop puts the keys together (5 ms for 100,000), once for all
who ask before the next is needed.

Must never happen: a message left out whose number comes again, or a snapshot that has another
number than the last change in it. What does not fit into the queue is left out with its number.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from contextlib import suppress
from types import ModuleType
from typing import Protocol

from kvstore.batches import in_batches
from kvstore.core.node import NodeCore
from kvstore.core.outgoing.changes import Changes
from kvstore.errors import PeerError, UsageError
from kvstore.limits import (
    EVENT_ANSWER_TAKEN_S,
    EVENT_BACKLOG_MAX,
    EVENT_KEYS_MAX,
    EVENT_MESSAGES_WAITING_MAX,
)
from kvstore.machine import REAL, Machine
from kvstore.node.publishing.event_answers import Answers, EventMessage, Snapshot, Tracker
from kvstore.node.publishing.event_connections import ListenerConnection, ListenerConnections
from kvstore.protocol.block_events import (
    BlockChanges,
    Source,
    endpoints_of,
    pack_changes,
    sequence_bytes,
    sequence_of,
    topic_of,
)

log = logging.getLogger("kvstore.node")

HEARTBEAT_EVERY_S = 1.0
"""Seconds between two messages, by which a listener knows that the node lives and what it has
missed."""
SNAPSHOT_EVERY_S = 0.05
"""Shortest time between two snapshots: with 100,000 blocks one takes 5 ms of the loop."""
LINGER_MS = 200
"""Time that an ending node waits for its last messages to be sent."""
STOP_TIMEOUT_S = 2.0
"""Time that it waits for the thread that sends them, which ends with the process."""
LOOK_EVERY_MS = 50
"""Time between two checks of whether an answer was taken, while a question waits for that."""
_REQUEST_BYTES_MAX = 64
_TOPIC_BYTES_MAX = 4096
"""Bytes of a topic that a listener subscribes to."""
_REQUESTS_AT_ONCE = 64
_BETWEEN: tuple[list[bytes], ...] = ([], [b""])
"""Frames allowed between a listener's name and its request; each message of the answer repeats
them."""


class ReceivedFrame(Protocol):
    """The part of `zmq.Frame` that is used."""

    def get(self, option: int) -> int: ...


class BlockEvents:
    """Publishes the blocks of `core` from `start` to `stop`; both, and `schedule`, are for the
    node's loop."""

    def __init__(
        self,
        setting: str,
        source: Source,
        core: NodeCore,
        loop: asyncio.AbstractEventLoop,
        *,
        medium: str = "CPU",
        machine: Machine = REAL,
    ) -> None:
        """Bind the endpoints of `setting`, which is as `endpoints_of` takes it. Raises `UsageError`
        without pyzmq."""
        try:
            import zmq
        except ImportError as e:
            remedy = "needs pyzmq: pip install pyzmq"
            raise UsageError("events", setting, remedy) from e
        self._zmq: ModuleType = zmq
        self._setting = setting
        self._endpoints = endpoints_of(setting)
        self._core = core
        self._loop = loop
        self._wall = machine.wall
        self._monotonic = machine.monotonic
        self._medium = medium
        self._topic = topic_of(source)
        self._changes = core.blocks.changes = Changes()
        self._next = 0
        """Number of the next message."""
        self._due = False
        self._snapshot_at = float("-inf")
        self.left_out = 0
        """Messages that did not fit into the queue."""
        self._queue: deque[EventMessage] = deque()
        self._queued = 0
        """Total cost of what was put into the queue; the thread counts what it took."""
        self._sent = 0
        self._snapshots: deque[Snapshot] = deque(maxlen=1)
        self._ending = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._answers = Answers(self._topic, medium)
        self._thread = threading.Thread(target=self._run, name="kvstore-events", daemon=True)

    # --- in the node's loop ---------------------------------------------

    def start(self) -> None:
        """Open the sockets. Raises `UsageError` when they cannot be bound."""
        zmq = self._zmq
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.SNDHWM, EVENT_MESSAGES_WAITING_MAX)
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.setsockopt(zmq.SNDHWM, 0)  # `Answers` counts, and knows what was taken
        self._replay.setsockopt(zmq.TCP_MAXRT, int(EVENT_ANSWER_TAKEN_S * 1000))
        self._replay.setsockopt(zmq.MAXMSGSIZE, _REQUEST_BYTES_MAX)
        self._publisher.setsockopt(zmq.MAXMSGSIZE, _TOPIC_BYTES_MAX)
        self._connections = ListenerConnections(zmq)
        watched = (self._publisher, self._replay)
        self._monitors = [self._connections.watch(self._context, one) for one in watched]
        try:
            for socket, endpoint in zip(watched, self._endpoints, strict=True):
                socket.setsockopt(zmq.LINGER, LINGER_MS)
                socket.setsockopt(zmq.IPV6, 1 if "[" in endpoint else 0)
                socket.bind(endpoint)
        except zmq.ZMQError as e:
            self._context.destroy(0)
            os.close(self._wake_fd)
            raise UsageError("events", self._setting, f"{endpoint} cannot be bound: {e}") from e
        self._replay_at = self._replay.last_endpoint.decode()
        self._thread.start()
        self._cut(beat=True)

    def schedule(self) -> None:
        """Have what changed published once this turn of the loop is over."""
        if self._changes and not self._due:
            self._due = True
            self._loop.call_soon(self._cut)

    async def keep_beating(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_EVERY_S)
            self._cut(beat=True)

    def _cut(self, *, beat: bool = False) -> None:
        """Put what changed up to now into the queue, in few messages, or in none unless it is to
        `beat`."""
        self._due = False
        if self._ending:
            return
        stored, removed = self._changes.take()
        if removed and not self._core.blocks.listed:
            self._put(BlockChanges(True, [], []))
        else:
            for some in in_batches(removed, EVENT_KEYS_MAX):
                self._put(BlockChanges(False, list(some), []))
        for blocks in in_batches(stored, EVENT_KEYS_MAX):
            self._put(BlockChanges(False, [], list(blocks)))
        if beat and not stored and not removed:
            self._put(BlockChanges(False, [], []))
        self._wake()

    def _put(self, changes: BlockChanges) -> None:
        message = EventMessage(self._next, self._wall(), changes)
        self._next += 1
        if self._queued - self._sent + message.cost > EVENT_BACKLOG_MAX:
            self.left_out += 1
            return
        self._queued += message.cost
        self._queue.append(message)

    def _snapshot_soon(self) -> None:
        """Have a snapshot made for the thread, `SNAPSHOT_EVERY_S` after the last one at the
        earliest."""
        wait_s = self._snapshot_at + SNAPSHOT_EVERY_S - self._loop.time()
        self._loop.call_later(max(wait_s, 0.0), self._snapshot)

    def _snapshot(self) -> None:
        """Give the thread a snapshot of all blocks that are there."""
        if self._ending:
            return
        self._snapshot_at = self._loop.time()
        self._cut()
        self._snapshots.append(
            Snapshot(self._next - 1, self._wall(), self._core.blocks.listed.keys())
        )
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_write(self._wake_fd, 1)

    def stop(self, *, keep: bool) -> None:
        """Publish that no block is left, unless the node's next start is to `keep` them, and
        end."""
        if not self._thread.is_alive():
            return
        self._cut()
        if not keep:
            self._put(BlockChanges(True, [], []))
        self._core.blocks.changes = None
        self._ending = True
        self._wake()
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("the last block events were not sent in %s s", STOP_TIMEOUT_S)
            return  # it may still look at the descriptor
        os.close(self._wake_fd)

    # --- in the thread ----------------------------------------------------

    def _run(self) -> None:
        zmq = self._zmq
        poller = zmq.Poller()
        poller.register(self._replay, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        for monitor in self._monitors:
            poller.register(monitor, zmq.POLLIN)
        try:
            while not self._ending:
                poller.poll(LOOK_EVERY_MS if self._answers.stuck else None)
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
                self._connections.attend(self._monotonic())
                self._publish()
                if self._snapshots:
                    self._answers.renew(self._snapshots.popleft())
                self._take_requests()
                self._answers.give(self._send_answer, self._send_last, self._monotonic())
                if self._answers.needs_snapshot:
                    self._ask_loop()
            self._publish()
        except Exception as e:
            log.critical("events of the node's blocks end: %s", e, exc_info=e)
        finally:
            self._context.destroy(LINGER_MS)

    def _publish(self) -> None:
        while self._queue:
            message = self._queue.popleft()
            self._sent += message.cost
            payload = pack_changes(message.time_s, message.changes, self._medium)
            self._publisher.send_multipart([self._topic, sequence_bytes(message.sequence), payload])
            self._answers.keep(message, payload)

    def _take_requests(self) -> None:
        for _ in range(_REQUESTS_AT_ONCE):
            try:
                frames = self._replay.recv_multipart(self._zmq.NOBLOCK, copy=False)
                who, *between, asked = (frame.bytes for frame in frames)
                if between not in _BETWEEN:
                    raise ValueError(f"{len(between)} parts before it")
                start = sequence_of(asked)
                self._answers.asked([who, *between], start, self._connection_of(frames[-1]))
            except self._zmq.Again:
                break
            except (PeerError, ValueError) as e:
                log.debug("a request for events: %s", e)
        else:
            self._wake()  # there may be more

    def _connection_of(self, frame: ReceivedFrame) -> ListenerConnection:
        fd: int | None = None
        with suppress(self._zmq.ZMQError):  # it does not know it of every transport
            fd = frame.get(self._zmq.SRCFD)
        return ListenerConnection(fd, self._replay_at)

    def _ask_loop(self) -> None:
        self._answers.needs_snapshot = False
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._snapshot_soon)

    def _send_answer(self, parts: list[bytes]) -> None:
        self._replay.send_multipart(parts, copy=False)

    def _send_last(self, parts: list[bytes]) -> Tracker:
        *others, last = parts
        frame = self._zmq.Frame(last, track=True, copy=False)
        tracker: Tracker = frame.tracker
        self._replay.send_multipart([*others, frame], copy=False)
        return tracker
