"""kvstore/settings/limit_table.py: constants that the operator's file moves, and may not move."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import connector.limits
import kvstore.limits
from connector.settings import ConnectorSettings
from kvstore import UsageError
from kvstore.config_file import read_config
from kvstore.settings.limit_table import LimitTable
from kvstore.settings.reader import Allowed, allowed_in
from kvstore.settings.toml_file import CONFIG

MODULES = (kvstore.limits, connector.limits)


def run(path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        env={**os.environ, CONFIG: str(path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def moved(table: LimitTable) -> dict[str, object]:
    """Another value for each."""
    in_force = table.in_force()

    def other(name: str, allowed: Allowed) -> object:
        value = getattr(in_force, name)
        if allowed.kind is bool:
            return not value
        if isinstance(value, str):  # one of several words
            return next(one for one in get_args(allowed.kind) if one != value)
        return value * 2 if allowed.kind is float else allowed.range.least + 16

    return {name: other(name, allowed) for name, allowed in allowed_in(table.kind).items()}


def test_every_declared_constant_is_moved_in_a_process_that_starts_with_the_file(tmp_path) -> None:
    path = tmp_path / "kv.toml"
    said = ""
    for module in MODULES:
        said += f"[{module.MOVABLE.table}]\n"
        said += "".join(
            f"{name} = {json.dumps(value)}\n" for name, value in moved(module.MOVABLE).items()
        )
    path.write_text(said)
    code = (
        "import kvstore.limits as a, connector.limits as b, dataclasses\n"
        "print([dataclasses.asdict(m.MOVABLE.in_force()) for m in (a, b)])\n"
        "from kvstore.config_file import read_config; read_config().limits()\n"
        "from kvstore.node.stream import server; print(server.STREAM_CONNECTIONS_MAX)"
    )
    ran = run(path, "-c", code)
    expected = [moved(module.MOVABLE) for module in MODULES]
    assert ran.stdout == f"{expected}\n{expected[0]['stream_connections_max']}\n", ran.stderr
    assert expected != [module.MOVABLE.in_force() for module in MODULES]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stream_conections_max = 3", r"unknown: did you mean stream_connections_max\?"),
        ("stream_connections_max = 0", r"limits.stream_connections_max=0: must be a whole number"),
        ("node_ttl_s = 60.0", r"\[limits\]='node_ttl_s': unknown"),
        ("stream_connections_max = 3", f"has no effect: set {CONFIG} before importing kvstore"),
    ],
)
def test_what_cannot_be_and_what_came_too_late_is_said(tmp_path, text, says) -> None:
    path = tmp_path / "kv.toml"
    path.write_text(f"[limits]\n{text}\n")
    with pytest.raises(UsageError, match=says):
        read_config(path).limits()


def test_trap_a_wrong_file_does_not_keep_the_package_from_being_imported(tmp_path) -> None:
    path = tmp_path / "kv.toml"
    path.write_text("[limits]\nstream_connections_max = 0\n")
    ran = run(path, "-m", "kvstore.cli", "config")
    assert (ran.returncode, ran.stdout) == (2, f"# {path} ({CONFIG})\n\n[limits]\n")
    assert ran.stderr.startswith("kvstore: limits.stream_connections_max=0: must be a whole")


def test_a_command_begins_anew_with_the_constants_of_the_file_that_it_is_given(tmp_path) -> None:
    path = tmp_path / "kv.toml"
    path.write_text("[limits]\nstream_connections_max = 3\nclients = 5\n")
    ran = run(Path(), "-m", "kvstore.cli", "config", "--config", str(path))
    assert "clients = 5  # file\n" in ran.stdout, ran.stderr
    assert "stream_connections_max = 3  # file\n" in ran.stdout
    assert "stream_nodes_at_once = 64  # default\n" in ran.stdout


def test_an_engine_checks_its_own_table(tmp_path, monkeypatch) -> None:
    path = tmp_path / "kv.toml"
    path.write_text("[connector_limits]\nsave_job_max = 3\n")
    monkeypatch.setenv(CONFIG, str(path))
    with pytest.raises(UsageError, match=r"'save_job_max': unknown: did you mean save_jobs_max"):
        ConnectorSettings.from_extra({})
