"""Hands memory of a device to another process of this host: a name, a size and a descriptor.

They go over a Unix socket, in one message. A descriptor crosses PID namespaces, so containers
that share the socket's directory too, which legacy IPC handles do not.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from kvstore.cuda.base import SHARED_NAME_BYTES, Shared
from kvstore.system.unix_peer import peer_uid

SIZE_BYTES = 8
MESSAGE_BYTES = SHARED_NAME_BYTES + SIZE_BYTES


def hand_over(connection: socket.socket, shared: Shared) -> None:
    """Send `shared` to the other end; this process's descriptor stays open. Raises `OSError`."""
    message = shared.name + shared.size_bytes.to_bytes(SIZE_BYTES, "little")
    socket.send_fds(connection, [message], [shared.fd])


def take_over(path: Path, owner: int, timeout_s: float) -> Shared:
    """Return the memory that is handed over at the socket `path`; its descriptor is the caller's to
    close.

    Raises `OSError` when nobody hands any over within `timeout_s`, when what comes is something
    else, and when it is not the user `owner` who listens: he alone says what is in that memory.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        if peer_uid(connection) != owner:
            raise PermissionError(f"{path} is not of user {owner}")
        message, fds, _, _ = socket.recv_fds(
            connection, MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC | socket.MSG_WAITALL
        )
    if len(message) != MESSAGE_BYTES or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise OSError(f"{path} handed over {len(message)} bytes and {len(fds)} descriptors")
    size_bytes = int.from_bytes(message[SHARED_NAME_BYTES:], "little")
    return Shared(message[:SHARED_NAME_BYTES], size_bytes, fds[0])
