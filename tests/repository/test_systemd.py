"""deploy/systemd: the unit says what the node's own code and docs/systemd.md take for granted."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvstore.cli import _parse

UNIT = Path(__file__).parents[2] / "deploy/systemd/kvstore-node.service"


def settings(section: str) -> dict[str, str]:
    """The settings of one section of the unit."""
    _, _, after = UNIT.read_text().partition(f"[{section}]\n")
    lines = [line for line in after.partition("\n[")[0].splitlines() if line[:1] not in ("#", "")]
    return dict(line.split("=", 1) for line in lines)


def test_its_command_is_one_of_ours_and_keeps_the_blocks() -> None:
    program, *words = settings("Service")["ExecStart"].split()
    args = _parse(words)
    assert Path(program).name == "kvstore"
    assert args.keep


def test_what_a_start_goes_on_with_outlives_a_stop() -> None:
    service = settings("Service")
    assert service["Environment"] == f"KVSTORE_RUN_DIR=/run/{service['RuntimeDirectory']}"
    assert service["RuntimeDirectoryPreserve"] == "yes"
    assert service["RuntimeDirectoryMode"] == "0700"
    assert service["Type"] == "notify"


def test_it_has_the_memory_of_the_host() -> None:
    assert not {"PrivateIPC", "PrivateDevices", "DynamicUser"} & set(settings("Service"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_takes_it(tmp_path: Path) -> None:
    """With a program that is there, in place of that of an installation."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/kvstore/bin/kvstore", "/bin/true"))
    ran = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = [line for line in ran.stderr.splitlines() if UNIT.name in line]
    assert not said, ran.stderr
