"""Sends and receives on a TCP connection, with or without TLS: many buffers in a call, by a
deadline."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence

from kvstore.errors import DeadlineError, NodeUnavailableError
from kvstore.protocol.stream import FRAME_HEAD_BYTES, Frame, Message, frame, frame_body, frame_head
from kvstore.protocol.stream_seal import PLAIN_SEALS

IOV_MAX = 256
"""Buffers in one system call; Linux takes 1024."""
SEND_BYTES_MAX = 768 << 10
RECEIVE_BYTES_MAX = 256 << 10
"""Bytes in one system call. With a whole MiB in each, a stream is a quarter slower (0016)."""
_TIMEVAL = struct.Struct("@ll")
_WAIT_MIN_S = 0.001


class Channel:
    """One connection. One thread sends and one receives at a time; any thread may `break_off`.

    Calls raise `DeadlineError` at their deadline (seconds of `time.monotonic`) and
    `NodeUnavailableError` when the other side is gone. Then the channel cannot be used any more.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.seals = PLAIN_SEALS
        """Seals of what is sent and received, after the handshake. They count the messages, so a
        channel on which something was left half done cannot be used any more."""
        self.encrypted = isinstance(connection, ssl.SSLSocket)
        """True with TLS."""
        if not self.encrypted:
            # Blocking, with time-outs in the kernel: one call then fills a whole batch of
            # buffers (MSG_WAITALL). What a signal interrupts before it has moved a byte begins
            # anew with all of its time, so each call waits in a poll for its first byte.
            connection.setblocking(True)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)

    def send(self, buffers: Sequence[memoryview | bytes], deadline: float) -> None:
        """Send all of `buffers`, in order."""
        left = [memoryview(buffer) for buffer in buffers if len(buffer)]
        try:
            while left:
                timeout_s = self._left(deadline)
                if self.encrypted:
                    self._socket.settimeout(timeout_s)
                    self._socket.sendall(left.pop(0))
                elif not self._writable.poll(timeout_s * 1e3):
                    raise TimeoutError
                else:
                    self._limit(socket.SO_SNDTIMEO, deadline)
                    advance(left, self._socket.sendmsg(first(left, SEND_BYTES_MAX)))
        except OSError as e:
            raise _failure(e, "timed out: the other side stopped receiving") from e

    def send_frame(self, message: Message, deadline: float) -> None:
        self.send([frame(message, self.seals.sent)], deadline)

    def receive_head(self, deadline: float) -> tuple[Frame, int]:
        """Return (type, bytes that follow) of the next frame. Raises `PeerError`."""
        return frame_head(self.receive_bytes(FRAME_HEAD_BYTES, deadline))

    def receive_rest(self, kind: Frame, size_bytes: int, deadline: float) -> bytes:
        """Return the body of the frame whose head has come. Raises `PeerError`."""
        return frame_body(kind, self.receive_bytes(size_bytes, deadline), self.seals.received)

    def receive(self, buffers: list[memoryview], deadline: float) -> None:
        """Fill all of `buffers`, which are used up."""
        while buffers:
            self.receive_some(buffers, self._left(deadline))

    def receive_bytes(self, size_bytes: int, deadline: float) -> bytes:
        raw = bytearray(size_bytes)
        self.receive([memoryview(raw)] if size_bytes else [], deadline)
        return bytes(raw)

    def receive_some(self, buffers: list[memoryview], timeout_s: float) -> None:
        """Receive at least a byte within `timeout_s`; what is full is taken off `buffers`."""
        deadline = time.monotonic() + timeout_s
        try:
            if self.encrypted:
                self._socket.settimeout(timeout_s)
                count = self._socket.recv_into(buffers[0])
            elif not self._readable.poll(timeout_s * 1e3):
                raise TimeoutError
            else:
                self._limit(socket.SO_RCVTIMEO, deadline)
                some = first(buffers, RECEIVE_BYTES_MAX)
                count = self._socket.recvmsg_into(some, 0, socket.MSG_WAITALL)[0]
        except OSError as e:
            raise _failure(e, "timed out: the other side sent nothing") from e
        if count == 0:
            raise NodeUnavailableError("the other side closed the connection")
        advance(buffers, count)

    def quiet(self) -> bool:
        """Return whether it is connected with nothing to read, as it must be between two
        requests."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLHUP | select.POLLERR)
        return not poll.poll(0)

    def break_off(self) -> None:
        """Make a thread that waits in another call fail at once."""
        hang_up(self._socket)

    def close(self) -> None:
        self._socket.close()

    def _left(self, deadline: float) -> float:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise DeadlineError("timed out")
        return max(left_s, _WAIT_MIN_S)

    def _limit(self, option: int, deadline: float) -> None:
        """Let the kernel wait until then: the poll before has used some of the time."""
        timeout_s = max(deadline - time.monotonic(), _WAIT_MIN_S)  # 0 would be without end
        seconds = int(timeout_s)
        value = _TIMEVAL.pack(seconds, int((timeout_s - seconds) * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, option, value)


def _failure(error: OSError, late: str) -> DeadlineError | NodeUnavailableError:
    """Return what a system call raised, as callers see it."""
    if isinstance(error, (BlockingIOError, TimeoutError)):
        return DeadlineError(late)
    return NodeUnavailableError(str(error))


def hang_up(connection: socket.socket) -> None:
    """End a connection that another thread may be using. Not by `SSLSocket.shutdown`: after it the
    other thread would send in the clear, and take what is encrypted for what was sent."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def first(buffers: Sequence[memoryview], size_bytes: int) -> list[memoryview]:
    """Return the first `size_bytes` of `buffers`, or what of them one system call may take."""
    some: list[memoryview] = []
    for view in buffers[:IOV_MAX]:
        some.append(view[:size_bytes])
        size_bytes -= some[-1].nbytes
        if not size_bytes:
            break
    return some


def advance(buffers: list[memoryview], count: int) -> None:
    """Take the first `count` bytes off `buffers`."""
    done = 0
    for view in buffers:
        if view.nbytes > count:
            break
        count -= view.nbytes
        done += 1
    del buffers[:done]
    if count:
        buffers[0] = buffers[0][count:]
