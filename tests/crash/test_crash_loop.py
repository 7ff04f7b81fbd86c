"""SIGKILL at random times: as many rounds of `scripts/crash-loop` as fit into the tests."""

import re
import subprocess
import sys

import pytest

ROUNDS = 100
TIMEOUT_S = 240
"""On a busy machine; a quiet one takes 30 s."""
HAPPENS = ("paused", "interrupted", "cancelled", "silenced", "forged", "flipped")
"""In every run, whatever the machine does besides."""

pytestmark = pytest.mark.timeout(TIMEOUT_S + 30)


def test_whoever_is_killed_nothing_is_wrong_nothing_leaks_and_nobody_hangs():
    ran = subprocess.run(
        [sys.executable, "-m", "kvstore.testing.crash", "--rounds", str(ROUNDS)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    assert "nothing wrong, nothing left, no hang" in ran.stdout
    counts = {what: int(n) for what, n in re.findall(r"(\w+) (\d+)", ran.stdout)}
    assert [what for what in HAPPENS if not counts[what]] == []
