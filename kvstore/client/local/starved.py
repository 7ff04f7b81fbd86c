"""Tells whether a process is slow because it gets no processor."""

from __future__ import annotations

import socket
from pathlib import Path

from kvstore.system.interruption import let_through
from kvstore.system.unix_peer import peer_pid


def processor_wanted_s(connection: socket.socket) -> float | None:
    """Return how long the peer's first thread has run or stood in line for a processor, in seconds.

    It grows while the peer is starved, and stands still while it is stopped or waits for
    something else. None where nobody can tell: in a container that does not see the peer's
    process, or on a kernel without these figures.
    """
    try:
        pid = peer_pid(connection)
    except OSError as e:
        let_through(e)
        return None
    return wanted_by_s(pid)


def wanted_by_s(pid: int) -> float | None:
    """As `processor_wanted_s`, of a process of this host."""
    try:
        ran_ns, waited_ns = Path(f"/proc/{pid}/schedstat").read_text().split()[:2]
        return (int(ran_ns) + int(waited_ns)) / 1e9
    except (OSError, ValueError) as e:
        let_through(e)
        return None
