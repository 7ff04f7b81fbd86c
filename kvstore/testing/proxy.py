"""Puts a TCP proxy before a server: the proxy is slow, silent, rude or noisy on request."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

CHUNK_BYTES = 64 << 10
CONNECT_TIMEOUT_S = 5.0
_POLL_S = 0.01
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of no seconds: close sends RST."""


class FaultyProxy:
    """Stands between clients and one server; faults take effect on connections that are open.

    `connect` opens a connection to the server. Use `address` instead of the server's.
    Threads end with their connections, at the latest when the proxy is closed.
    """

    def __init__(
        self, connect: Callable[[], socket.socket], *, address: tuple[str, int] = ("127.0.0.1", 0)
    ) -> None:
        self.delay_s = 0.0
        """How long every chunk is held, each way."""
        self.silent = False
        """Nothing is passed on; what arrives meanwhile waits."""
        self.flip: Callable[[bytearray], None] | None = None
        """Called with every chunk that the server sends, to change it, also its length; what
        raises `OSError` ends the connection."""
        self.flip_requests: Callable[[bytearray], None] | None = None
        """The same for what clients send."""
        self._connect = connect
        self._listener = socket.create_server(address)
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._closed = False
        self.accepted = 0
        """Connections so far."""
        threading.Thread(target=self._accept, name="faulty-proxy", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        """Return the host and port to connect to."""
        host, port = self._listener.getsockname()
        return host, port

    def reset(self) -> int:
        """End every open connection with RST; returns how many there were."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                self._hang_up(end)
        return len(pairs)

    @staticmethod
    def _hang_up(end: socket.socket) -> None:
        with suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        with suppress(OSError):
            end.shutdown(socket.SHUT_RD)  # wakes the thread that reads it
        end.close()

    def close(self) -> None:
        """Reset every connection and refuse new ones. Safe to call twice."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                front, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            try:
                behind = self._connect()
            except OSError:
                self._hang_up(front)
                continue
            behind.settimeout(None)
            with self._lock:
                self._pairs.append((front, behind))
            for source, target, answers in ((front, behind, False), (behind, front, True)):
                threading.Thread(
                    target=self._pass_on, args=(source, target, answers), daemon=True
                ).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        try:
            while chunk := source.recv(CHUNK_BYTES):
                self._hold()
                flip = self.flip if answers else self.flip_requests
                if flip is not None:
                    changed = bytearray(chunk)
                    flip(changed)
                    chunk = bytes(changed)
                target.sendall(chunk)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            self._hang_up(source)
            self._hang_up(target)

    def _hold(self) -> None:
        release_at = time.monotonic() + self.delay_s
        while not self._closed and (self.silent or time.monotonic() < release_at):
            time.sleep(min(_POLL_S, max(0.001, release_at - time.monotonic())))
