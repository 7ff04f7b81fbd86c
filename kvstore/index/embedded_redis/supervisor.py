"""The process that owns an embedded Redis: starts it, and ends it with its last user.

Run by its path with `python -I -S`, so it imports nothing but the standard library
and starts in milliseconds. Arguments: the directory, then the server's command line.
Says `ready` or `error REASON` on standard output, once.

Locks (flock) in the directory, in the order they may be taken:
  start.lock   exclusive while someone starts, joins or ends the server
  users.lock   shared by each user as long as it lives; taken only under start.lock
  server.lock  exclusive by this process as long as it lives
The kernel gives the locks of a killed process back, so no end goes unseen.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

READY_TIMEOUT_S = 5.0
PING_TIMEOUT_S = 1.0
STOP_TIMEOUT_S = 2.0
POLL_S = 0.1
"""Seconds until the end of the last user, or of Redis, is noticed."""
RESTARTS_MAX = 3
RESTARTS_WITHIN_S = 60.0
"""Restarts longer ago do not count: a store may live for months."""
BACKOFF_S = (0.0, 0.5, 2.0)
"""Shortest pauses between restarts, by how many there were within `RESTARTS_WITHIN_S`."""
LOG_TAIL_BYTES = 500

SOCKET, LOG, PIDS, PIDS_NEW = "redis.sock", "redis.log", "redis.json", "redis.json.new"
FILES = (SOCKET, LOG, PIDS, PIDS_NEW)
GIVEN_UP = "given-up"
"""A file that says why nobody starts Redis again; it stays until a new user starts Redis."""
START_LOCK, USERS_LOCK, SERVER_LOCK = "start.lock", "users.lock", "server.lock"
LOCKS = (START_LOCK, USERS_LOCK, SERVER_LOCK)

_PR_SET_PDEATHSIG = 1


def locked(descriptor: int, how: int) -> bool:
    """Take the flock of kind `how` if it is free. Return whether it was."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def answers(path: Path, timeout_s: float = PING_TIMEOUT_S) -> bool:
    """Return whether a Redis at this Unix socket answers PING."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(timeout_s)
        try:
            peer.connect(str(path))
            peer.sendall(b"PING\r\n")
            return peer.recv(7) == b"+PONG\r\n"
        except OSError:
            return False


def given_up(path: Path) -> str:
    """Return why nobody starts the Redis of this socket again; empty when somebody does."""
    try:
        return path.with_name(GIVEN_UP).read_text(errors="replace")
    except OSError:
        return ""


def remove_files(directory: Path) -> None:
    """Remove all files of the embedded Redis. Only for who holds all three locks."""
    for name in (*FILES, GIVEN_UP, *LOCKS):
        (directory / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # someone put a file of his own there
        directory.rmdir()


class Supervisor:
    def __init__(self, directory: Path, command: list[str]) -> None:
        self._directory = directory
        self._command = command
        self._libc = ctypes.CDLL(None)
        self._redis: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        locks = {name: self._open(name) for name in LOCKS}
        if not locked(locks[SERVER_LOCK], fcntl.LOCK_EX):
            say("error another supervisor is there")
            return
        try:
            why = self._start()
            if not why:
                (self._directory / GIVEN_UP).unlink(missing_ok=True)
            say(f"error {why}" if why else "ready")
            if not why:
                self._watch(locks)
        finally:
            self._stop()
            if self._unused(locks):
                remove_files(self._directory)

    def _unused(self, locks: dict[str, int]) -> bool:
        """Return whether there is no user and none can come; then all locks are held.

        start.lock is taken last and not waited for: its holder may be a new user that waits for
        users.lock, which is why that is given back.
        """
        if not locked(locks[USERS_LOCK], fcntl.LOCK_EX):
            return False
        if locked(locks[START_LOCK], fcntl.LOCK_EX):
            return True
        fcntl.flock(locks[USERS_LOCK], fcntl.LOCK_UN)
        return False

    def _open(self, name: str) -> int:
        return os.open(self._directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _watch(self, locks: dict[str, int]) -> None:
        """Start Redis again when it ends, until the last user is gone, or it has ended more than
        `RESTARTS_MAX` times within `RESTARTS_WITHIN_S`."""
        restarts: list[float] = []
        why = ""
        while True:
            if self._redis is None or self._redis.poll() is not None:
                now = time.monotonic()
                restarts = [at for at in restarts if at > now - RESTARTS_WITHIN_S]
                if len(restarts) >= RESTARTS_MAX:
                    self._give_up(why)
                    return
                if not restarts or now >= restarts[-1] + BACKOFF_S[len(restarts)]:
                    why = self._start()
                    if why:
                        self._end()
                    restarts.append(now)
            if self._unused(locks):
                return
            time.sleep(POLL_S)

    def _give_up(self, why: str) -> None:
        code = self._redis.returncode if self._redis is not None else None
        why = why or f"it ended with {code}: {self._log_tail()}"
        text = f"it ended {RESTARTS_MAX + 1} times within {RESTARTS_WITHIN_S:.0f} s: {why}"
        with contextlib.suppress(OSError):  # a full disk, say; then it is only away
            fresh = self._directory / PIDS_NEW
            fresh.write_text(text)
            fresh.rename(self._directory / GIVEN_UP)

    def _start(self) -> str:
        """Start Redis; returns why it does not answer, empty when it does."""
        path = self._directory / SOCKET
        path.unlink(missing_ok=True)
        parent = os.getpid()

        def die_with_parent() -> None:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        try:
            self._redis = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=die_with_parent,  # this process has one thread
            )
        except OSError as e:
            return f"{self._command[0]}: {e.strerror}"
        self._write_pids(self._redis.pid)  # before it answers: who hears it reads this next
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not answers(path):
            if self._redis.poll() is not None:
                return f"it ended with {self._redis.returncode}: {self._log_tail()}"
            if time.monotonic() > deadline:
                return f"no answer within {READY_TIMEOUT_S} s: {self._log_tail()}"
            time.sleep(0.002)
        return ""

    def _write_pids(self, pid: int) -> None:
        text = json.dumps({"pid": pid, "supervisor": os.getpid(), "server": self._command[0]})
        fresh = self._directory / PIDS_NEW
        fresh.write_text(text)
        fresh.rename(self._directory / PIDS)

    def _log_tail(self) -> str:
        try:
            with (self._directory / LOG).open("rb") as log:
                log.seek(max(log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES, 0))
                tail = log.read(LOG_TAIL_BYTES)
        except OSError:
            return "it wrote no log"
        return " ".join(tail.decode(errors="replace").split())

    def _stop(self) -> None:
        # First of all: whoever can connect believes that it stays.
        (self._directory / SOCKET).unlink(missing_ok=True)
        self._end()
        for name in FILES:
            (self._directory / name).unlink(missing_ok=True)

    def _end(self) -> None:
        redis, self._redis = self._redis, None
        if redis is None:
            return
        redis.terminate()
        try:
            redis.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            redis.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                redis.wait(STOP_TIMEOUT_S)


def say(line: str) -> None:
    with contextlib.suppress(OSError):  # the one who started us is gone
        os.write(1, line.encode() + b"\n")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def _terminated(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def main() -> None:
    # Not a child of the user that happened to come first, so it leaves that one no zombie.
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, _terminated)
    Supervisor(Path(sys.argv[1]), sys.argv[2:]).run()


if __name__ == "__main__":
    main()
