"""Keeps connections to one Redis server: few, and each used by one call at a time.

redis-py opens them (TCP, TLS, Unix); hiredis parses. redis-py's own command path
costs 25 to 35 us a call before the first byte leaves, more than Redis needs for a
whole lookup, and its time-outs count per read; here one deadline spans the call.
"""

from __future__ import annotations

import re
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any, Final, TypeAlias

import hiredis
import redis.exceptions
from redis.connection import AbstractConnection
from redis.exceptions import RedisError

from kvstore.errors import IndexDeadlineError, IndexRefusedError, IndexUnavailableError
from kvstore.index.base import allowed_s
from kvstore.system.fork import in_each_child

READ_BYTES = 64 << 10
"""Bytes read at once; a reply to `REDIS_ARGS_MAX` keys fits."""
WRITE_AT_ONCE_BYTES = 64 << 10
"""A longer request may wait in the socket, so the time it takes is counted."""
SPARE_SHARE = 0.1
"""Share of a call's time by which it may be late. Setting another time on a socket is a system
call, and there are two for each call."""
ERROR_CHARS_MAX = 200
"""Characters of a server's error text in a message."""

_TOO_MANY = re.compile(rb"\n[*>~%|]\d{7}")
"""The head of a reply of a million items or more, which none of ours has. hiredis allocates as many
as the head claims before they arrive; freeing 16 GB takes 16 s, with the GIL held."""
_TOO_MANY_BYTES = 9

Reply: TypeAlias = Any
"""What hiredis makes of a reply: bytes, int, None, a list of them, or `ErrorReply`."""
ErrorReply: TypeAlias = hiredis.ReplyError


class LostReply:
    """Stands for the reply of a shard that could not be asked while others could."""

    __slots__ = ("why",)

    def __init__(self, why: IndexUnavailableError) -> None:
        self.why = why


Dial = Callable[[float], tuple[AbstractConnection, bytes, int]]
"""Opens a connection before that time (`monotonic`); returns what to send first, and how many
replies follow."""

