"""Starts the servers of demos, trials, benchmarks and tests: Redis, memory nodes and engines.

    with closing(Service(node_command(run_dir, 1 << 30), log).wait(node_up(run_dir))) as node:
        ...

Each is a process of its own with its output in a log; it is waited for until it serves, may be
stopped and killed, and is ended whatever has become of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstore.index.embedded_redis.server import find_server
from kvstore.nodedir import NodeDir

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 20.0
ASK_TIMEOUT_S = 2.0
POLL_S = 0.02
LOG_SHOWN_BYTES = 4000
"""From the end of a log, where something did not start."""

IsUp = Callable[["Service"], bool]


class Service:
    """Runs one server. What it starts itself belongs to it, and is ended with it."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        more_log: bool = False,
        popen: Callable[..., subprocess.Popen[Any]] = subprocess.Popen,
        **options: Any,
    ) -> None:
        """`env` is put on top of this process's; with `more_log` the log keeps what it said in
        earlier starts. `popen` starts it elsewhere (`Hosts.popen`), and `options` are for it."""
        self.log = log
        self._ended = False
        with log.open("ab" if more_log else "wb") as out:
            self._log_start = out.tell()
            self.process = popen(
                command,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **options,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def said(self) -> str:
        """Return what it has said since it started; a log may have that of earlier starts."""
        return self.log.read_bytes()[self._log_start :].decode(errors="replace")

    def wait(self, up: IsUp, timeout_s: float = START_TIMEOUT_S) -> Service:
        """Return when it is up. Raises `RuntimeError` with the end of its log when it ends before,
        or takes too long: then it is killed."""
        give_up_at = time.monotonic() + timeout_s
        while not up(self):
            if self.process.poll() is not None or time.monotonic() > give_up_at:
                how = "ended at once" if not self.runs else f"was not up in {timeout_s:.0f} s"
                self.end(signal.SIGKILL)
                raise RuntimeError(f"it {how}, see {self.log}:\n{self.said()[-LOG_SHOWN_BYTES:]}")
            time.sleep(POLL_S)
        return self

    def send(self, number: signal.Signals) -> None:
        """Send it a signal. Raises `RuntimeError` where it has ended by itself."""
        if not self.runs:
            raise RuntimeError(f"it ended by itself with {self.process.returncode}, see {self.log}")
        self.process.send_signal(number)

    def end(
        self, number: signal.Signals = signal.SIGTERM, timeout_s: float = STOP_TIMEOUT_S
    ) -> bool:
        """End it and what it has started, stopped or not; return whether `number` was enough. Safe
        to call twice."""
        if self._ended:
            return True
        for one in (number, signal.SIGCONT):
            self.process.send_signal(one)  # nothing where it has ended
        try:
            self.process.wait(timeout_s)
            willing = True
        except subprocess.TimeoutExpired:
            willing = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(timeout_s)
        self._ended = True
        return willing

    def close(self) -> None:
        self.end()


def end_all(services: Sequence[Service], timeout_s: float = STOP_TIMEOUT_S) -> None:
    """End services in reverse order, all within one deadline: who is asked first has most of it."""
    give_up_at = time.monotonic() + timeout_s
    for service in reversed(services):
        if service.runs:
            service.process.terminate()
    for service in reversed(services):
        service.end(timeout_s=max(0.1, give_up_at - time.monotonic()))


def redis_command(directory: Path, *options: str) -> list[str]:
    return [str(find_server().path), "--save", "", "--dir", str(directory), *options]


def redis_up(path: Path) -> IsUp:
    """Ask the server at a Unix socket: it stays behind when its server is killed."""

    def up(_: Service) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(ASK_TIMEOUT_S)
            asking.connect(str(path))
            asking.sendall(b"PING\r\n")
            return asking.recv(16) == b"+PONG\r\n"
        return False

    return up


def kvstore_command(*words: str) -> list[str]:
    return [sys.executable, "-m", "kvstore.cli", *words]


def node_command(run_dir: Path, size: int | str, *options: str) -> list[str]:
    return kvstore_command("node", "--run-dir", str(run_dir), "--size", str(size), *options)


def node_up(run_dir: Path, name: str = "node") -> IsUp:
    def up(service: Service) -> bool:
        directory = NodeDir(run_dir, name)
        word = directory.announcement()
        return word is not None and word.pid == service.pid and directory.socket.exists()

    return up


def listens(port: int, host: str = "127.0.0.1") -> IsUp:
    def up(_: Service) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), ASK_TIMEOUT_S).close()
            return True
        return False

    return up


def answers(url: str, good: Callable[[bytes], bool] = lambda body: True) -> IsUp:
    """Ask for a page, which must be there and `good`."""

    def up(_: Service) -> bool:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(url, timeout=ASK_TIMEOUT_S) as page,
        ):
            return page.status == 200 and good(page.read())
        return False

    return up
