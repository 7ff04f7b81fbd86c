"""Implements the machine that code is given during a simulation: the simulated world decides."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.machine import Machine
from kvstore.nodedir import NodeDir
from kvstore.system.host_clock import Moment
from kvstore.system.memory_files import Room
from kvstore.testing.sim.models.hosts import SimLease
from kvstore.testing.sim.models.network import SimSocket
from kvstore.testing.sim.scheduler import FOREVER, Actor

if TYPE_CHECKING:
    from kvstore.testing.sim.world import World

LOCK_POLL_S = 0.02
SHM_BYTES = 1 << 40
"""There is always room."""
BOOT = b"the only boot...."[:16]


class SimMachine(Machine):
    """Answers all that a `Machine` is asked for; tests/sim holds that nothing is left out."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.monotonic = lambda: world.now
        self.wall = world.wall
        self.moment = lambda: Moment(BOOT, int(world.now * 1e3), int(world.now * 1e3))
        self.sleep = world.sleep

    def random_bits(self, count: int) -> int:
        return self.world.rng.getrandbits(count)

    def lock(self) -> SimLock:
        return SimLock(self.world)

    def event(self) -> SimEvent:
        return SimEvent(self.world)

    def start_thread(self, target: Callable[[], object], name: str) -> None:
        process = self.world.current.process
        self.world.spawn(process, f"{process.name}/{name}", target)

    def when_dropped(self, owner: object, call: Callable[[], None]) -> None:
        """Do nothing: the collector of garbage comes when it likes, and a run must replay."""

    def unix_socket(self) -> Any:
        return SimSocket(self.world, self.world.current.process)

    def peer_uid(self, connection: object) -> int:
        return os.geteuid()

    def lock_file(self, path: Path) -> SimLease:
        return SimLease(self.world, path)

    def node_dirs(self, run_dir: Path) -> Iterator[NodeDir]:
        return self.world.dirs_of(run_dir)

    def sweep(self, run_dir: Path, *, kept: bool = False) -> list[str]:
        if not kept:  # there is always room, so what waits for its next start may stay
            self.world.sweep(run_dir)
        return []

    def create_memory(self, path: Path, size_bytes: int) -> mmap.mmap:
        return self.world.files.create(path, size_bytes)

    def reopen_memory(self, path: Path, size_bytes: int) -> mmap.mmap:
        return self.world.files.reopen(path, size_bytes)

    def map_memory(self, path: Path, *, writable: bool, owner: int | None) -> mmap.mmap:
        return self.world.files.map(path)

    def own_memory(self, path: Path) -> SimOwnership:
        return SimOwnership()

    def remove_memory(self, path: Path) -> None:
        self.world.files.remove(str(path))

    def room(self, where: Path) -> Room:
        return Room(SHM_BYTES, SHM_BYTES)


class SimOwnership:
    """Models the lock of a segment. That of its node's directory says the same: nobody sweeps by
    segment here."""

    fd = -1

    def release(self) -> None:
        """Do nothing: there is nothing to give back."""


class SimEvent:
    """Stands for a `threading.Event`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        self._world.wait(FOREVER if timeout is None else self._world.now + timeout)
        return self._set


class SimLock:
    """Stands for an RLock: who waits for it lets others run, and whose it is may enter again."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._owner: Actor | None = None
        self._entered = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = self._world
        give_up_at = world.now + timeout if timeout >= 0 else FOREVER
        while self._owner not in (None, world.current):
            if not blocking or world.now >= give_up_at:
                return False
            world.wait(min(give_up_at, world.now + LOCK_POLL_S))
        self._owner = world.current
        self._entered += 1
        return True

    def release(self) -> None:
        if not self._is_owned():
            raise RuntimeError("cannot release un-acquired lock")
        self._entered -= 1
        if not self._entered:
            self._owner = None

    def _is_owned(self) -> bool:
        return self._owner is self._world.current

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()
