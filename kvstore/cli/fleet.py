"""Runs memory nodes as child processes: starts them, starts again those that die, ends them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kvstore.errors import DeadlineError, NodeUnavailableError
from kvstore.nodedir import NodeDir, sweep
from kvstore.segment.abandoned import Sweeper
from kvstore.system import service_manager

READY_TIMEOUT_S = 300.0
"""A node clears all its memory first; at 2 GB/s this is 600 GB."""
LATE_S = 3.0
"""Nodes that are not ready by then are asked why, and again each time as long after."""
RESTARTS_MAX = 5
"""In a row: a node that then ran for `STEADY_S` starts counting anew."""
STEADY_S = 60.0
BACKOFF_S, BACKOFF_MAX_S = 0.5, 8.0
STOP_TIMEOUT_S = 10.0
"""Above what a node takes to remove its records (publisher.STOP_TIMEOUT_S)."""
POLL_S = 0.1


def node_names(count: int) -> list[str]:
    return [f"node-{i}" for i in range(count)]


def node_command(options: Sequence[str], run_dir: Path) -> list[str]:
    """Return the command of a node that reads no operator's file."""
    command = [sys.executable, "-m", "kvstore.cli", "node", "--only-options", *options]
    return [*command, "--run-dir", str(run_dir)]


def node_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return ours with `env` in it, and without the service manager, which waits for another."""
    theirs = {**os.environ, **env}
    theirs.pop(service_manager.OURS, None)
    return theirs


class Child:
    """Runs one node's process, over its restarts."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], stderr: int | None = None
    ) -> None:
        """`stderr` is a descriptor; None: it has ours."""
        self.name = name
        self._stderr = stderr
        self.restarts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._command = command
        self._env = env
        self._started_at = 0.0
        self._start_again_at = 0.0

    def start(self) -> None:
        self._started_at = time.monotonic()
        self.process = subprocess.Popen(
            self._command,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            process_group=0,  # Ctrl-C is for us; we end the nodes
        )

    def wait_ready(
        self, stopped: Callable[[], bool], directory: NodeDir, say: Callable[[str], None]
    ) -> str:
        """Return the line it says when it is ready, or nothing when `stopped` meanwhile. While it
        is late, `say` is told why: once, and again when the reason is another one."""
        assert self.process is not None
        assert self.process.stdout is not None
        give_up_at = time.monotonic() + READY_TIMEOUT_S
        ask_at = time.monotonic() + LATE_S
        why_not = ""
        while not stopped():
            if select.select([self.process.stdout], [], [], POLL_S)[0]:
                line = self.process.stdout.readline().decode(errors="replace").strip()
                if line:
                    return line
                raise NodeUnavailableError(f"node {self.name} did not start: what it said is above")
            now = time.monotonic()
            if now > give_up_at:
                raise DeadlineError(
                    f"node {self.name} was not ready in {READY_TIMEOUT_S:.0f} s: {why_not}"
                )
            if now > ask_at:
                ask_at = now + LATE_S
                before, why_not = why_not, self._why_not_ready(directory)
                if why_not != before:
                    say(f"node {self.name} is not ready yet: {why_not}")
        return ""

    def _why_not_ready(self, directory: NodeDir) -> str:
        announcement = directory.announcement()
        assert self.process is not None
        if announcement is None or announcement.pid != self.process.pid:
            return "it is clearing its memory"  # what lies there is of its former start
        return directory.why_not_ready() or "it is about to be"

    def tend(self, say: Callable[[str], None]) -> None:
        """Start it again when it died. Raises `NodeUnavailableError` when it died too often."""
        now = time.monotonic()
        if self.process is None:
            if now >= self._start_again_at:
                try:
                    self.start()
                except OSError as e:  # no process is left, say
                    self._failed(f"cannot be started ({e.strerror})", now, say)
            return
        code = self.process.poll()
        if code is None:
            return
        if now - self._started_at > STEADY_S:
            self.restarts = 0
        self._let_go()
        why = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._failed(f"ended ({why})", now, say)

    def _failed(self, how: str, now: float, say: Callable[[str], None]) -> None:
        """Have it started again later. Raises `NodeUnavailableError` after too many times."""
        if self.restarts == RESTARTS_MAX:
            raise NodeUnavailableError(
                f"node {self.name} {how} after {RESTARTS_MAX} restarts in a row"
            )
        delay_s = min(BACKOFF_S * 2**self.restarts, BACKOFF_MAX_S)
        self.restarts += 1
        self._start_again_at = now + delay_s
        say(f"node {self.name} {how}; restart {self.restarts} of {RESTARTS_MAX} in {delay_s:g} s")

    def terminate(self) -> None:
        if self.process is not None:
            self.process.terminate()

    def end_by(self, give_up_at: float) -> None:
        """Wait for its end until `give_up_at`, then make it end."""
        if self.process is None:
            return
        try:
            self.process.wait(max(give_up_at - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            self.process.kill()
            # One that the kernel does not let go of must not keep the others from ending.
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT_S)
        self._let_go()

    def _let_go(self) -> None:
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()
        self.process = None


class Fleet:
    """Runs `count` nodes of one shape, called as `node_names` says."""

    def __init__(
        self,
        count: int,
        options: Sequence[str],
        *,
        run_dir: Path,
        env: Mapping[str, str],
        numa: Sequence[str],
    ) -> None:
        """`options` are those of `kvstore node` that all share, `numa` is what each has of its
        own; `env` is added to ours."""
        self._run_dir = run_dir
        self._sweeper = Sweeper(run_dir)
        command = [*node_command(options, run_dir), "--end-with-parent", str(os.getpid())]
        theirs = node_environment(env)
        self.children = [
            Child(name, [*command, "--name", name, "--numa", where], theirs)
            for name, where in zip(node_names(count), numa, strict=True)
        ]

    def start(self, stopped: Callable[[], bool], say: Callable[[str], None]) -> None:
        """Returns when all are ready, or when `stopped`."""
        for child in self.children:
            child.start()
        for child in self.children:
            line = child.wait_ready(stopped, NodeDir(self._run_dir, child.name), say)
            if line:
                say(line)

    def tend(self, stopped: Callable[[], bool], say: Callable[[str], None]) -> None:
        """Keep them running until `stopped`."""
        while not stopped():
            time.sleep(POLL_S)
            for child in self.children:
                child.tend(say)
            if self._sweeper.due(time.monotonic()):
                self._sweeper.sweep()

    def stop(self) -> None:
        """End all of them and remove what those that were killed left behind."""
        give_up_at = time.monotonic() + STOP_TIMEOUT_S
        for child in self.children:
            child.terminate()
        for child in self.children:
            child.end_by(give_up_at)
        sweep(self._run_dir, kept=True, names={child.name for child in self.children})
