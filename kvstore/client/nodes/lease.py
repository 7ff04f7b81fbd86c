"""Gives a node a sign of this process's life: a file whose lock ends with the process (rule 5).

A free lock has to prove that nobody can write to the slots that were granted. So whoever can
write holds it, and nobody else:

- The process itself, by the lock (filelock.py), until its end, however that comes; a stopped
  one holds it.
- A child that Python forked has neither: before anything else of it runs, the memory is made
  read-only there (memory_files.py) and its copy of the lock closed. So a killed writer's
  keys are free although its children live, and no child can write to what others then get.
- A child that C code forked without Python has both: the keys stay the writer's until it has
  ended too. One that runs another program (`exec`) has neither, the kernel sees to it.
"""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

from kvstore.errors import NodeUnavailableError
from kvstore.machine import REAL, HeldFile, Machine


def fresh_id(machine: Machine) -> str:
    """Return a name that no other client has, and that nobody can guess."""
    return f"{machine.random_bits(128):032x}"


class Lease:
    """A lease, held from construction to `release`, or to the end of this process."""

    def __init__(self, leases: Path, machine: Machine = REAL) -> None:
        """Raises `NodeUnavailableError`."""
        self.client_id = fresh_id(machine)
        self._path = leases / self.client_id
        try:
            lock = machine.lock_file(self._path)
        except OSError as e:
            full = e.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "; free bytes and inodes there" if full else ""
            raise NodeUnavailableError(f"no lease at {leases}: {e.strerror}{remedy}") from e
        assert lock is not None, "a fresh random name cannot be locked by another"
        self._lock: HeldFile = lock

    def release(self) -> None:
        if self._lock.fd < 0:
            return
        with contextlib.suppress(OSError):
            self._path.unlink()
        self._lock.release()
