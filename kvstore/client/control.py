"""Requests to the local node: one socket, one request at a time, each with a deadline."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from kvstore.client.lease import Lease
from kvstore.core import wire
from kvstore.core.breaker import Breaker
from kvstore.core.wire import PROTOCOL_VERSION, Op
from kvstore.errors import DeadlineError, NodeUnavailableError, PeerError, UsageError
from kvstore.nodedir import NodeDir

CONNECT_TIMEOUT_S = 1.0
SAY_CONNECT_TIMEOUT_S = 0.05
RECV_BYTES = 1 << 16
FAILURES_TO_OPEN = 1
"""One unanswered request costs a whole deadline: the next ones must not."""
REOPEN_AFTER_S = 1.0

Held = tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]
"""(slot, generation) pairs reserved and pinned by this client right now."""


class ControlChannel:
    """Connects when it is needed, again after a failure, and says then what it still holds.

    Thread-safe. Raises `NodeUnavailableError` when the node is not there,
    `DeadlineError` when it does not answer, `UsageError` when it refuses.
    """

    def __init__(
        self,
        directory: NodeDir,
        node: tuple[int, int],
        timeout_s: float,
        held: Callable[[], Held],
    ) -> None:
        """`node` is the (node id, epoch) to talk to: a restarted node is another one."""
        self.directory = directory
        self._node = list(node)
        self._timeout_s = timeout_s
        self._held = held
        self._lock = threading.Lock()
        self._lease: Lease | None = None
        self._socket: socket.socket | None = None
        self._unpacker = wire.unpacker()
        self._last_request = 0
        self._pid = os.getpid()
        self._closed = False
        self._breaker = Breaker(failures_max=FAILURES_TO_OPEN, retry_after_s=REOPEN_AFTER_S)

    def request(self, op: Op, *args: Any) -> Any:
        """The node's answer."""
        give_up_at = time.monotonic() + self._timeout_s
        if not self._lock.acquire(timeout=self._timeout_s):
            raise DeadlineError(
                f"node {self.directory.name}: busy with this client's other requests"
            )
        try:
            if not self._breaker.allows(time.monotonic()):
                raise NodeUnavailableError(f"node {self.directory.name} did not answer lately")
            try:
                self._connect(give_up_at)
                answer = self._exchange([op, self._number(), *args], give_up_at)
            except (DeadlineError, NodeUnavailableError):
                self._disconnect()
                self._breaker.failed(time.monotonic())
                raise
            self._breaker.succeeded()
            return answer
        finally:
            self._lock.release()

    def say(self, op: Op, *args: Any) -> bool:
        """One way: False when it could not be said now. Waits at most `SAY_CONNECT_TIMEOUT_S`,
        and that only when it is the first to connect."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._connect_to_say():
                return False
            assert self._socket is not None
            message = wire.packed([op, 0, *args])
            try:
                self._socket.settimeout(0.0)
                # A partial write would break the framing for good.
                if self._socket.send(message) != len(message):
                    self._disconnect()
                    return False
            except BlockingIOError:
                return False
            except OSError:
                self._disconnect()
                return False
            return True
        finally:
            self._lock.release()

    def _connect_to_say(self) -> bool:
        now = time.monotonic()
        if self._socket is not None:
            return True
        if self._closed or self._pid != os.getpid() or not self._breaker.allows(now):
            return False
        try:
            self._connect(now + SAY_CONNECT_TIMEOUT_S)
        except PeerError:
            self._disconnect()
            self._breaker.failed(time.monotonic())
            return False
        self._breaker.succeeded()
        return True

    def close(self) -> None:
        """Say goodbye: the node takes back whatever this client held."""
        with self._lock:
            self._closed = True
            if self._socket is not None and self._pid == os.getpid():
                with contextlib.suppress(OSError):
                    self._socket.settimeout(CONNECT_TIMEOUT_S)
                    self._socket.sendall(wire.packed([Op.BYE, 0]))
            self._disconnect()
            if self._lease is not None:
                self._lease.release()

    def _number(self) -> int:
        self._last_request += 1
        return self._last_request

    def _connect(self, give_up_at: float) -> None:
        if self._pid != os.getpid():
            raise UsageError(
                "client", self._pid, "was made before a fork: make one in each process"
            )
        if self._closed:
            raise UsageError("client", "closed", "must be open")
        if self._socket is not None:
            return
        if self._lease is None:
            self._lease = Lease(self.directory.leases)
        self._unpacker = wire.unpacker()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(min(CONNECT_TIMEOUT_S, give_up_at - time.monotonic()), 0.001))
            connection.connect(str(self.directory.socket))
        except OSError as e:
            connection.close()
            raise NodeUnavailableError(f"node {self.directory.name}: {e}") from e
        self._socket = connection
        reserved, pinned = self._held()
        hello = [Op.HELLO, self._number(), PROTOCOL_VERSION, self._lease.client_id]
        try:
            who = self._exchange([*hello, list(reserved), list(pinned)], give_up_at)
        except UsageError as e:
            raise NodeUnavailableError(f"node {self.directory.name}: {e}") from e
        if who != self._node:
            raise NodeUnavailableError(f"node {self.directory.name} was started anew")

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _exchange(self, message: list[Any], give_up_at: float) -> Any:
        connection = self._socket
        assert connection is not None
        number = message[1]
        try:
            connection.settimeout(max(give_up_at - time.monotonic(), 0.001))
            connection.sendall(wire.packed(message))
            while True:
                for answer in self._unpacker:
                    if answer[0] == number:
                        return self._accept(answer)
                connection.settimeout(max(give_up_at - time.monotonic(), 0.001))
                data = connection.recv(RECV_BYTES)
                if not data:
                    raise NodeUnavailableError(f"node {self.directory.name} hung up")
                self._unpacker.feed(data)
        except TimeoutError as e:
            raise DeadlineError(
                f"node {self.directory.name} did not answer within {self._timeout_s} s"
            ) from e
        except OSError as e:
            raise NodeUnavailableError(f"node {self.directory.name}: {e}") from e
        except (msgpack.UnpackException, ValueError, IndexError, TypeError) as e:
            if isinstance(e, UsageError):
                raise
            raise NodeUnavailableError(f"node {self.directory.name} speaks no sense: {e}") from e

    @staticmethod
    def _accept(answer: list[Any]) -> Any:
        if answer[1] is not True:
            raise UsageError("request", "refused", str(answer[2]))
        return answer[2]
