"""Defines a check: it looks at one thing and says what it found and what to do about it."""

from __future__ import annotations

import enum
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Level(enum.StrEnum):
    """Says how bad a finding is."""

    OK = "ok"
    INFO = "info"
    """Good to know; nothing to do."""
    WARN = "warn"
    """It works, but not as it should."""
    FAIL = "fail"
    """It does not work."""


class Finding(NamedTuple):
    """Says what a check found, and what to do about it; `do` is empty when there is nothing to
    do."""

    level: Level
    found: str
    do: str = ""


class Context(NamedTuple):
    """Holds what the user named on the command line."""

    url: str | None
    key_prefix: str
    run_dir: Path | None
    """As given; None: the default one."""


Look = Callable[[Context], list[Finding]]


class Check(NamedTuple):
    """Looks at one thing, which may take `timeout_s` seconds."""

    name: str
    look: Look
    timeout_s: float = 5.0


def run_check(check: Check, context: Context) -> list[Finding]:
    """Return what a check finds, or that it failed or took too long. Never raises, never hangs."""
    found: list[Finding] = []

    def look() -> None:
        try:
            found.extend(check.look(context))
        except Exception as e:  # whatever breaks is a finding: the other checks go on
            found.append(Finding(Level.FAIL, f"the check failed: {type(e).__name__}: {e}"))

    # A daemon: one that hangs (a name server, a driver) must not keep the process.
    thread = threading.Thread(target=look, name=f"check-{check.name}", daemon=True)
    thread.start()
    thread.join(check.timeout_s)
    if thread.is_alive():
        return [Finding(Level.FAIL, f"no result within {check.timeout_s:g} s")]
    return found


def read_text(path: str) -> str:
    """Return the text of a file of /proc or /sys; empty when it is not there."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def ask_python(executable: str, code: str, timeout_s: float) -> tuple[bool, str]:
    """Run `code` in a process of its own: whether it ended well, and the last line it said.

    What loads a driver may crash or hang, and must not take the doctor with it.
    """
    try:
        ran = subprocess.run(
            [executable, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {timeout_s:g} s"
    said = (ran.stdout if ran.returncode == 0 else ran.stderr).strip().splitlines()
    return ran.returncode == 0, said[-1] if said else f"exit code {ran.returncode}"
