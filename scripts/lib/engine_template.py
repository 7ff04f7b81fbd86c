"""Forks engines' processes from one that has imported vLLM: three quarters of what it takes to
start a small engine is that import.

    process = fork_engine([python], ["engines.py", "7"], environment, pass_fd=7)

A template is a process of its own, one for each Python, that lives as long as its caller. It does
nothing but import, so what it forks is a process like one that was started, with a program,
arguments, environment, folder and log of its own. It differs in two things: variables that are read
while modules are imported (`OMP_...`, `LD_PRELOAD`) are the template's, and so is the seed of
`hash()`. Engines with a scheduler in a process of its own have another seed there.

In one file, because this is also the program that runs in that process.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

REQUEST_BYTES_MAX = 1 << 17
FORK_TIMEOUT_S = 240.0
"""For the first fork: the template imports before it answers."""
UNKNOWN_CODE = 255
"""Of an engine that has ended after its template did."""
PATHS = "PYTHONPATH"
READ_AT_IMPORT = ("OMP_", "KMP_", "GOMP_", "LD_", "MKL_", "PYTHON")
"""Variables that begin so are the template's, but for `PATHS`."""
IMPORTED = ("vllm", "vllm.v1.engine.llm_engine")
WARM = (
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
)
"""Imported where they are there: another release may have them elsewhere."""


def can_be_forked(environment: Mapping[str, str]) -> bool:
    """Return whether an engine of that environment may come from a template of this one."""
    return all(
        name == PATHS or os.environ.get(name) == value
        for name, value in environment.items()
        if name.startswith(READ_AT_IMPORT)
    )


class ForkedProcess:
    """Has what `subprocess.Popen` has, as far as `EngineProcess` needs it."""

    def __init__(self, template: Template, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._template = template
        self._ended = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
            os.close(self._ended)
            try:
                self.returncode = self._template.code_of(self.pid)
            except RuntimeError:
                self.returncode = UNKNOWN_CODE
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        if self.returncode is None and not select.select([self._ended], [], [], timeout_s)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout_s)
        code = self.poll()
        assert code is not None
        return code

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._ended, signal.SIGKILL)


class Template:
    """Is the caller's end of one. Thread-safe."""

    def __init__(
        self, python: str, environment: Mapping[str, str], log: BinaryIO | None = None
    ) -> None:
        """What it says itself, when an import fails, is in the `log` of the first engine."""
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [python, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**environment, PATHS: os.environ.get(PATHS, "")},  # its own come later
            stdin=subprocess.DEVNULL,
            stdout=log or subprocess.DEVNULL,
            stderr=subprocess.STDOUT if log else subprocess.DEVNULL,
        )
        theirs.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        cwd: Path | None,
        pass_fd: int,
        log: BinaryIO | None,
    ) -> ForkedProcess:
        request = {"command": command, "environment": dict(environment), "pass_fd": pass_fd}
        request["cwd"] = str(cwd or Path.cwd())
        with Path(os.devnull).open("r+b") as nowhere:
            fds = [pass_fd, nowhere.fileno(), (log or nowhere).fileno()]
            return ForkedProcess(self, self._ask(request, fds))

    def code_of(self, pid: int) -> int:
        return self._ask({"ended": pid}, [])

    def _ask(self, request: dict[str, Any], fds: list[int]) -> int:
        raw = json.dumps(request).encode()
        if len(raw) > REQUEST_BYTES_MAX:
            raise ValueError(f"{len(raw)} bytes of environment and arguments")
        with self._lock:
            try:
                self._socket.settimeout(FORK_TIMEOUT_S)
                socket.send_fds(self._socket, [raw], fds)
                answer = self._socket.recv(REQUEST_BYTES_MAX)
            except OSError:
                answer = b""
            if not answer:  # a late answer would be taken for that to the next request
                self._process.kill()
                self._process.wait()
                raise RuntimeError("the process that imports vLLM for engines has ended")
        return int(answer)


_templates: dict[str, Template] = {}
_lock = threading.Lock()


def start_engine(
    on: Sequence[str],
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    pass_fd: int,
    cwd: Path | None = None,
    log: BinaryIO | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` (a program's path and its arguments), which inherits `pass_fd` by that
    number, on the Python that `on` ends with."""
    return subprocess.Popen(
        [*on, *command],
        pass_fds=[pass_fd],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log or subprocess.DEVNULL,
        stderr=subprocess.STDOUT if log else subprocess.DEVNULL,
    )


def prepare(python: str, environment: Mapping[str, str]) -> None:
    """Have the template of `python` import, while its caller does something else."""
    with _lock:
        if python not in _templates:
            _templates[python] = Template(python, environment)


def fork_engine(
    on: Sequence[str],
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    pass_fd: int,
    cwd: Path | None = None,
    log: BinaryIO | None = None,
) -> ForkedProcess:
    """As `start_engine` from the template of a Python, which is all that `on` names. Raises
    `RuntimeError` when the template ends."""
    (python,) = on
    with _lock:
        template = _templates.get(python)
        if template is None or not template.alive:
            template = _templates[python] = Template(python, environment, log)
    return template.fork(command, environment, cwd, pass_fd, log)


# --- in the template ------------------------------------------------------


def _import_all() -> None:
    import importlib

    for name in IMPORTED:
        importlib.import_module(name)
    for name in WARM:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _run(request: dict[str, Any], fds: Sequence[int]) -> None:
    """Be the engine's process from here on."""
    theirs, nowhere, log = fds
    os.chdir(request["cwd"])
    os.dup2(nowhere, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(theirs, request["pass_fd"])
    for fd in fds:
        if fd not in (0, 1, 2, request["pass_fd"]):
            os.close(fd)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # it is remembered from the first who asked
    program, *arguments = request["command"]
    paths = [one for one in os.environ.get(PATHS, "").split(os.pathsep) if one]
    # As Python does it: the program's folder first, then the variable's.
    sys.path[0:1] = [str(Path(program).parent), *paths]
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    _import_all()
    while True:
        raw, fds, _, _ = socket.recv_fds(connection, REQUEST_BYTES_MAX, 3)
        if not raw:
            os._exit(0)  # the caller is gone, and engines end by themselves then
        request = json.loads(raw)
        if "ended" in request:
            _, status = os.waitpid(request["ended"], 0)
            connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            connection.close()
            _run(request, fds)
            sys.exit()
        for fd in fds:
            os.close(fd)
        connection.send(str(pid).encode())


if __name__ == "__main__":
    main()
