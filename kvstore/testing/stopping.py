"""Stops a process so that it really stands still."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

STOP_WITHIN_S = 30.0
_STANDING = frozenset("TtZX")


def stop(pid: int) -> None:
    """Stop `pid` (SIGSTOP), and return when every thread of it stands still.

    The signal stops the threads one by one, each when it is next scheduled: until then one of
    them may still answer. Raises `ProcessLookupError` for no process, `TimeoutError`.
    """
    os.kill(pid, signal.SIGSTOP)
    give_up_at = time.monotonic() + STOP_WITHIN_S
    while not _stands_still(pid):
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"process {pid} runs on {STOP_WITHIN_S} s after SIGSTOP")
        time.sleep(0.001)


def _stands_still(pid: int) -> bool:
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            stat = (task / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread that has ended since
        if stat.rpartition(")")[2].split()[0] not in _STANDING:
            return False
    return True
