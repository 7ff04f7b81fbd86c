"""Watches every process that a turn started: CPU time, files in /dev/shm, and the end of all.

The bench is their subreaper, so those whose parent died, as a daemon's or a killed engine's, are
children of the bench and are counted and ended like the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
SHM = "/dev/shm/"
END_TIMEOUT_S = 10.0
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def become_subreaper() -> None:
    """Make orphans among the descendants children of this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


@dataclass(frozen=True, slots=True)
class Process:
    """Holds what /proc says of one process."""

    pid: int
    parent: int
    state: str
    started: int
    """In ticks since boot: with the pid it names a process for ever."""
    cpu_s: float


def read_process(pid: int) -> Process | None:
    """Return the process, or None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    cpu_s = (int(fields[11]) + int(fields[12])) * TICK_S
    return Process(pid, int(fields[1]), fields[0], int(fields[19]), cpu_s)


def command_line(pid: int) -> str:
    """Return the words of a process, apart by space; nothing when it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    return ""


def pids() -> list[int]:
    """Return all that there are."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def descendants() -> dict[int, Process]:
    """Return all processes below this one."""
    there = {pid: found for pid in pids() if (found := read_process(pid)) is not None}
    me = os.getpid()
    below: dict[int, Process] = {}
    for process in there.values():
        chain = [process]
        while (parent := there.get(chain[-1].parent)) is not None and parent.pid != me:
            chain.append(parent)
        if chain[-1].parent == me:
            below[process.pid] = process
    return below


class Family:
    """Adds up the CPU time of a turn's processes, engines and store apart, dead ones included."""

    def __init__(
        self, engines: Iterable[int], store: Iterable[int], store_mark: str | None
    ) -> None:
        """`engines` and `store` are the processes that were started; a process below an engine
        whose command line has `store_mark` is of the store, as is an orphan."""
        self._engines = set(engines)
        self._store = set(store)
        self._mark = store_mark
        self._side: dict[tuple[int, int], str] = {}
        self._cpu_s: dict[tuple[int, int], float] = {}
        self._before_s: dict[tuple[int, int], float] = {}
        self.shm_files: set[str] = set()

    def begin(self) -> None:
        """Count from now."""
        self.sample()
        self._before_s = dict(self._cpu_s)

    def sample(self) -> None:
        """Look at all processes: what one used after the last look before its end is lost."""
        below = descendants()
        for process in below.values():
            name = (process.pid, process.started)
            self._side[name] = self._side_of(process, below) or self._side.get(name, "store")
            self._cpu_s[name] = process.cpu_s

    def cpu_s(self, side: str) -> float:
        """Return the seconds since `begin` of `engine` or `store`."""
        return sum(
            cpu_s - self._before_s.get(name, 0.0)
            for name, cpu_s in self._cpu_s.items()
            if self._side[name] == side
        )

    def _side_of(self, process: Process, below: dict[int, Process]) -> str | None:
        at: Process | None = process
        while at is not None:
            if at.pid in self._store:
                return "store"
            if at.pid in self._engines:
                return "engine"
            if self._mark is not None and self._mark in command_line(at.pid):
                return "store"
            at = below.get(at.parent)
        return None

    def note_shm(self) -> None:
        """Remember which files in /dev/shm they map, while they live."""
        self.shm_files |= shm_files_of(*descendants())


def shm_files_of(*pids: int) -> set[str]:
    """Return the files in /dev/shm that processes map or have open."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                place = line.find(SHM)
                if place >= 0 and not line.endswith("(deleted)"):
                    found.add(line[place:])
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = str(entry.readlink())
                    if target.startswith(SHM) and not target.endswith("(deleted)"):
                        found.add(target)
    return found


def end_all(spared: Iterable[int]) -> list[int]:
    """Kill every process below this one except those; return whom it had to kill."""
    spared = set(spared)
    killed: list[int] = []
    give_up_at = time.monotonic() + END_TIMEOUT_S
    while time.monotonic() < give_up_at:
        left = {pid: p for pid, p in descendants().items() if pid not in spared}
        if not left:
            break
        for pid, process in left.items():
            if process.state == "Z":
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        time.sleep(0.05)
    return sorted(set(killed))


def remove_shm(files: Iterable[str]) -> list[str]:
    """Remove those of the files that nobody maps any more; return them."""
    left = {name for name in files if Path(name).is_file()}
    if not left:
        return []
    removed = sorted(left - shm_files_of(*pids()))
    for name in removed:
        Path(name).unlink(missing_ok=True)
    return removed
