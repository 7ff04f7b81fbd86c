"""scripts/lib/progress.*: who watches through a pipe sees how far a script is."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

LIB = Path(__file__).parents[2] / "scripts" / "lib"


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(LIB))
    import progress

    return progress


def test_through_a_pipe_each_task_has_a_line_at_its_start_at_its_end_and_now_and_then(
    progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    said = io.StringIO()
    with progress.steps(Console(file=said, width=20)) as steps:
        one, two = steps.add("one, which has a long title", 3), steps.add("two", 1)
        steps.advance(one)
        monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
        steps.advance(one)
        steps.advance(one)
        steps.advance(two)
    lines = [line.partition(" s  ")[2] for line in said.getvalue().splitlines()]
    title = "one, which has a long title"
    begun, ended = [f"{title}: 0 of 3", "two: 0 of 1"], [f"{title}: 3 of 3", "two: 1 of 1"]
    assert lines == [*begun, f"{title}: 2 of 3", *ended]


def test_at_a_terminal_there_are_bars(progress) -> None:
    from rich.console import Console

    said = io.StringIO()
    with progress.steps(Console(file=said, force_terminal=True, width=80)) as steps:
        steps.advance(steps.add("one", 1))
    assert "1/1" in said.getvalue()


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euc", f". {LIB}/sh/progress.sh; {script}"],
        env={"SAY_EVERY_S": "0.2", "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_long_command_of_a_shell_script_is_told_of_while_it_runs() -> None:
    ran = run("while_saying 'setup: installing' sleep 1; echo done")
    assert (ran.returncode, ran.stdout) == (0, "done\n")
    lines = ran.stderr.splitlines()
    assert lines
    assert all(re.fullmatch(r"setup: installing: \d+ s so far", line) for line in lines)


def test_its_exit_code_is_the_commands_and_nothing_is_said_afterwards() -> None:
    ran = run("while_saying x false || echo failed with $?; sleep 0.6")
    assert (ran.stdout, ran.stderr) == ("failed with 1\n", "")
