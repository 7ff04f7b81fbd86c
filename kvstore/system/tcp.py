"""Opens TCP connections by a deadline, which covers the look-up of the host's name too.

`getaddrinfo` has no time-out and cannot be called off, so a thread waits for it. `listen` is the
other end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence

from kvstore.limits import NAMES_KEPT_MAX, NAMES_LOOKED_UP_MAX
from kvstore.system.threads import interpreter_ends

NAME_KEPT_S = 6.0
"""Seconds for which an answer is used, longer than any pause between two tries
(`retry_after_max_s`): a name server that is slower than one caller's deadline serves the next
call."""
BACKLOG = 1024
_KINDS = (socket.AF_INET, socket.AF_INET6)
_Address = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
_Found = Sequence[tuple[socket.AddressFamily, socket.SocketKind, int, str, _Address]]
"""What `getaddrinfo` returns."""


def connect(host: str, port: int, deadline: float) -> socket.socket:
    """Return a connection, with TCP_NODELAY, to the first address of `host` that accepts it. An
    address that does not answer gets its share of the time only, because its network may be down.

    `deadline` is in seconds of `time.monotonic`. Raises `OSError`: `TimeoutError` when it has
    passed, `socket.gaierror` when there is no such name.
    """
    error: OSError = OSError(f"{host} has no address")
    found = addresses(host, port, deadline)
    for i, (kind, style, protocol, _, address) in enumerate(found):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"timed out connecting to {host}")
        connection = None
        try:
            connection = socket.socket(kind, style, protocol)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(left_s / (len(found) - i))
            connection.connect(address)
            return connection
        except OSError as e:
            error = e
            if connection is not None:
                connection.close()
    raise error


def addresses(host: str, port: int, deadline: float) -> _Found:
    """Return the addresses of `host`, as `socket.getaddrinfo` returns them for TCP.

    Raises `TimeoutError` at `deadline` (seconds of `time.monotonic`), and `OSError` when the name
    cannot be looked up.
    """
    if _is_address(host):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return _names.find((host, port), deadline)


def _is_address(host: str) -> bool:
    for kind in _KINDS:
        try:
            socket.inet_pton(kind, host)
        except (OSError, ValueError):  # a null character, a lone surrogate
            continue
        return True
    return False


class _LookUp:
    """One question to the resolver. Its thread writes it, then sets `done`."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.good_until = 0.0
        self.found: _Found = []
        self.error: OSError | None = None


class _Names:
    """Names that were looked up lately: all who ask for one wait for the same thread, and use its
    answer for `NAME_KEPT_S`."""

    def __init__(self) -> None:
        self._fill()
        os.register_at_fork(after_in_child=self._fill)  # threads do not come along

    def _fill(self) -> None:
        self._lock = threading.Lock()
        self._look_ups: dict[tuple[str, int], _LookUp] = {}
        self._under_way = 0

    def find(self, name: tuple[str, int], deadline: float) -> _Found:
        look_up = self._look_up(name)
        if not look_up.done.wait(max(deadline - time.monotonic(), 0.0)):
            raise TimeoutError(f"{name[0]}: timed out: the name server did not answer")
        if look_up.error is not None:
            raise look_up.error
        return look_up.found

    def _look_up(self, name: tuple[str, int]) -> _LookUp:
        with self._lock:
            kept = self._look_ups.get(name)
            if kept is not None and not (
                kept.done.is_set() and time.monotonic() >= kept.good_until
            ):
                return kept
            if self._under_way >= NAMES_LOOKED_UP_MAX:
                raise TimeoutError(f"{name[0]}: name servers have not answered earlier questions")
            look_up = _LookUp()
            thread = threading.Thread(
                target=self._ask, args=(name, look_up), name="kvstore-name", daemon=True
            )
            here = False
            try:
                thread.start()
            except RuntimeError as e:
                here = interpreter_ends(e)
                if not here:
                    raise OSError(f"{name[0]}: no thread to look it up: {e}") from e
            self._under_way += 1
            self._look_ups.pop(name, None)
            if len(self._look_ups) >= NAMES_KEPT_MAX:
                self._look_ups.pop(next(iter(self._look_ups)))
            self._look_ups[name] = look_up
        if here:
            self._ask(name, look_up)
        return look_up

    def _ask(self, name: tuple[str, int], look_up: _LookUp) -> None:
        try:
            look_up.found = socket.getaddrinfo(*name, type=socket.SOCK_STREAM)
            look_up.good_until = time.monotonic() + NAME_KEPT_S
        except OSError as e:  # asked again by the next
            look_up.error = e
        except ValueError as e:
            look_up.error = OSError(f"{name[0]!r} is no host name: {e}")
        finally:
            with self._lock:
                self._under_way -= 1
            look_up.done.set()


_names = _Names()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at `host`; without a host, at every address of this machine, of
    IPv6 too if it has that. Raises `OSError` and what `socket` raises for a bad address."""
    if not host:
        with contextlib.suppress(OSError):  # a kernel may know no IPv6, or have it turned off
            return listen("::", port)
    return socket.create_server(
        (host, port),
        family=socket.AF_INET6 if ":" in host else socket.AF_INET,
        backlog=BACKLOG,
        dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
    )
