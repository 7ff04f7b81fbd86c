"""Accepts the router's clients: a few at a time, each with a deadline for its request's head, and
no more idle ones than a share of the files that the router may open.

aiohttp speaks HTTP with them. asyncio's own server, with no file descriptor left, would log each
place in its queue, a hundred times a second.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, cast

from connector.limits import ROUTER_HEAD_TIMEOUT_S, ROUTER_IDLE_CLIENTS_MAX, ROUTER_IDLE_TIMEOUT_S
from connector.rate import Rate
from kvstore.spi import Waiting, open_files_share

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger("kvstore.router")

BACKLOG = 1024
ACCEPTED_AT_ONCE = 16
"""Connections that are accepted before existing ones are served again."""
ACCEPT_PAUSE_S = 0.05
"""Pause after a connection that could not be accepted, or for which there is no room: it waits in
the kernel's queue."""
IDLE_MIN_S = 1.0
"""Time for which no idle connection is closed for another: many may arrive together, each with a
request."""
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_no_descriptors = Rate(1, 60.0)


def say_no_descriptors(error: object) -> None:
    """Log that this process has no file descriptor left, once a minute."""
    if _no_descriptors.allows(time.monotonic()):
        log.warning("no file descriptor is left: %s; see `ulimit -n`", error)


class ClientConnection:
    """A client's connection: what asyncio tells of it goes on to aiohttp's protocol. It is idle
    until a request's head is there, and after each answer."""

    def __init__(self, acceptor: Acceptor, protocol: asyncio.Protocol) -> None:
        self._acceptor = acceptor
        self._protocol = protocol

    def __getattr__(self, name: str) -> object:
        attribute: object = getattr(self._protocol, name)
        return attribute

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._address = (transport.get_extra_info("peername") or ("",))[0]
        self._protocol.connection_made(transport)
        self._rest(ROUTER_HEAD_TIMEOUT_S)

    def connection_lost(self, error: Exception | None) -> None:
        self.begin()
        self._acceptor.busy.discard(self)
        self._protocol.connection_lost(error)

    def begin(self) -> None:
        """Note that a request's head is there."""
        self._acceptor.idle.leave(self)
        self._acceptor.busy.add(self)
        self._timer.cancel()

    def end(self) -> None:
        """Note that the request was answered."""
        self._acceptor.busy.discard(self)
        if not self._transport.is_closing():
            self._rest(ROUTER_IDLE_TIMEOUT_S)

    def hang_up(self) -> None:
        self._acceptor.idle.leave(self)
        self._transport.abort()

    def _rest(self, timeout_s: float) -> None:
        self.idle_since = time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self.hang_up)
        self._acceptor.idle.enter(self, self._address)


@contextmanager
def busy(request: web.Request) -> Iterator[None]:
    """Keep a request's connection from being closed as an idle one."""
    client = None if request.transport is None else request.transport.get_protocol()
    if not isinstance(client, ClientConnection):  # another server's
        yield
        return
    client.begin()
    try:
        yield
    finally:
        client.end()


class Acceptor:
    """All clients of one router."""

    def __init__(self, make: Callable[[], asyncio.Protocol]) -> None:
        """`make` gives aiohttp's protocol for a new connection."""
        self._make = make
        self.idle, self.busy = Waiting[ClientConnection](), set[ClientConnection]()
        self._loop = asyncio.get_running_loop()
        self._listeners: list[socket.socket] = []
        self._entering: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> None:
        """Accept clients at all addresses of `host`. Raises `OSError`."""
        # It looks the name up and binds; what it would accept is accepted here.
        bound = await self._loop.create_server(asyncio.Protocol, host, port, start_serving=False)
        self._listeners = [socket.socket(fileno=os.dup(one.fileno())) for one in bound.sockets]
        bound.close()
        for listener in self._listeners:
            listener.setblocking(False)
            listener.listen(BACKLOG)
            self._watch(listener)

    def close(self) -> None:
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()

    def _watch(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self._loop.add_reader(listener, self._accept, listener)

    def _has_room(self) -> bool:
        """Return whether one more may come in; where there is none, one that had its time goes for
        it."""
        most = open_files_share(ROUTER_IDLE_CLIENTS_MAX, 2) - 2 * len(self.busy)
        most = max(most, open_files_share(ROUTER_IDLE_CLIENTS_MAX, 16))
        if len(self.idle) + len(self._entering) < most:
            return True
        goes = self.idle.next()
        if goes is None or time.monotonic() < goes.idle_since + IDLE_MIN_S:
            return False
        goes.hang_up()
        return True

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            connection = None
            try:
                if self._has_room():
                    connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as e:
                say_no_descriptors(e)
            if connection is None:
                self._loop.remove_reader(listener)
                self._loop.call_later(ACCEPT_PAUSE_S, self._watch, listener)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._enter(connection))
            self._entering.add(task)
            task.add_done_callback(self._entering.discard)

    async def _enter(self, connection: socket.socket) -> None:
        client = cast("asyncio.Protocol", ClientConnection(self, self._make()))
        with suppress(OSError):
            await self._loop.connect_accepted_socket(lambda: client, connection)
