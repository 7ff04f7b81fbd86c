"""Commands run as processes, each test with a run directory of its own."""

from __future__ import annotations

import io
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from kvstore.cli import main
from kvstore.node.config import node_id_of
from kvstore.nodedir import NodeDir, sweep
from kvstore.segment.header import SHM_DIR

REPOSITORY = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "kvstore.cli")
TIMEOUT_S = 30.0


def clean_env(**more: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in ("KVSTORE_URL", "KVSTORE_RUN_DIR")}
    return env | more


def wait_until(true: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < give_up_at, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


class Running:
    """A command that runs on: its output so far, and its end."""

    def __init__(self, *args: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *args],
            cwd=REPOSITORY,
            env=env or clean_env(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.output = ""

    def wait_for(self, text: str) -> str:
        assert self.process.stdout is not None
        give_up_at = time.monotonic() + TIMEOUT_S
        while text not in self.output:
            left_s = give_up_at - time.monotonic()
            assert left_s > 0, f"never said {text!r}: {self.output}"
            if select.select([self.process.stdout], [], [], left_s)[0]:
                raw = os.read(self.process.stdout.fileno(), 65536)
                assert raw, f"ended without {text!r}: {self.output}"
                self.output += raw.decode()
        return self.output

    def end(self, number: int) -> int:
        """Send a signal and wait; the exit code."""
        self.process.send_signal(number)
        return self.exit_code()

    def exit_code(self) -> int:
        out, _ = self.process.communicate(timeout=TIMEOUT_S)
        self.output += out.decode()
        return self.process.returncode


class Place:
    """One run directory and what is there."""

    def __init__(self) -> None:
        self.run_dir = Path(tempfile.mkdtemp(prefix="kvc-"))
        self._running: list[Running] = []

    def kv(
        self, *args: str, stdin: bytes = b"", env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a command to its end."""
        return subprocess.run(
            [*COMMAND, *args, "--run-dir", str(self.run_dir)],
            cwd=REPOSITORY,
            env=env or clean_env(),
            input=stdin,
            capture_output=True,
            timeout=TIMEOUT_S,
        )

    def here(self, *args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """The same in this process: a process costs half a second."""
        out, err = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
        given = io.TextIOWrapper(io.BytesIO(stdin))
        with mock.patch.multiple(sys, stdin=given, stdout=out, stderr=err):
            code = main([*args, "--run-dir", str(self.run_dir)])
        return subprocess.CompletedProcess(args, code, out.buffer.getvalue(), err.buffer.getvalue())

    def start(self, *args: str) -> Running:
        running = Running(*args, "--run-dir", str(self.run_dir))
        self._running.append(running)
        return running

    def engine(self, *command: str, options: tuple[str, ...] = (), **env: str) -> Running:
        """`kvstore run` of an engine's command, with what `env` adds to the environment."""
        store = ("--run-dir", str(self.run_dir), "--size", "16MiB", *options)
        running = Running("run", *store, "--", *command, env=clean_env(**env))
        self._running.append(running)
        return running

    def node(self, *args: str) -> Running:
        running = self.start("node", "--size", "4MiB", *args)
        running.wait_for("ready")
        return running

    def serving(self, name: str, *args: str) -> Running:
        """A node that its own host can use; it may never be ready."""
        running = self.start("node", "--size", "4MiB", "--name", name, *args)
        wait_until(NodeDir(self.run_dir, name).socket.exists, "it serves its host", TIMEOUT_S)
        return running

    def segments(self, *names: str) -> list[Path]:
        """Files in /dev/shm of the nodes called so here."""
        ids = [node_id_of(self.run_dir, name) for name in names]
        return [path for i in ids for path in SHM_DIR.glob(f"kvstore-*-{i:016x}-*")]

    def processes(self) -> list[str]:
        """Command lines that name this run directory."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(self.run_dir) in line:
                found.append(line)
        return found

    def files(self) -> list[str]:
        """What lies in the run directory, but for the epochs, which stay."""
        found = (p.relative_to(self.run_dir) for p in self.run_dir.rglob("*") if not p.is_dir())
        return sorted(str(path) for path in found if path.parts[0] != "epochs")

    def close(self) -> None:
        for running in self._running:
            if running.process.poll() is None:
                running.process.send_signal(signal.SIGTERM)
                running.exit_code()
        sweep(self.run_dir, kept=True)
        shutil.rmtree(self.run_dir, ignore_errors=True)
