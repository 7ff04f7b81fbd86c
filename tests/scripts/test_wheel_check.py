"""scripts/lib/wheel_check.py finds the README's examples, and says when one does not run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.cli import COMMANDS

PROJECT = Path(__file__).parents[2]
sys.path.insert(0, str(PROJECT / "scripts" / "lib"))

from wheel_check import README, Bare, WheelError, adapted, commands, python_blocks, wait_for  # noqa: E402


@pytest.fixture
def bare(tmp_path: Path) -> Bare:
    """As if the environment of the tests were the empty one."""
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "bin").symlink_to(Path(sys.executable).parent)
    return Bare(tmp_path, sys.executable)


def test_the_readme_shows_every_command_and_one_python_block() -> None:
    text = README.read_text()
    shown = " ".join(commands(text))
    hidden = {name for name in COMMANDS if f"kvstore {name}" not in shown}
    assert hidden == {"run", "completion", "plan", "replay", "export", "import"}, (
        "they need an engine, shtab, a trace, an object store"
    )
    assert [name for name in hidden if f"kvstore {name} " not in text] == []
    assert len(python_blocks(text)) == 1


def test_each_line_of_the_readmes_commands_is_one() -> None:
    """A comment that goes on in a line of its own would be run as a command."""
    for line in commands(README.read_text()):
        assert "kvstore" in adapted(line.partition(" | ")[2] or line, Path("tokens"))[:1], line


def test_sizes_and_files_are_those_of_this_machine() -> None:
    words = adapted("kvstore up --nodes 1 --size 4GiB --tokens FILE", Path("/t"))
    assert words == ["kvstore", "up", "--nodes", "1", "--size", "64MiB", "--tokens", "/t"]


def test_an_example_that_fails_is_an_error_with_what_it_said(bare: Bare) -> None:
    with pytest.raises(WheelError, match="NameError: name 'tokens'"):
        bare.run(["python", "-c", "tokens"])
    assert bare.run(["python", "-c", "import sys; sys.exit('why')"], code=1) == b"why\n"


def test_a_command_that_never_says_it_is_ready_is_an_error(bare: Bare) -> None:
    process = bare.start(["python", "-c", "print('starting')"])
    with pytest.raises(WheelError, match="starting"):
        wait_for(process, b"ready")
    process.communicate(timeout=30)


def test_examples_see_nothing_of_this_shell(bare: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_URL", "redis://elsewhere")
    said = bare.run(["python", "-c", "import os; print(*sorted(os.environ))"]).decode().split()
    assert {"PATH", "HOME", "TMPDIR"} >= {name for name in said if name != "LC_CTYPE"}


@pytest.mark.long
def test_the_script_says_which_python_was_not_tried() -> None:
    ran = subprocess.run(
        [str(PROJECT / "scripts" / "test-wheel"), "3.1"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "NOT TRIED: Python 3.1 is not on this machine" in ran.stdout
    assert ran.returncode == 1, "nothing was tried"
