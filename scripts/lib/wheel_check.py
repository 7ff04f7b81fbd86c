"""Tries the README's examples where nothing else is installed: `wheel_check.py WHEEL PYTHON...`.

For each interpreter it makes an empty environment, installs the wheel by pip as that is configured
here, and runs the README's Python block and its commands, word for word but for sizes and names
of files.
They run without any variable of ours, with nothing but the environment's own programs on PATH.
"""

from __future__ import annotations

import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
INSTALL_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 60.0
_PART = "from kvstore.segment.batch_read import READER; print(READER.name)"
SIZE = "64MiB"
"""In place of the README's sizes, which a test machine may not have."""


class WheelError(Exception):
    """Says what a user would have met."""


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """Return the lines below the heading "Commands", without their comments."""
    section = text.partition("\n## Commands\n")[2].partition("\n## ")[0]
    block = re.search(r"(?:^    .*\n)+", section, re.MULTILINE)
    lines = block[0].splitlines() if block else []
    return [line.partition("  #")[0].strip() for line in lines]


def adapted(command: str, tokens: Path) -> list[str]:
    """Return one program's words, with sizes and files of this machine."""
    words = shlex.split(re.sub(r"\b\d+[KMGT]iB\b", SIZE, command))
    return [str(tokens) if word == "FILE" else word for word in words]


class Bare:
    """Makes an environment with the wheel and what it requires, and a home of its own."""

    def __init__(self, directory: Path, python: str) -> None:
        self.bin = directory / "env" / "bin"
        self._python = python
        self._environment = {
            "PATH": str(self.bin),
            "HOME": str(directory),
            "TMPDIR": str(directory),
        }

    def install(self, wheel: Path) -> None:
        for command in (
            [self._python, "-m", "venv", str(self.bin.parent)],
            [str(self.bin / "python"), "-m", "pip", "install", "-q", str(wheel)],
        ):
            ran = subprocess.run(
                command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
            )
            if ran.returncode:
                raise WheelError(f"{shlex.join(command)}: {ran.stderr[-2000:]}")

    def start(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [str(self.bin / words[0]), *words[1:]],
            env=self._environment,
            cwd=self.bin.parent.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run(self, words: Sequence[str], given: bytes = b"", *, code: int = 0) -> bytes:
        """Return a program's standard output, or its errors where `code` is not 0. The program must
        end with `code`."""
        ran = subprocess.run(
            [str(self.bin / words[0]), *words[1:]],
            env=self._environment,
            cwd=self.bin.parent.parent,
            input=given,
            capture_output=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
        if ran.returncode != code:
            said = (ran.stdout + ran.stderr).decode(errors="replace")
            raise WheelError(f"`{shlex.join(words)}` ended with {ran.returncode}: {said[-2000:]}")
        return ran.stderr if code else ran.stdout


def wait_for(
    process: subprocess.Popen[bytes], text: bytes, timeout_s: float = RUN_TIMEOUT_S
) -> None:
    """Wait until the program says so. Raises `WheelError` when it does not in time."""
    assert process.stdout is not None
    said, give_up_at = b"", time.monotonic() + timeout_s
    while text not in said:
        left_s = give_up_at - time.monotonic()
        ready = left_s > 0 and select.select([process.stdout], [], [], left_s)[0]
        piece = process.stdout.read1() if ready else b""  # type: ignore[attr-defined]
        if not piece:
            raise WheelError(f"never said {text!r}: {said.decode(errors='replace')}")
        said += piece


def run_commands(bare: Bare, lines: Sequence[str], tokens: Path) -> None:
    """Run the README's commands in its order; those in the foreground end with Ctrl-C."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for line in lines:
            left, pipe, right = line.partition(" | ")
            words = adapted(right if pipe else line, tokens)
            if words[:2] in (["kvstore", "up"], ["kvstore", "node"]):
                process = bare.start(words)
                running.append(process)
                wait_for(process, b"KVSTORE_URL" if words[1] == "up" else b"ready")
                continue
            given = left.removeprefix("echo ").encode() + b"\n" if pipe else b""
            said = bare.run(words, given)
            if words[:2] == ["kvstore", "get"] and said != b"hello\n":
                raise WheelError(f"`{line}` gave {said!r}")
    finally:
        for process in reversed(running):
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=RUN_TIMEOUT_S)


def check(wheel: Path, python: str) -> None:
    """Try the wheel in an empty environment. Raises `WheelError`, or
    `subprocess.TimeoutExpired`."""
    text = README.read_text()
    with tempfile.TemporaryDirectory(prefix="kvw-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        bare = Bare(directory, python)
        bare.install(wheel)
        bare.run(["python", "-c", python_blocks(text)[0]])
        part = bare.run(["python", "-c", _PART]).decode().strip()
        if part != ("Python" if wheel.stem.endswith("-none-any") else "compiled"):
            raise WheelError(f"{wheel.name}: blocks are read by the part called {part}")
        tokens = directory / "tokens.json"
        tokens.write_text(str(list(range(512))))
        run_commands(bare, commands(text), tokens)
        bare.run(["kvstore-router", "--help"])
        if b"needs aiohttp" not in bare.run(["kvstore-router", "--decode", "http://x"], code=1):
            raise WheelError("kvstore-router does not say what it needs")


def main(wheel: str, *pythons: str) -> int:
    failed = 0
    for python in pythons:
        started = time.monotonic()
        try:
            check(Path(wheel), python)
        except (WheelError, subprocess.TimeoutExpired) as e:
            failed += 1
            print(f"FAILED {python}: {e}", flush=True)
        else:
            print(f"ok     {python} ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{len(pythons) - failed} passed, {failed} failed")
    return 1 if failed or not pythons else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
