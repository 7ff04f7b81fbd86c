"""Every command under `python -X dev -W error`: nothing left open, nothing outdated."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from places import REPOSITORY, Place, Running, clean_env

if TYPE_CHECKING:
    from collections.abc import Iterator

STRICT = {"PYTHONDEVMODE": "1", "PYTHONWARNINGS": "error"}


@pytest.fixture(scope="module")
def strict() -> Iterator[Place]:
    """A store whose every process was started so."""
    place = Place()
    up = Running(
        *("up", "--size", "16MiB", "--run-dir", str(place.run_dir)),
        env=clean_env(**STRICT),
    )
    up.wait_for("Ctrl-C ends it.")
    yield place
    assert up.end(signal.SIGINT) == 130
    assert "Warning" not in up.output
    place.close()


@pytest.mark.parametrize(
    ("command", "exit_code"),
    [
        ("put k", 0),
        ("get nothing", 3),
        ("ls", 0),
        ("stat", 0),
        ("explain --key k", 0),
        ("acl", 0),
        ("node --clean", 0),
        ("doctor", 0),
    ],
)
def test_a_command_leaves_nothing_that_python_warns_of(
    strict: Place, command: str, exit_code: int
) -> None:
    where = () if command == "acl" else ("--run-dir", str(strict.run_dir))
    ran = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", *command.split(), *where],
        cwd=REPOSITORY,
        env=clean_env(**STRICT),
        input=b"v",
        capture_output=True,
        timeout=60,
    )
    assert ran.returncode == exit_code, ran.stderr
    assert b"Warning" not in ran.stderr
