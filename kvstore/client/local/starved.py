"""Tells whether a process is slow because it gets no processor."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")


def processor_wanted_s(connection: socket.socket) -> float | None:
    """How long the peer's first thread has run or stood in line for a processor, in seconds.

    It grows while the peer is starved, and stands still while it is stopped or waits for
    something else. None where nobody can tell: in a container that does not see the peer's
    process, or on a kernel without these figures.
    """
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return None
    return wanted_by_s(_CREDENTIALS.unpack(raw)[0])


def wanted_by_s(pid: int) -> float | None:
    """As `processor_wanted_s`, of a process of this host."""
    try:
        ran_ns, waited_ns = Path(f"/proc/{pid}/schedstat").read_text().split()[:2]
        return (int(ran_ns) + int(waited_ns)) / 1e9
    except (OSError, ValueError):
        return None
