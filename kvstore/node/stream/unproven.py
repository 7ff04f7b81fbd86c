"""Limits connections that have not yet proved to know the secret.

They have a pool of their own, so that they take no room from others, with a share for each
address, and little time.
"""

from __future__ import annotations

import socket
import time

from kvstore.limits import STREAM_UNPROVEN_MAX, STREAM_UNPROVEN_PER_ADDRESS_MAX


class Guest:
    """A connection to the stream server."""

    __slots__ = ("address", "came_at", "fd", "idle_since", "socket")

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.socket = connection
        self.fd = connection.fileno()
        self.address = address
        self.came_at = time.monotonic()
        self.idle_since: float | None = None
        """None while it is asked for something, and before it has proved that it may ask."""


class Unproven:
    """The connections that have not proved it yet. Not thread-safe."""

    def __init__(self) -> None:
        self.guests: dict[Guest, None] = {}
        """In the order in which they came."""

    def enter(self, guest: Guest) -> Guest | None:
        """Let `guest` in; returns the connection to hang up on for it, if any: the one that came
        first of the same address, when that has its share, else of all, when there is no room."""
        same = [one for one in self.guests if one.address == guest.address]
        goes: Guest | None = None
        if len(same) >= STREAM_UNPROVEN_PER_ADDRESS_MAX:
            goes = same[0]
        elif len(self.guests) >= STREAM_UNPROVEN_MAX:
            goes = next(iter(self.guests))
        if goes is not None:
            self.leave(goes)
        self.guests[guest] = None
        return goes

    def leave(self, guest: Guest) -> None:
        self.guests.pop(guest, None)
