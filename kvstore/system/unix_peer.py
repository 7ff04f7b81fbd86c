"""Says whose process is at the other end of a Unix socket."""

from __future__ import annotations

import socket
import struct

_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid


def peer_uid(connection: socket.socket) -> int:
    """Return the user at the other end, as the kernel noted it at connect, or at listen.

    Raises `OSError`.
    """
    return _credentials(connection)[1]


def peer_pid(connection: socket.socket) -> int:
    """Return the process at the other end. Raises `OSError`."""
    return _credentials(connection)[0]


def _credentials(connection: socket.socket) -> tuple[int, ...]:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return _UCRED.unpack(raw)