_NOTHING: Final = object()
_GONE = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""The peer closed a connection that was fine: Redis was restarted, or the connection was idle too
long."""
FAILURES = (RedisError, OSError, hiredis.HiredisError, ValueError, MemoryError)
"""Everything that connecting, sending and parsing raise."""


class Link:
    """One connection. It is dropped at the first error, never resumed."""

    __slots__ = (
        "__weakref__",
        "_buffer",
        "_connection",
        "_dial",
        "_reader",
        "_sock",
        "_tail",
        "_timeout_s",
    )

    def __init__(self, dial: Dial, timeout_s: float) -> None:
        self._dial = dial
        self._timeout_s = timeout_s
        self._connection: AbstractConnection | None = None
        self._sock: socket.socket | None = None
        self._reader = hiredis.Reader()
        self._buffer = bytearray()
        self._tail = b"\n"
        """The end of what was received."""

    def run(
        self, request: bytes, replies: int, deadline: float, *, again: bool = True
    ) -> list[Reply]:
        """Send `request`, return its `replies`; error replies are values in the list.

        A kept connection that the server has closed is opened `again`, once: every
        request this index sends may be sent twice.
        """
        kept = self._sock is not None
        try:
            sock = self._ready(deadline) if self._sock is None else self._sock
            # Who has waited for a connection has less than its socket waits for; who is patient,
            # more.
            left_s = deadline - monotonic()
            other = not self._timeout_s * (1 - SPARE_SHARE) <= left_s <= self._timeout_s
            if other:
                sock.settimeout(_left(deadline))
            sock.sendall(request)
            hurried = not kept or other or len(request) > WRITE_AT_ONCE_BYTES
            return self._replies(replies, deadline, hurried=hurried)
        except BaseException as e:
            self.drop()
            if not (kept and again and isinstance(e, _GONE)):
                raise
        return self.run(request, replies, deadline)

    def run_each(self, requests: Iterator[bytes], deadline: float) -> list[Reply]:
        """Do as `run`, for requests of one reply each that are sent while they are made: the server
        works on the first while the next is made."""
        kept = self._sock is not None
        made: list[bytes] = []
        try:
            sock = self._ready(deadline)
            for request in requests:
                made.append(request)
                sock.settimeout(_left(deadline))
                sock.sendall(request)
            return self._replies(len(made), deadline, hurried=True)
        except BaseException as e:
            self.drop()
            if not (kept and isinstance(e, _GONE)):
                raise
        made += requests
        return self.run(b"".join(made), len(made), deadline)

    def run_here(self, request: bytes, replies: int, deadline: float) -> list[Reply]:
        """Do as `run` does, but only on the connection that is open: it has state that matters."""
        if self._sock is None:
            raise ConnectionResetError("connection closed")
        return self.run(request, replies, deadline, again=False)

    def send(self, request: bytes, deadline: float) -> None:
        """Do the first half of `run`, for requests to several servers at once."""
        try:
            sock = self._ready(deadline)
            if len(request) > WRITE_AT_ONCE_BYTES:  # those of other servers wait behind it
                sock.settimeout(_left(deadline))
            sock.sendall(request)
        except BaseException:
            self.drop()
            raise

    def receive(self, replies: int, deadline: float) -> list[Reply]:
        """Do the second half of `run`."""
        try:
            return self._replies(replies, deadline, hurried=True)
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        connection, self._connection, self._sock = self._connection, None, None
        if connection is not None:
            connection.disconnect()  # type: ignore[no-untyped-call]

    def _replies(self, count: int, deadline: float, *, hurried: bool) -> list[Reply]:
        """Read until there are `count`; `hurried` when part of the time is used up."""
        sock, buffer, reader = self._sock, self._buffer, self._reader
        if sock is None:
            raise ConnectionResetError("connection closed")
        out: list[Reply] = []
        while True:
            if hurried:
                sock.settimeout(_left(deadline))
            size = sock.recv_into(buffer)
            if size == 0:
                raise ConnectionResetError("connection closed by the server")
            seen = self._tail + buffer[:size]
            if _TOO_MANY.search(seen):
                raise hiredis.ProtocolError("a reply of more items than any of ours has")
            self._tail = seen[1 - _TOO_MANY_BYTES :]
            reader.feed(buffer, 0, size)  # type: ignore[arg-type]  # any buffer will do
            while (reply := reader.gets()) is not _NOTHING:
                out.append(reply)
            if len(out) >= count:
                break
            hurried = True
        if hurried:
            sock.settimeout(self._timeout_s)
        if len(out) > count or reader.has_data():
            raise hiredis.ProtocolError("more replies than requests")
        return out

    def _ready(self, deadline: float) -> socket.socket:
        if self._sock is not None:
            return self._sock
        connection, hello, replies = self._dial(deadline)
        sock: socket.socket | None = connection._sock
        if sock is None:
            raise ConnectionResetError("connection closed")
        self._connection, self._sock = connection, sock
        self._reader = hiredis.Reader(notEnoughData=_NOTHING)
        self._tail = b"\n"
        self._buffer = self._buffer or bytearray(READ_BYTES)
        if replies:
            sock.settimeout(_left(deadline))
            sock.sendall(hello)
            for reply in self._replies(replies, deadline, hurried=True):
                if isinstance(reply, ErrorReply):
                    raise RefusedError(reply)
        sock.settimeout(self._timeout_s)
        return sock


class RefusedError(Exception):
    """Raised when Redis does not let us in: wrong user name, password or db."""

    def __init__(self, reply: Exception) -> None:
        super().__init__(str(reply)[:ERROR_CHARS_MAX])


class Links:
    """The connections to one server, at most `links_max`, the last used taken first.

    A call that is interrupted between taking a connection and holding it never gives it back. Such
    a connection stops counting once nobody holds it, and another takes its place.
    """

    def __init__(self, dial: Dial, label: str, *, timeout_s: float, links_max: int) -> None:
        self._dial = dial
        self.label = label
        self.timeout_s = timeout_s
        self._links_max = links_max
        self._closed = False
        self._fill()
        in_each_child(self)

    def _fill(self) -> None:
        self._idle = [Link(self._dial, self.timeout_s) for _ in range(self._links_max)]
        self._alive = weakref.WeakSet(self._idle)
        self._waiting = 0
        self._lock = threading.RLock()
        self._returned = threading.Condition(self._lock)

    def run(self, request: bytes, replies: int = 1, deadline: float | None = None) -> list[Reply]:
        """Make one round trip on any connection.

        Raises `IndexUnavailableError` when there is no answer by `deadline` (`monotonic`;
        `timeout_s` from now if None).
        """
        if deadline is None:
            deadline = monotonic() + allowed_s(self.timeout_s)
        link = self.take(deadline)
        try:
            return link.run(request, replies, deadline)
        except (RefusedError, *FAILURES) as e:
            raise self.unavailable(e) from e
        finally:
            self.give(link)

    def run_each(self, requests: Iterator[bytes]) -> list[Reply]:
        """Do as `run` within `timeout_s`, for requests of one reply each, sent while they are
        made."""
        deadline = monotonic() + allowed_s(self.timeout_s)
        link = self.take(deadline)
        try:
            return link.run_each(requests, deadline)
        except (RefusedError, *FAILURES) as e:
            raise self.unavailable(e) from e
        finally:
            self.give(link)

    def take(self, deadline: float) -> Link:
        """Return a connection for the caller alone, to be given back with `give`.

        Raises `IndexDeadlineError` when all are in use until `deadline` (`monotonic`), and
        `IndexUnavailableError` after `close`.
        """
        if self._closed:
            raise IndexUnavailableError(f"the index at {self.label} was closed")
        try:
            return self._idle.pop()
        except IndexError:
            return self._take_later(deadline)

    def _take_later(self, deadline: float) -> Link:
        with self._lock:  # not the condition: a handler that raises would keep it
            self._waiting += 1
            try:
                while True:
                    try:
                        return self._idle.pop()
                    except IndexError:
                        if len(self._alive) < self._links_max:
                            link = Link(self._dial, self.timeout_s)
                            self._alive.add(link)
                            return link
                        left = deadline - monotonic()
                        if left <= 0:
                            raise IndexDeadlineError(
                                f"Redis at {self.label}: all {self._links_max} connections "
                                f"were in use for {allowed_s(self.timeout_s) * 1e3:.0f} ms"
                            ) from None
                        self._returned.wait(left)
            finally:
                self._waiting -= 1

    def give(self, link: Link) -> None:
        if self._closed:
            link.drop()
        self._idle.append(link)
        if self._waiting:
            with self._lock:
                self._returned.notify()

    def drop_idle(self) -> None:
        """Close the idle connections, so that their next use opens them anew: the server is the
        wrong one now."""
        mine: list[Link] = []
        try:
            while True:  # ends: there are only links_max of them
                mine.append(self._idle.pop())
        except IndexError:
            pass
        for link in mine:
            link.drop()
            self.give(link)

    def close(self) -> None:
        self._closed = True
        self.drop_idle()

    def unavailable(self, error: BaseException) -> IndexUnavailableError:
        """Return `error` as callers see it. Its text names the server and no secret."""
        if isinstance(error, IndexUnavailableError):
            return error
        if isinstance(error, RefusedError):
            return refused(self.label, error)
        if isinstance(error, (TimeoutError, redis.exceptions.TimeoutError)):
            return IndexDeadlineError(
                f"Redis at {self.label} did not answer within "
                f"{allowed_s(self.timeout_s) * 1e3:.0f} ms"
            )
        if isinstance(error, hiredis.HiredisError):
            return IndexUnavailableError(f"Redis at {self.label} sent an invalid reply: {error}")
        return IndexUnavailableError(f"Redis at {self.label}: {str(error)[:ERROR_CHARS_MAX]}")

    def after_fork_in_child(self) -> None:
        """Begin with new connections: two processes must never share a stream."""
        self._fill()


def refused(label: str, error: Exception) -> IndexUnavailableError:
    """Return the error for a refusal by Redis, with advice that depends on why. The text is the
    server's and has no secret."""
    text = str(error)[:ERROR_CHARS_MAX]
    hint = {
        "WRONGPASS": "wrong user name or password: ",
        "NOAUTH": "a user name or password is needed: ",
        "NOPERM": "this user lacks a right: ",
        "ERR AUTH": "a password was given, but none is set there: ",
        "OOM": "it is full; give it a larger maxmemory, or maxmemory-policy allkeys-lru: ",
    }
    why = next((words for code, words in hint.items() if text.startswith(code)), "")
    family = IndexRefusedError if why else IndexUnavailableError
    return family(f"Redis at {label}: {why}{text}")


def _left(deadline: float) -> float:
    left = deadline - monotonic()
    if left <= 0:
        raise TimeoutError
    return left
