"""Tracks the connections to the ZeroMQ sockets of a node's events, and can close them.

ZeroMQ names a listener, but neither says when it is gone nor drops it on demand (only drafts of it
do); a message tells the descriptor it was read from, though. ZeroMQ may have closed that by now,
and the process have opened something else under its number. So a descriptor counts only together
with the number that the kernel gave to what it stood for, and it is shut down only if it is bound
to the address of the ZeroMQ socket: nothing else of the process may ever be.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from contextlib import suppress
from functools import cached_property
from types import ModuleType
from typing import Protocol

from kvstore.limits import EVENT_CONNECTIONS_MAX
from kvstore.system.descriptors import share
from kvstore.system.waiting import Waiting

GREETING_MS = 2000
"""Time that a connection may take to show that it speaks ZeroMQ; then ZeroMQ closes it."""
_AT_ONCE = 256
_EVENT = struct.Struct("=hi")


class _Socket(Protocol):
    """The part of `zmq.Socket` that is used."""

    def setsockopt(self, option: int, value: int) -> None: ...

    def monitor(self, address: str, events: int) -> None: ...

    def connect(self, address: str) -> object: ...

    def recv_multipart(self, flags: int) -> list[bytes]: ...


class _Context(Protocol):
    """The part of `zmq.Context` that is used."""

    def socket(self, kind: int) -> _Socket: ...


class ListenerConnection:
    """The connection that the descriptor `fd` stands for now. With `None` nothing is known of it:
    it is never gone, and nobody disconnects it."""

    def __init__(self, fd: int | None, endpoint: str) -> None:
        """Identify the connection now. `endpoint` is that of the socket to which the question came,
        as ZeroMQ writes it."""
        self._fd = fd
        self._endpoint = endpoint
        self._identity = None if fd is None else _identity(fd)

    @property
    def gone(self) -> bool:
        """Return whether it was closed."""
        if self._fd is None:
            return False
        return self._identity is None or self._identity != _identity(self._fd)

    @cached_property
    def address(self) -> str:
        """Return the host at its other end; empty for a peer of this host by a path, or for a
        closed connection."""
        if self._fd is not None:
            with suppress(OSError), socket.socket(fileno=os.dup(self._fd)) as connection:
                peer = connection.getpeername()
                return str(peer[0]) if isinstance(peer, tuple) else ""
        return ""

    def hang_up(self) -> None:
        """End it, unless it was closed. ZeroMQ sees that as the listener's doing, and drops what
        waits for it."""
        if self._fd is None:
            return
        with suppress(OSError), socket.socket(fileno=os.dup(self._fd)) as connection:
            # Of the copy, under whose number nothing else can come.
            same = self._identity == _identity(connection.fileno())
            if same and _is_at(connection, self._endpoint):
                connection.shutdown(socket.SHUT_RDWR)


class ListenerConnections:
    """All connections to the sockets of one node's events. Not thread-safe.

    ZeroMQ tells when each comes and goes, but not that it has greeted: a connection older than
    `GREETING_MS` has. Where there is no room, one of the younger ones is disconnected first.
    """

    def __init__(self, zmq: ModuleType) -> None:
        self._zmq = zmq
        self._monitors: list[_Socket] = []
        self._known: dict[tuple[int, int], ListenerConnection] = {}
        """Connections by socket and descriptor."""
        self._came: deque[tuple[float, ListenerConnection]] = deque()
        """Connections that may not have greeted yet, with the time at which they came."""
        self._new, self._greeted = Waiting[ListenerConnection](), Waiting[ListenerConnection]()

    def watch(self, context: _Context, listening: _Socket) -> _Socket:
        """Hear of the connections of a ZeroMQ socket that is yet to be bound. `attend` is to be
        called when the socket that is returned can be read."""
        zmq, name = self._zmq, f"inproc://monitor-{len(self._monitors)}"
        listening.setsockopt(zmq.HANDSHAKE_IVL, GREETING_MS)
        listening.monitor(name, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        monitor = context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)  # else ZeroMQ's thread would wait for this one
        monitor.connect(name)
        self._monitors.append(monitor)
        return monitor

    def attend(self, now: float) -> None:
        """Note who has come and gone, and hang up on those who are too many."""
        most = share(EVENT_CONNECTIONS_MAX, 8)
        while self._came and self._came[0][0] < now - GREETING_MS / 1000:
            _, greeted = self._came.popleft()
            if self._new.leave(greeted):
                self._greeted.enter(greeted, greeted.address, most)
        for number, monitor in enumerate(self._monitors):
            for _ in range(_AT_ONCE):
                try:
                    event, endpoint = monitor.recv_multipart(self._zmq.NOBLOCK)
                except self._zmq.Again:
                    break
                what, fd = _EVENT.unpack(event)
                gone = self._known.pop((number, fd), None)
                if gone is not None and not self._new.leave(gone):
                    self._greeted.leave(gone)
                if what == self._zmq.EVENT_ACCEPTED:
                    one = ListenerConnection(fd, endpoint.decode())
                    self._known[number, fd] = one
                    self._came.append((now, one))
                    self._new.enter(one, one.address, most)
                    if len(self._new) + len(self._greeted) > most:
                        full = self._new if len(self._new) > 1 else self._greeted
                        if (goes := full.next()) is not None:
                            full.leave(goes)
                            goes.hang_up()


def _identity(fd: int) -> tuple[int, int] | None:
    """Return what the kernel calls what is open under that number; `None` if nothing is."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_at(connection: socket.socket, endpoint: str) -> bool:
    """Return whether its own end has the path, or the port, of that endpoint."""
    address = connection.getsockname()
    if connection.family == socket.AF_UNIX:
        name = address if isinstance(address, str) else f"@{os.fsdecode(address[1:])}"
        return endpoint == f"ipc://{name}"
    return endpoint.rpartition(":")[2] == str(address[1])
