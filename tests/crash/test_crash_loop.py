"""SIGKILL at random times: as many rounds of `scripts/crash-loop` as fit into the tests."""

import multiprocessing
import re
import subprocess
import sys
from ctypes import c_longlong
from multiprocessing.sharedctypes import RawArray

import pytest

from kvstore.testing.crash import workers

ROUNDS = 100
TIMEOUT_S = 240
"""On a busy machine; a quiet one takes 30 s."""
HAPPENS = ("paused", "forks", "interrupted", "cancelled", "silenced", "forged", "flipped")
"""In every run, whatever the machine does besides."""

pytestmark = pytest.mark.timeout(TIMEOUT_S + 30)


@pytest.mark.nightly
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


def test_one_wrong_byte_ends_who_reads_it(node, client):
    """The others show nothing unless this is so."""
    for i in range(workers.KEYS):
        client.put(f"k{i}", workers.content(f"k{i}", 600)[:-1] + b"?")
    place = workers.WorkerPlace(node.redis.url, node.run_dir, node.key_prefix)
    counters = RawArray(c_longlong, workers.FIELDS)
    context = multiprocessing.get_context("forkserver")
    reader = context.Process(target=workers.reader, args=(place, 1, counters))
    reader.start()
    reader.join(TIMEOUT_S)
    assert reader.exitcode == workers.WRONG_BYTES
