"""Lets this user's commands ask a running engine of this host: a Unix socket in the run directory.

The engine's process answers one connection after the other on a thread of its own, so that a
question costs the engine's own thread nothing. A message is one JSON object and ends with its
direction of the connection; the engine says what is in it.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvstore.errors import KVStoreError, PeerError
from kvstore.rundir import engine_sockets, listens, run_dir, socket_path
from kvstore.system.fork import in_each_child
from kvstore.system.on_failure import on_failure
from kvstore.system.small_json import JsonObject, parse_object
from kvstore.system.unix_peer import peer_pid, peer_uid
from kvstore.types import StrPath

log = logging.getLogger("kvstore.client")

MESSAGE_BYTES_MAX = 48 << 20
"""Bytes of a question or an answer: about 4 million tokens."""
REQUEST_TIMEOUT_S = 10.0
"""Time for a whole question and its answer, on either side."""
ANSWERS_WAITING_MAX = 8
"""Connections that wait while one is answered; the kernel refuses more."""
PAUSE_S = 0.5
"""Pause after a connection that could not be taken, for lack of descriptors say."""
READ_BYTES = 1 << 20

Answer = Callable[[JsonObject], JsonObject]
"""Answers one question; what is not understood raises `UsageError`."""


class EngineSocket:
    """Answers questions about one engine until it is closed."""

    def __init__(self, directory: StrPath | None, answer: Answer) -> None:
        """Listen in the run directory. Raises `UsageError` or `OSError` where that cannot be."""
        self._answer = answer
        self._closed = threading.Event()
        home = run_dir(directory)
        for left in engine_sockets(home):
            if not listens(left):  # of an engine that was killed
                left.unlink(missing_ok=True)
        name = f"engine-{os.getpid()}-{secrets.token_hex(4)}.sock"
        self._path = socket_path(home / name)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with on_failure(listener.close):
            # Under its name only once it listens: else another engine takes it for a dead one's.
            unready = home / f"{name[:-5]}.new"
            listener.bind(str(unready))
            unready.chmod(0o600)
            listener.listen(ANSWERS_WAITING_MAX)
            unready.rename(self._path)
        self._listener = listener
        in_each_child(self)
        threading.Thread(target=self._run, name="kvstore-questions", daemon=True).start()

    def after_fork_in_child(self) -> None:
        self._listener.close()  # nobody would answer there

    def close(self) -> None:
        """Answer no more. Returns at once, and may be called twice."""
        if not self._closed.is_set():
            self._closed.set()
            self._path.unlink(missing_ok=True)
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
            self._listener.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                self._closed.wait(PAUSE_S)
                continue
            with connection, suppress(OSError):
                self._serve(connection, time.monotonic() + REQUEST_TIMEOUT_S)

    def _serve(self, connection: socket.socket, deadline: float) -> None:
        if peer_uid(connection) not in (0, os.geteuid()):
            return
        raw = _received(connection, deadline)
        if not raw:  # somebody who only looked whether an engine is here
            return
        try:
            answer = self._answer(parse_object(raw, MESSAGE_BYTES_MAX))
        except KVStoreError as e:
            answer = {"error": str(e)}
        except Exception:
            log.exception("a question about this engine was not answered")
            answer = {"error": "the engine failed to answer; its log says why"}
        _send(connection, answer, deadline)


def engine_pid(path: Path) -> int:
    """Return the process of the engine that listens here. Raises `OSError` when none does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(REQUEST_TIMEOUT_S)
        connection.connect(str(path))
        return peer_pid(connection)


def ask_engine(path: Path, question: JsonObject) -> JsonObject:
    """Return the answer of the engine that listens here. Raises `PeerError` where there is none."""
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(REQUEST_TIMEOUT_S)
            connection.connect(str(path))
            _send(connection, question, deadline)
            answer = json.loads(_received(connection, deadline))
    except TimeoutError as e:
        raise PeerError(f"the engine at {path} did not answer in {REQUEST_TIMEOUT_S:g} s") from e
    except (OSError, ValueError, RecursionError) as e:
        raise PeerError(f"the engine at {path} did not answer: {e}") from e
    if not isinstance(answer, dict) or "error" in answer:
        said = answer.get("error") if isinstance(answer, dict) else "no object"
        raise PeerError(f"the engine at {path} answered: {said}")
    return answer


def _send(connection: socket.socket, message: JsonObject, deadline: float) -> None:
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    connection.sendall(json.dumps(message).encode())  # its time is for all of it
    connection.shutdown(socket.SHUT_WR)


def _received(connection: socket.socket, deadline: float) -> bytes:
    """Return all that the other side sends; more than fits is cut, and then no JSON."""
    raw = bytearray()
    while len(raw) <= MESSAGE_BYTES_MAX:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(READ_BYTES)
        if not part:
            break
        raw += part
    return bytes(raw)
