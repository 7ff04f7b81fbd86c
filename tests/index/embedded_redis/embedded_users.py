"""Other processes that use the embedded Redis, and what must be left when they have ended."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from redis_servers import gone, kill, wait_until

from kvstore.index.embedded_redis import server as module
from kvstore.index.embedded_redis import supervisor as supervisor
from kvstore.index.embedded_redis.server import (
    EmbeddedRedis,
)

END_TIMEOUT_S = 20.0

USER = """
import sys
from kvstore.index.embedded_redis.server import EmbeddedRedis
held = EmbeddedRedis.acquire(sys.argv[1])
print(held.pid, held.supervisor_pid, flush=True)
sys.stdin.read()
held.close()
"""


class User:
    """Another process that uses the embedded Redis until it is told to end, or killed."""

    def __init__(self, run_dir: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER, str(run_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def pids(self) -> tuple[int, int]:
        pid, supervisor_pid = self.process.stdout.readline().split()
        return int(pid), int(supervisor_pid)

    def end(self) -> None:
        self.process.stdin.close()
        assert self.process.wait(END_TIMEOUT_S) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(END_TIMEOUT_S)


def nothing_is_left(run_dir: Path, *pids: int) -> None:
    wait_until(lambda: all(map(gone, pids)), "the processes end", END_TIMEOUT_S)
    wait_until(lambda: not any(run_dir.iterdir()), "the files go", END_TIMEOUT_S)


def kill_until_given_up(held: EmbeddedRedis) -> None:
    deadline = time.monotonic() + END_TIMEOUT_S
    while not gone(held.supervisor_pid):
        assert time.monotonic() < deadline
        kill(int(module._details(held.socket.parent).get("pid", 1 << 22)))
        time.sleep(0.02)
