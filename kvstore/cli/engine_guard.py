"""Ends an engine's processes with whoever started it, however that ends.

A program of its own, which nothing kills with its parent: it reads the number of the engine's
process group from standard input, and waits for the end of that.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

GRACE_S = 20.0
"""From SIGTERM to SIGKILL: an engine ends what it has started by itself, given the time."""
POLL_S = 0.05


def end_group(group: int) -> None:
    """Return when the group is empty: ask its processes, then kill them."""
    give_up_at = time.monotonic() + GRACE_S
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGTERM)
        while time.monotonic() < give_up_at:
            os.killpg(group, 0)
            time.sleep(POLL_S)
        os.killpg(group, signal.SIGKILL)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    group = sys.stdin.readline()
    sys.stdin.read()
    if group:
        end_group(int(group))


if __name__ == "__main__":
    main()
