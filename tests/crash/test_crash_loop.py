"""SIGKILL at random times: as many rounds of `scripts/crash-loop` as fit into the tests."""

import subprocess
import sys

ROUNDS = 100
TIMEOUT_S = 240
"""On a busy machine; a quiet one takes 20 s."""


def test_whoever_is_killed_nothing_is_wrong_nothing_leaks_and_nobody_hangs():
    ran = subprocess.run(
        [sys.executable, "-m", "kvstore.testing.crash", "--rounds", str(ROUNDS)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    assert "nothing wrong, nothing left, no hang" in ran.stdout
