"""Runs commands one after the other within a limit for all, and keeps what became of each."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import IO, NamedTuple

WORTH_STARTING_S = 10.0
"""With less left of the whole's time a step is not begun."""
KILL_AFTER_S = 5.0
"""After SIGABRT, on which Python says where it was."""
NOTHING_CHOSEN = 5
"""What pytest ends with when its arguments choose no test of a file."""


class Became(StrEnum):
    """Says what became of a step."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


class Step(NamedTuple):
    """Names a command, and how long it may take by itself."""

    name: str
    seconds: float
    command: Sequence[str | Path]
    env: Mapping[str, str] = {}


class Ended(NamedTuple):
    name: str
    became: Became
    why: str = ""


class Steps:
    """Runs steps; what they print goes to standard output and to a file, as it comes."""

    def __init__(
        self, limit_s: float, out: IO[bytes], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._end_at = clock() + limit_s
        self._out = out
        self.ended: list[Ended] = []

    @property
    def left_s(self) -> float:
        return self._end_at - self._clock()

    def say(self, line: str) -> None:
        self._write(f"{line}\n".encode())

    def _write(self, data: bytes) -> None:
        for where in (self._out, sys.stdout.buffer):
            where.write(data)
            where.flush()

    def skip(self, name: str, why: str) -> None:
        """Say that a step is not run."""
        self._end(Ended(name, Became.NOT_RUN, why))

    def end_with(self, name: str, code: int) -> None:
        """Say what became of a step that ended with `code`."""
        if code in (0, NOTHING_CHOSEN):
            self._end(Ended(name, Became.PASSED))
        else:
            self._end(Ended(name, Became.FAILED, f"it ended with code {code}"))

    def _end(self, ended: Ended) -> None:
        self.ended.append(ended)
        self.say(f"-- {ended.name}: {ended.became}{f': {ended.why}' * bool(ended.why)}")

    def run(self, step: Step) -> Became:
        """Run a step, for as long as it may take and the whole has left.

        One that takes too long itself has failed; one that the whole's limit ends tells nothing.
        """
        left_s = self.left_s
        if left_s < WORTH_STARTING_S:
            self.skip(step.name, "no time is left")
            return Became.NOT_RUN
        self.say(f"-- {step.name}: {' '.join(map(str, step.command))[:300]}")
        code = self._code_of(step, min(step.seconds, left_s))
        if code is not None:
            self.end_with(step.name, code)
        elif left_s < step.seconds:
            self.skip(step.name, f"the time for all was over after {left_s:.0f} s of it")
        else:
            self._end(Ended(step.name, Became.FAILED, f"it took more than {step.seconds:g} s"))
        return self.ended[-1].became

    def _code_of(self, step: Step, limit_s: float) -> int | None:
        """Return what the command ended with; None when it had to be ended."""
        process = subprocess.Popen(
            list(map(str, step.command)),
            env={**os.environ, **step.env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # what it started ends with it
        )
        assert process.stdout is not None
        pump = threading.Thread(target=self._pump, args=(process.stdout,), daemon=True)
        pump.start()
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(limit_s)
        for number in () if code is not None else (signal.SIGABRT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_AFTER_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        pump.join(KILL_AFTER_S)
        return code

    def _pump(self, lines: IO[bytes]) -> None:
        for line in lines:
            self._write(line)

    def of(self, became: Became) -> list[Ended]:
        return [ended for ended in self.ended if ended.became is became]
