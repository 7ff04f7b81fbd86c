"""Knows the connection by which a question to a ZeroMQ socket came, and can hang up on it.

ZeroMQ names a listener, but neither says when it is gone nor drops it on demand (only drafts of it
do); a message tells the descriptor it was read from, though. ZeroMQ may have closed that by now,
and the process have opened something else under its number. So a descriptor counts only together
with the number that the kernel gave to what it stood for, and it is shut down only if it is bound
to the address of the ZeroMQ socket: nothing else of the process may ever be.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress


class ListenerConnection:
    """What the descriptor `fd` stands for now. Where it is `None` nothing is known of it: it is
    never gone, and nobody hangs up on it."""

    def __init__(self, fd: int | None, endpoint: str) -> None:
        """`endpoint` as ZeroMQ says it of the socket that the question came to."""
        self._fd = fd
        self._endpoint = endpoint
        self._identity = None if fd is None else _identity(fd)

    @property
    def gone(self) -> bool:
        """Whether it was closed."""
        if self._fd is None:
            return False
        return self._identity is None or self._identity != _identity(self._fd)

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


def _identity(fd: int) -> tuple[int, int] | None:
    """What the kernel calls what is open under that number; `None` if nothing is."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_at(connection: socket.socket, endpoint: str) -> bool:
    """Whether its own end has the path, or the port, of that endpoint."""
    address = connection.getsockname()
    if connection.family == socket.AF_UNIX:
        name = address if isinstance(address, str) else f"@{os.fsdecode(address[1:])}"
        return endpoint == f"ipc://{name}"
    return endpoint.rpartition(":")[2] == str(address[1])
