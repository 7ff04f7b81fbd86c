"""Models the control socket with faults: messages lost, doubled, out of order, late.

A real Unix socket does none of this to one connection. The protocol is held to
it all the same, so that it may be carried by something else one day.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgpack

from kvstore.node.control.control_server import Connection
from kvstore.testing.sim.scheduler import Actor, Process
from kvstore.types import KEY_BYTES

if TYPE_CHECKING:
    from kvstore.testing.sim.node import SimLoop
    from kvstore.testing.sim.world import World

ASKS, ANSWERS = 0, 1
DELAY_S = 0.5e-3
DOUBLED_AFTER_S = 0.1
LONG_DELAY_MAX_S = 3.0
FIRST_DELAYED = 5
"""The first message waits for a busy node to accept the connection, too."""
SEEN_LOST_S = 0.01
"""How soon one side notices that the other has hung up, at most."""


class SentMessage:
    """Shows what was sent at once, a message or several, in a trace; it is read only when somebody
    reads the trace."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def __str__(self) -> str:
        unpacker = msgpack.Unpacker(max_buffer_size=len(self._raw))
        unpacker.feed(self._raw)
        return " + ".join(map(self._words, unpacker))

    @staticmethod
    def _words(message: Iterable[object]) -> str:
        words = []
        for announcement in message:
            if (
                isinstance(announcement, bytes)
                and announcement
                and len(announcement) % KEY_BYTES == 0
            ):
                announcement = [
                    announcement[i + 8 : i + 12].hex()
                    for i in range(0, len(announcement), KEY_BYTES)
                ]
            words.append(re.sub(r"b'.{40,}?'", "b'...'", str(announcement)))
        return " ".join(words)


class Wire:
    """Models one connection. What is sent arrives by the world's timers."""

    def __init__(
        self, world: World, client: SimSocket, connection: Connection, loop: SimLoop
    ) -> None:
        self._world = world
        self._client = client
        self._connection = connection
        self._loop = loop
        self._arrives_at = [0.0, 0.0]
        self.broken = False
        self.ended = False
        """The node was told that it is broken."""

    def to_node(self, data: bytes) -> None:
        def deliver() -> None:
            if not self.ended:
                self._loop.call_soon(self._connection.data_received, data)

        self._carry(ASKS, data, deliver)

    def to_client(self, data: bytes) -> None:
        self._carry(ANSWERS, data, lambda: self._client.arrived(data))

    def _carry(self, direction: int, data: bytes, deliver: Callable[[], None]) -> None:
        world, rng, faults = self._world, self._world.rng, self._world.faults
        world.note(("asks", "answers")[direction], SentMessage(data), self._client.name)
        silent = direction in self._loop.lost
        if self.broken or silent or rng.random() < faults.dropped:
            world.note("message lost")
            return
        arrives_at = world.now + rng.expovariate(1 / DELAY_S)
        first = not self._arrives_at[direction]
        if rng.random() < faults.delayed * (FIRST_DELAYED if first else 1):
            arrives_at += rng.random() * LONG_DELAY_MAX_S
        if rng.random() >= faults.reordered:
            arrives_at = self._arrives_at[direction] = max(arrives_at, self._arrives_at[direction])
        world.at(arrives_at, deliver)
        if rng.random() < faults.doubled:
            world.at(arrives_at + rng.expovariate(1 / DOUBLED_AFTER_S), deliver)

    def hang_up(self) -> None:
        """Close it: either side did, or was closed by death, and the other will see it."""
        if self.broken:
            return
        self.broken = True
        self._client.lost_soon()
        soon_s = self._world.rng.random() * SEEN_LOST_S
        # What was sent before is read before the end is.
        at = max(self._world.now + soon_s, self._arrives_at[0])
        self._world.at(at, self._end)

    def _end(self) -> None:
        self.ended = True
        self._loop.call_soon(self._connection.connection_lost, None)


_numbers = itertools.count()


class SimTransport:
    """Does what `Connection` needs of an asyncio transport."""

    def __init__(self) -> None:
        self.wire: Wire | None = None

    def write(self, data: bytes) -> None:
        assert self.wire is not None
        self.wire.to_client(data)

    def is_closing(self) -> bool:
        return self.wire is None or self.wire.ended

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Do nothing: what is sent meanwhile waits in the connection."""

    resume_reading = pause_reading

    def abort(self) -> None:
        assert self.wire is not None
        self.wire.hang_up()


class SimSocket:
    """Does what `ControlChannel` needs of a socket."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        self.name = f"{process.name}/{next(_numbers)}"
        self._timeout_s = 0.0
        self._inbox: deque[bytes] = deque()
        self._wire: Wire | None = None
        self._lost = False
        self._closed = False
        self._waiting: Actor | None = None

    def getsockopt(self, level: int, option: int, size_bytes: int) -> bytes:
        raise OSError("nobody can tell whose process is at the other end")

    def settimeout(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def connect(self, path: str) -> None:
        self._world.pause()
        node = self._world.listening.get(path)
        if node is None:
            raise ConnectionRefusedError(path)
        self._wire = node.accept(self)
        self._world.wires.append((self._process, self._wire))

    def sendall(self, data: bytes) -> None:
        self._world.pause()
        self.send(data)

    def send(self, data: bytes) -> int:
        if self._wire is None or self._lost or self._wire.broken:
            raise BrokenPipeError
        self._wire.to_node(data)
        return len(data)

    def recv(self, size_bytes: int) -> bytes:
        world = self._world
        give_up_at = world.now + self._timeout_s
        self._waiting = world.current
        while not self._inbox:
            if self._lost:
                return b""
            if world.now >= give_up_at:
                raise TimeoutError
            world.wait(give_up_at)
        world.pause()
        return self._inbox.popleft()

    def arrived(self, data: bytes) -> None:
        if not (self._lost or self._closed):
            self._inbox.append(data)
            self._wake()

    def lost_soon(self) -> None:
        self._world.after(self._world.rng.random() * SEEN_LOST_S, self._see_lost)

    def _see_lost(self) -> None:
        self._lost = True
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None:
            self._waiting.notify()

    def close(self) -> None:
        self._closed = True
        if self._wire is not None and not self._process.dead:
            self._wire.hang_up()
