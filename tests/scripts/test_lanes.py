"""scripts/lib/sh/lanes.sh: lanes share what there is to test, and end with what began them."""

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


TAKING = """
set -euo pipefail
bin={bin}
. scripts/lib/sh/lanes.sh
types() {{ echo types >>{bin}/ran; return {types}; }}
folder() {{ tests "$2" "$1"; }}
first() {{ take types tests/cli tests/node tests/sim; }}
second() {{ first; }}
begin first second
finish first second
again_alone types tests/cli tests/node tests/sim
"""


@pytest.mark.parametrize("types", [0, 3])
def test_lanes_share_the_parts_and_each_part_counts(tmp_path: Path, types: int) -> None:
    pytest_ = tmp_path / "pytest"
    pytest_.write_text(f"#!/bin/sh\nfor last; do :; done; echo $last >>{tmp_path}/ran\n")
    pytest_.chmod(0o755)
    ran = subprocess.run(
        ["bash", "-c", TAKING.format(bin=tmp_path, types=types)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    taken = (tmp_path / "ran").read_text().split()
    assert sorted(taken) == ["tests/cli", "tests/node", "tests/sim", "types"], ran.stderr
    assert ran.returncode == bool(types)
    assert ("failed: types (exit status 3" in ran.stdout) == bool(types)
