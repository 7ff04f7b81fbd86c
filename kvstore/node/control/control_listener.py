"""Listens at a node's control socket, for as long as the node lives.

asyncio's own server for Unix sockets, when the process has no file descriptor left, tells of it
once for each place in its queue, a thousand times a second, and knows nothing of a socket whose
file was taken away. Here a connection that cannot be taken waits in the kernel's queue, and the
log has one line in a while.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvstore.node.control.permissions import give
from kvstore.node.seldom import Seldom
from kvstore.system.on_failure import on_failure

log = logging.getLogger("kvstore.node")

BACKLOG = 1024
"""Connections that wait in the kernel: as many as clients may be (`Limits.clients`), because all
engines of a host may start together."""
ACCEPTED_AT_ONCE = 64
"""Connections that are accepted before existing ones are served again."""
ACCEPT_PAUSE_S = 0.2
"""Pause after a connection that could not be accepted, for example because the process has no
descriptor left."""


class ControlListener:
    """The socket at one path. The thread of the node's event loop alone uses it."""

    def __init__(
        self,
        path: Path,
        make: Callable[[], asyncio.BaseProtocol],
        node: str,
        group: int | None,
    ) -> None:
        """Prepare to listen. `make` gives the protocol of a new connection. With `group`, its
        members may connect; `node` is the name for the log."""
        self._path = path
        self._make = make
        self._node = node
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._say = Seldom(log)
        self._entering: set[asyncio.Task[object]] = set()
        self._resume: asyncio.TimerHandle | None = None
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Listen at the path, where nothing is. Raises `OSError`."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with on_failure(listener.close):
            listener.bind(str(self._path))
            # Nobody can connect before it listens, and by then the rights are right.
            if self._group is None:
                self._path.chmod(0o600)
            else:
                give(self._path, self._group, 0o660)
            listener.setblocking(False)
            listener.listen(BACKLOG)
            self._there = self._path.lstat()
        self._socket = listener
        self._loop.add_reader(listener, self._accept)

    def open_again(self) -> bool:
        """Listen anew if the socket's file was taken away or replaced. Return whether it was. Those
        who are connected stay so. Raises `OSError`."""
        try:
            if os.path.samestat(self._there, self._path.lstat()):
                return False
        except FileNotFoundError:
            pass
        else:
            self._path.unlink()
        self._accept()  # who came in time
        self.close()
        self.open()
        return True

    def close(self) -> None:
        """Listen no more. Safe to call twice."""
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None
        listener, self._socket = self._socket, None
        if listener is not None:
            self._loop.remove_reader(listener)
            listener.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            if self._socket is None:
                return
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as e:
                more = "; see `ulimit -n`"
                text = "node %s cannot take new clients: %s" + more
                self._say.warning(text, self._node, e.strerror)
                self._loop.remove_reader(self._socket)
                if self._resume is not None:
                    self._resume.cancel()
                self._resume = self._loop.call_later(ACCEPT_PAUSE_S, self._watch)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._enter(connection))
            self._entering.add(task)
            task.add_done_callback(self._entering.discard)

    def _watch(self) -> None:
        self._resume = None
        if self._socket is not None:
            self._loop.add_reader(self._socket, self._accept)

    async def _enter(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, connection)
        except OSError as e:
            with suppress(OSError):
                connection.close()
            self._say.warning("node %s lost a client as it came: %s", self._node, e)
