"""Asks running engines of this host for the page what a prompt would load.

`kvstore explain --engine-pid` does, in a process of its own: no engine holds up the node.
A question names the process of an engine that has a socket in the run directory, and no URL.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvstore.errors import UsageError
from kvstore.machine import REAL
from kvstore.rundir import engine_sockets
from kvstore.system.on_failure import on_failure

QUESTION_BYTES_MAX = 1 << 20
"""Bytes of a question: prompts of about 200,000 tokens."""
EXPLAIN_TIMEOUT_S = 60.0
"""Time for one answer; then its process is killed."""
TRANSFER_TIMEOUT_S = 2.0
"""Time for the whole question to come, and for its answer to be taken."""
KINDS = ("prompt", "messages", "tokens", "request-id")
"""What can be asked about: the names of the command's options."""
NO_QUESTION = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


class Asking:
    """Has one question answered at a time."""

    def __init__(self, run_dir: Path, key_prefix: str) -> None:
        self._command = [sys.executable, "-m", "kvstore.cli", "explain"]
        self._command += ["--run-dir", str(run_dir), "--key-prefix", key_prefix]
        self._run_dir = run_dir
        self.busy = threading.Lock()
        """Whoever calls `begin` has it; it is free again once that was answered."""

    def engines(self) -> list[int]:
        """Return the processes of the engines that announce themselves in the run directory."""
        named = {path.name.split("-")[1] for path in engine_sockets(self._run_dir)}
        return sorted(int(n) for n in named if n.isdecimal() and Path(f"/proc/{n}").exists())

    def begin(
        self, guest: socket.socket, begun: bytes, length: int, answer: Callable[[str], bytes]
    ) -> None:
        """Read the rest of a question of `length` bytes from `guest`, whose thread this is from
        here on, and send what `answer` makes of the engine's."""

        def run() -> None:
            with guest, suppress(OSError):
                try:
                    text = self._explained(_received(guest, begun, length))
                finally:
                    self.busy.release()
                guest.settimeout(TRANSFER_TIMEOUT_S)
                guest.sendall(answer(text))
                guest.shutdown(socket.SHUT_WR)

        with on_failure(self.busy.release):
            REAL.start_thread(run, "kvstore-page-explain")

    def _explained(self, body: bytes) -> str:
        """Return the text that answers a question in JSON: its `engine`, `kind` and `text`."""
        try:
            asked = json.loads(body)
            engine, kind, text = asked["engine"], asked["kind"], asked["text"]
            if type(engine) is not int or engine not in self.engines():
                raise UsageError("engine", engine, f"must be one of {self.engines()}")
            if kind not in KINDS or not text.strip():
                raise UsageError("kind", kind, f"must be one of {KINDS}, and text given")
            # A prompt is no word of a command line, which every user of the host can read.
            given = text.strip() if kind == "request-id" else "-"
            command = [*self._command, f"--engine-pid={engine}", f"--{kind}={given}"]
            raw: bytes = text.encode(errors="replace")
            ran = subprocess.run(command, input=raw, capture_output=True, timeout=EXPLAIN_TIMEOUT_S)
        except (*NO_QUESTION, UsageError, OSError, subprocess.SubprocessError) as e:
            return f"not answered: {e}"
        return (ran.stdout or ran.stderr).decode(errors="replace").strip()


def _received(guest: socket.socket, begun: bytes, length: int) -> bytes:
    """Return a question of which `begun` has come, or what came of it in time."""
    give_up_at, body = time.monotonic() + TRANSFER_TIMEOUT_S, begun
    while len(body) < length:
        guest.settimeout(max(give_up_at - time.monotonic(), 0.001))
        part = guest.recv(length - len(body))
        if not part:
            break
        body += part
    return body
