"""scripts/lib/sh/lanes.sh: what runs tests side by side ends what it started when it is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from redis_servers import wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = """
set -euo pipefail
bin={bin}
. scripts/lib/sh/lanes.sh
waits() {{ tests first; tests second; }}
begin waits
{foreground}
finish waits
"""
ENDED_WITHIN_S = 10.0


def of_session(session: int) -> list[str]:
    """The commands of a session's living processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            rest = path.read_text().rpartition(")")[2].split()
            command = (path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if int(rest[3]) == session and rest[0] != "Z":
            found.append(command)
    return found


@pytest.mark.parametrize("foreground", ["", "shown tests others"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_script_that_is_ended_leaves_no_lane_running(
    tmp_path: Path, foreground: str, number: signal.Signals
) -> None:
    pytest_ = tmp_path / "pytest"
    pytest_.write_text("#!/bin/sh\nsleep 600\n")
    pytest_.chmod(0o755)
    ran = subprocess.Popen(
        ["bash", "-c", SCRIPT.format(bin=tmp_path, foreground=foreground)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    lanes = 2 if foreground else 1
    wait_until(
        lambda: sum(c.startswith("sleep 600") for c in of_session(ran.pid)) == lanes, "lanes run"
    )
    began = time.monotonic()
    ran.send_signal(number)
    assert ran.wait(ENDED_WITHIN_S) == 128 + number
    wait_until(lambda: not of_session(ran.pid), "nothing runs", ENDED_WITHIN_S)
    assert time.monotonic() - began < ENDED_WITHIN_S
    assert [path.name for path in tmp_path.iterdir()] == ["pytest"]
