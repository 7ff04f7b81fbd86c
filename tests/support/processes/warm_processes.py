"""Processes that start in milliseconds: forked from one that has imported the code already.

For tests that start many and are not about how: interpreter and imports are nearly all of
what a new process costs. Each is a process like any other, to stop and to kill.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TextIO

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["__main__", "kvstore", "kvstore.cli.commands.node"])


class WarmProcess:
    """Has what `subprocess.Popen` has, as far as tests need it. It ends with its parent."""

    returncode: int | None = None

    def __init__(
        self,
        run: Callable[..., int | None],
        *args: object,
        environment: Mapping[str, str] | None = None,
        stdout: int | None = None,
    ) -> None:
        """Calls `run(*args)`: a function of a module that is quick to import, or one below.
        `stdout`: None or `subprocess.PIPE`, as text."""
        environment = dict(os.environ if environment is None else environment)
        ours, theirs = multiprocessing.Pipe(duplex=False) if stdout is not None else (None, None)
        self._process = FORKS.Process(
            target=_begin, args=(theirs, environment, run, args), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.stdout: TextIO | None = None
        if ours is not None and theirs is not None:
            theirs.close()
            self.stdout = os.fdopen(os.dup(ours.fileno()))

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        self._process.join(timeout_s)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout_s or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """As `subprocess.Popen` does: nothing where it has ended, which is heard of a moment later
        than the process is gone."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _begin(
    stdout: Connection | None,
    environment: Mapping[str, str],
    run: Callable[..., int | None],
    args: tuple[object, ...],
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    told = os.open(os.devnull, os.O_WRONLY) if stdout is None else stdout.fileno()
    os.dup2(told, 1)
    sys.exit(run(*args))


def _end_with_parent() -> None:
    """Arrange for SIGTERM when what started it ends, however it ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def command(*argv: str) -> int:
    """Be `kvstore` with these arguments."""
    from kvstore.cli import main

    return main(argv)


def program(source: str, *argv: str) -> None:
    """Do as `python -c source` does."""
    sys.argv = ["-c", *argv]
    exec(compile(source, "<test>", "exec"), {"__name__": "__main__"})
