from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from kvstore.cli import COMMANDS, main


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("kvstore expl", "explain"),
        ("kvstore run --me", "--merge"),
        ("kvstore node --polic", "--policy"),
        ("kvstore up --policy l", "lru"),
    ],
)
def test_bash_completes_commands_options_and_choices(
    typed: str, offered: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    words = typed.split()
    asked = f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _shtab_kvstore"
    script = f"{capsys.readouterr().out}\n{asked} kvstore; echo ${{COMPREPLY[@]}}"
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30)
    assert ran.stdout.split() == [offered], ran.stderr


def test_each_shell_is_told_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    for shell in ("bash", "zsh", "tcsh"):
        assert main(["completion", shell]) == 0
        told = capsys.readouterr().out
        assert [name for name in COMMANDS if name not in told] == []
        if shutil.which(shell):
            subprocess.run([shell, "-n"], input=told, text=True, check=True, timeout=30)


def test_without_shtab_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install 'kvstore-llm[completion]'" in capsys.readouterr().err
