"""What `kvstore doctor` says of variables, files and limits that a process reads at its start."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import pytest
from each_input import each

from kvstore.cli.checks import machine, settings
from kvstore.cli.checks.base import Context, Finding, Level
from kvstore.cli.commands import doctor

ROOT = Path(__file__).parents[2]
NOTHING = Context(None, "kv:default", None)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(settings.PREFIX)]:
        monkeypatch.delenv(name)


def said(level: Level) -> list[Finding]:
    return [finding for finding in settings.look(NOTHING) if finding.level is level]


def test_every_variable_that_the_code_reads_is_known() -> None:
    """Else the doctor would call it a mistake."""
    files = [path for house in ("kvstore", "connector") for path in (ROOT / house).rglob("*.py")]
    texts = [path.read_text() for path in (*files, ROOT / "scripts" / "setup")]
    named = {name for text in texts for name in re.findall(r"\bKVSTORE_[A-Z_]*[A-Z]\b", text)}
    assert named - settings.VARIABLES == set()
    assert settings.VARIABLES - named - {"KVSTORE_SALT_FILE"} == set()


def test_a_mistyped_variable_is_named_with_the_nearest_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVSTORE_SECRT_FILE", "x")
    monkeypatch.setenv("KVSTORE_NOWHERE_NEAR", "x")
    far, near = said(Level.WARN)
    assert near == Finding(
        Level.WARN,
        "KVSTORE_SECRT_FILE is set, and nothing reads it",
        "did you mean KVSTORE_SECRET_FILE?",
    )
    assert "docs/settings.md" in far.do


@each(
    ("variables", "file", "found"),
    [
        ({"KVSTORE_SECRET": "short"}, "", "KVSTORE_SECRET='5 bytes': must have 16"),
        ({"KVSTORE_SECRET_FILE": "/nowhere"}, "", "KVSTORE_SECRET_FILE='/nowhere': cannot be read"),
        ({"KVSTORE_SALT": "short"}, "", "KVSTORE_SALT='5 bytes'"),
        ({"KVSTORE_TLS_CA": "/etc/passwd"}, "", "tls='/etc/passwd': cannot be used"),
        ({"KVSTORE_URL": "localhost:6379"}, "", "did you mean redis://localhost:6379?"),
        ({"KVSTORE_CUDA_COPIES": "fast"}, "", "must be some of single, any-order"),
        ({"KVSTORE_CONFIG": "/nowhere"}, None, "KVSTORE_CONFIG='/nowhere': cannot be read"),
        ({}, "[node]\nsize = 'much'", "node.size='much': must be a size"),
        ({}, "[node]\nsise = '1GiB'", "sise"),
        ({}, "[node]\ndisk = ['/nowhere']\ndisk_size = ['1TiB']", "must be a directory"),
        ({}, "[node]\ndisk = ['/dev/shm']\ndisk_size = ['1TiB']", "is on tmpfs"),
        ({}, "[node]\ndisk = ['/dev/shm']", "node.disk_size=[]: must be one size"),
        ({}, "[limits]\nnonsense = 1", "nonsense"),
        ({}, "[security]\nsalt_file = '/nowhere'", "security.salt_file='/nowhere'"),
    ],
)
def test_what_would_be_refused_at_a_start_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variables: dict[str, str],
    file: str | None,
    found: str,
) -> None:
    with monkeypatch.context() as environment:
        if file:
            path = tmp_path / "kvstore.toml"
            path.write_text(file)
            environment.setenv("KVSTORE_CONFIG", str(path))
        for name, value in variables.items():
            environment.setenv(name, value)
        assert any(found in one.found for one in said(Level.FAIL)), said(Level.FAIL)


def test_all_that_is_wrong_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_SECRET", "short")
    monkeypatch.setenv("KVSTORE_TLS_CA", "/nowhere")
    assert len(said(Level.FAIL)) == 2


def test_a_start_that_nothing_keeps_from_working_is_fine() -> None:
    assert said(Level.FAIL) == said(Level.WARN) == []
    assert len(said(Level.OK)) == 1


@pytest.mark.parametrize(("soft", "level"), [(1024, Level.WARN), (65536, Level.OK)])
def test_few_descriptors_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, soft: int, level: Level
) -> None:
    monkeypatch.setattr(resource, "prlimit", lambda pid, which: (soft, 1 << 20))
    (found,) = settings.descriptors(NOTHING)
    assert found.level is level
    assert ("ulimit -n 4096" in found.do) is (level is Level.WARN)


def test_shared_memory_that_cannot_be_written_to_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "SHM_DIR", Path("/proc"))  # nobody may make a file there
    (found,) = machine.shared_memory(NOTHING)
    assert (found.level, "cannot be written to" in found.found) == (Level.FAIL, True)


def test_looking_at_shared_memory_leaves_no_file() -> None:
    machine.shared_memory(NOTHING)
    assert [*machine.SHM_DIR.glob("kvstore-doctor-*")] == []


def test_quiet_shows_only_what_failed_and_what_to_look_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvstore.cli import main

    monkeypatch.setattr(doctor, "CHECKS", [doctor.Check("settings", settings.look)])
    assert main(["doctor", "--quiet"]) == 0
    assert capsys.readouterr().out == "\n0 failed, 0 to look at\n"
    monkeypatch.setenv("KVSTORE_SECRET", "short")
    assert main(["doctor", "-q"]) == 1
    assert capsys.readouterr().out.startswith("fail  settings")
