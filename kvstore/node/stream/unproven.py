"""Limits connections that have not yet proved to know the secret.

They have a pool of their own, so that they take no room from others, and little time.
"""

from __future__ import annotations

import socket
import time

from kvstore.limits import STREAM_UNPROVEN_MAX
from kvstore.system.descriptors import share
from kvstore.system.waiting import Waiting


class Guest:
    """A connection to the stream server."""

    __slots__ = ("address", "came_at", "fd", "idle_since", "socket")

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.socket = connection
        self.fd = connection.fileno()
        self.address = address
        self.came_at = time.monotonic()
        self.idle_since: float | None = None
        """None while it has a request, and before it has proved that it may ask."""


class Unproven(Waiting[Guest]):
    """Connections that have not proved that they know the secret. Not thread-safe."""

    def let_in(self, guest: Guest) -> Guest | None:
        """Let `guest` in; returns the connection to hang up on for it, if any."""
        return self.enter(guest, guest.address, share(STREAM_UNPROVEN_MAX, 16))
