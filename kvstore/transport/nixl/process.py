"""Starts, asks and kills a process with a NIXL agent (child.py)."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import msgpack

from kvstore.errors import DeadlineError, NodeUnavailableError
from kvstore.system.background import start_in_background
from kvstore.system.on_failure import on_failure
from kvstore.transport.nixl.child import ERROR, HELLO, LATE, MODULES, OK, PACKET_BYTES_MAX

log = logging.getLogger("kvstore.nixl")

_PROGRAM = Path(__file__).with_name("child.py")
START_TIMEOUT_S = 20.0
"""Importing NIXL and making an agent takes 1 s, several on a busy machine."""


def installed() -> bool:
    """Return whether NIXL can be imported. It is only looked for, not imported."""
    for module in MODULES:
        with contextlib.suppress(ModuleNotFoundError):
            if importlib.util.find_spec(module.partition(".")[0]) is not None:
                return True
    return False


class ChildAnswer(NamedTuple):
    status: int
    """`OK`, `ERROR` or `LATE` of child.py."""
    body: object


class NixlProcess:
    """A process that runs child.py in one of its roles. Thread-safe.

    Nothing waits for the process without a deadline: it may have been stopped.
    """

    def __init__(
        self,
        role: str,
        arguments: Sequence[str],
        *,
        pass_fds: Sequence[int] = (),
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the process. `ended` is called when it was reaped: by then it writes nowhere any
        more.

        Raises `OSError` when it cannot be started, and `NodeUnavailableError` when nobody could
        listen to it.
        """
        self._tell_ended = ended
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._number = HELLO
        self._hello: Future[ChildAnswer] = Future()
        self._waiting: dict[int, Future[ChildAnswer]] = {HELLO: self._hello}
        with theirs:
            command = [sys.executable, "-P", str(_PROGRAM), role, str(theirs.fileno()), *arguments]
            self._process = start_in_background(
                command, pass_fds=(theirs.fileno(), *pass_fds), stdin=subprocess.DEVNULL
            )
        self.pid = self._process.pid
        self._ended = threading.Event()
        thread = threading.Thread(target=self._receive, name=f"kvstore-nixl-{role}", daemon=True)
        try:
            thread.start()
        except RuntimeError as e:  # this host has no more threads to give
            self._process.kill()
            raise NodeUnavailableError(f"no thread for its NIXL process: {e}") from e

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    def ready(self, deadline: float) -> None:
        """Wait until it serves. Raises `PeerError` when it does not."""
        wait_for(self._hello, deadline, "it did not start in time")

    def ask(self, operation: int, *arguments: object, deadline: float) -> Future[ChildAnswer]:
        """Send a request; it is answered when the process answers or ends, and never if it hangs.

        Raises `PeerError` when it does not even take the request.
        """
        future: Future[ChildAnswer] = Future()
        with self._lock:
            if not self.alive:
                raise NodeUnavailableError("its NIXL process has ended")
            self._number += 1
            number = self._number
            self._waiting[number] = future
        with on_failure(self._waiting.pop, number, None):
            self._send(msgpack.packb([operation, number, *arguments]), deadline)
        return future

    def _send(self, raw: bytes, deadline: float) -> None:
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLOUT)
        except ValueError:  # the thread that saw its end has closed it
            raise NodeUnavailableError("its NIXL process has ended") from None
        while True:
            try:
                self._socket.send(raw, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not poll.poll(left_s * 1000):
                    raise DeadlineError("timed out: its NIXL process reads nothing") from None
            except OSError as e:
                raise NodeUnavailableError(f"its NIXL process has ended: {e}") from e

    def drain(self, until: float) -> None:
        """Wait until `until` at most (seconds of `time.monotonic`) for the answers that are due."""
        for future in list(self._waiting.values()):
            with contextlib.suppress(DeadlineError, NodeUnavailableError):
                wait_for(future, until, "")

    def kill(self) -> None:
        """Kill the process: the one way to be sure that no READ writes any more."""
        self._process.kill()

    def join(self, timeout_s: float) -> bool:
        """Return whether the process has ended, within `timeout_s`."""
        return self._ended.wait(timeout_s)

    def _receive(self) -> None:
        """Hand answers out until the process ends."""
        with contextlib.suppress(OSError, ValueError, TypeError, msgpack.UnpackException):
            while raw := self._socket.recv(PACKET_BYTES_MAX):
                number, status, body = msgpack.unpackb(raw)
                with self._lock:
                    future = self._waiting.pop(number, None)
                if future is not None:
                    future.set_result(ChildAnswer(status, body))
        self._process.kill()  # it may have closed the socket only, or said what it never says
        code = self._process.wait()
        with self._lock:
            self._ended.set()
            waiting, self._waiting = list(self._waiting.values()), {}
        self._socket.close()
        self._tell_ended()
        for future in waiting:
            future.set_result(ChildAnswer(ERROR, f"its NIXL process ended with code {code}"))


def wait_for(future: Future[ChildAnswer], deadline: float, late: str) -> object:
    """Return the body of an `OK` answer. Raises `DeadlineError` with `late`, or
    `NodeUnavailableError`."""
    try:
        status, body = future.result(max(deadline - time.monotonic(), 0.0))
    except TimeoutError:
        raise DeadlineError(late) from None
    if status == OK:
        return body
    raise DeadlineError(late) if status == LATE else NodeUnavailableError(str(body))
