"""A node with a disk gets SIGKILL at system calls of its saves, evictions, deletes and starts, one
drawn after the other: what is found afterwards is right or a miss, and it always starts again."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_stories import DiskNode, Story
from redis_servers import RedisServer, wait_until
from stores import MIB, node_stats
from warm_processes import WarmProcess, command

from kvstore import Client

KILLS = int(os.environ.get("KVSTORE_KILLS", 10_000))
KILLS_LONG, LONG_S = 60, 40.0
LIFE_S, ADOPTION_S = 1.5, 0.2
NAMES = 48
DISK_BYTES = 8 * MIB
WRITES = "pwritev,pwritev2,pwrite64,fdatasync,fsync"
FILES = (
    f"{WRITES},fallocate,ftruncate,openat,unlink,rename,flock,mmap,munmap,preadv,preadv2,pread64"
)
CALLS = {WRITES: 60, FILES: 300, "all": 4000}
"""Sets of calls, and up to which of a thread's calls of the set one is drawn."""
ENDED = r"^\d+ +(?:<\.\.\. )?(\w+)[( ].*= \?$"
"""What strace says of a call that never returned."""
WAITS = {"futex", "restart_syscall", "poll", "epoll_wait", "recvfrom", "clock_nanosleep", "exit"}
"""What other threads are in meanwhile."""

pytestmark = pytest.mark.skipif(
    shutil.which("strace") is None, reason="no strace here: nobody is killed at a system call"
)


def stopped_command(*argv: str) -> int:
    """Be `kvstore` with these arguments, once somebody watches."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return command(*argv)


class WatchedNode(DiskNode):
    """A node that is killed when a thread of it makes its nth call of a set."""

    def __init__(self, redis: RedisServer, where: Path, mode: str) -> None:
        self._said = where / "calls"
        options = ("--disk-write", mode)
        where.mkdir()
        super().__init__(redis, where / "disk", *options, disk_size=DISK_BYTES)

    @contextlib.contextmanager
    def killed_at(self, calls: str, nth: int) -> Iterator[None]:
        """A context in which that is so."""
        pid = self.process.pid
        how = ("-e", f"trace={calls}", "-e", f"inject={calls}:signal=KILL:when={nth}")
        watcher = subprocess.Popen(
            ["strace", "-f", "-qq", "-o", self._said, *how, "-p", str(pid)],
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(lambda: self.process.poll() is not None or is_watched(pid), "strace")
            yield
        finally:
            self.kill()
            watcher.wait(20)

    def died_at(self) -> str:
        """Return the call at which it was killed; '' when it was not by strace."""
        ended = re.findall(ENDED, self._said.read_text(errors="replace"), re.MULTILINE)
        return next((call for call in ended if call not in WAITS), "")

    def start_watched(self, calls: str, nth: int) -> None:
        """Start it, and have it killed at that call or when it is ready."""
        argv = ("node", "--url", self.redis.url, "--run-dir", str(self.run_dir))
        argv += ("--name", self.name, "--key-prefix", self.key_prefix, *self._options)
        self.process = WarmProcess(stopped_command, *argv, environment=self.environment)
        stat = Path(f"/proc/{self.process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it stops")
        with self.killed_at(calls, nth):
            self.process.send_signal(signal.SIGCONT)
            until = time.monotonic() + LIFE_S
            while self.process.poll() is None and time.monotonic() < until:
                if self.is_ready():  # and reads what is on its disk
                    until = min(until, time.monotonic() + ADOPTION_S)
                time.sleep(0.005)

    def is_ready(self) -> bool:
        word = self.directory.announcement()
        return word is not None and word.pid == self.process.pid and self.directory.socket.exists()


def is_watched(pid: int) -> bool:
    """Return whether all threads of a process are traced."""
    with contextlib.suppress(OSError):
        tasks = [task / "status" for task in Path(f"/proc/{pid}/task").iterdir()]
        return all("TracerPid:\t0\n" not in status.read_text() for status in tasks)
    return True


class KilledStory(Story):
    """A story of lives that end at a system call, and of starts that do."""

    def __init__(self, node: WatchedNode, seed: int) -> None:
        super().__init__(node, seed)
        self.watched = node
        self.names = self.names[:NAMES]
        self.died: Counter[str] = Counter()

    def drawn(self) -> tuple[str, int]:
        calls = self.rng.choice(list(CALLS))
        return calls, int(CALLS[calls] ** self.rng.random())

    def life(self) -> None:
        node, rng = self.watched, self.rng
        with Client(**node.client_options) as client, node.killed_at(*self.drawn()):
            until = time.monotonic() + LIFE_S
            while node.process.poll() is None and time.monotonic() < until:
                self.act(client)
        self.note(node.died_at())
        for _ in range(rng.choice([0, 0, 1, 2])):
            self.lose_memory()
            node.start_watched(*self.drawn())
            self.note(node.died_at(), "start: ")
        self.lose_memory()
        node.start()
        assert (node.disk / "kvstore.disk").stat().st_blocks * 512 <= DISK_BYTES
        with Client(**node.client_options) as client:
            wait_until(lambda: not node_stats(client)["disk_adopting"], "adoption", 20)
            assert node_stats(client)["disk_devices"] == 1, f"seed {self.seed}"
            for name in self.names:
                self.look(client, name)

    def note(self, call: str, where: str = "") -> None:
        if call:  # else it lived long enough, and was killed in between
            self.died[where + call] += 1

    def lose_memory(self) -> None:
        if self.rng.random() < 0.6:
            self.watched.lose_memory()


def killed(redis: RedisServer, where: Path, seed: int, kills: int, within_s: float) -> Counter[str]:
    """Kill nodes until that many died at a call, or so long; return at which they did."""
    until, died = time.monotonic() + within_s, Counter[str]()
    rng = random.Random(seed)
    for run in range(kills):
        mode = rng.choice(["through", "eviction", "idle"])
        with WatchedNode(redis, where / str(run), mode) as node:
            story = KilledStory(node, seed + run)
            for _ in range(20):
                story.life()
                if time.monotonic() > until or (died + story.died).total() >= kills:
                    break
            died += story.died
            assert story.hits or time.monotonic() > until
        if time.monotonic() > until or died.total() >= kills:
            return died
    return died


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_node_that_is_killed_at_a_system_call_starts_again_and_is_right(redis_server, tmp_path):
    seed = int(time.time())
    died = killed(redis_server, tmp_path, seed, KILLS_LONG, LONG_S)
    assert len(died) > 2, f"seed {seed}: {died}"


@pytest.mark.nightly
@pytest.mark.timeout(8 * 3600)
def test_however_often_it_is_killed_at_a_system_call(redis_server, tmp_path, capsys):
    seed, began = int(time.time()), time.monotonic()
    died = killed(redis_server, tmp_path, seed, KILLS, float("inf"))
    with capsys.disabled():
        took_s = time.monotonic() - began
        print(f"seed {seed}: {died.total()} kills in {took_s:.0f} s: {dict(died.most_common())}")
