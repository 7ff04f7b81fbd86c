"""Everything the code asks of its machine: time, randomness, locks and threads, sockets, files.

An object is given a `Machine` and hands it on to those it makes; nobody below the command line
asks for these things otherwise. The simulation passes a machine of its own
(docs/decisions/0047-machine.md): a use that it does not know of is an error of types, not
a clock that goes on in the real world.
"""

from __future__ import annotations

import mmap
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol

from kvstore import nodedir
from kvstore.nodedir import NodeDir
from kvstore.system import filelock, host_clock, memory_files
from kvstore.system.host_clock import Moment
from kvstore.system.memory_files import Room
from kvstore.system.unix_peer import peer_uid

Clock = Callable[[], float]
"""Seconds."""


class Lock(Protocol):
    """A lock that its holder may enter again, like `threading.RLock`."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...

    def __enter__(self) -> bool: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class Event(Protocol):
    """An event, like that of `threading.Event`."""

    def set(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class HeldFile(Protocol):
    """A held file lock, like that of `filelock.FileLock`."""

    @property
    def fd(self) -> int: ...

    def release(self) -> None: ...


class Machine:
    """The machine that the process runs on. A subclass overrides what it wants to decide."""

    monotonic: Clock = staticmethod(time.monotonic)
    """A clock that never runs backwards."""
    wall: Clock = staticmethod(time.time)
    """Seconds since 1970 by the machine's clock, which may be set."""
    moment: Callable[[], Moment] = staticmethod(host_clock.now)
    """The present moment, for a process of this host that asks later how long ago it was."""
    sleep: Callable[[float], None] = staticmethod(time.sleep)

    def random_bits(self, count: int) -> int:
        """Return a number that nobody can guess."""
        return secrets.randbits(count)

    def lock(self) -> Lock:
        return threading.RLock()

    def event(self) -> Event:
        return threading.Event()

    def start_thread(self, target: Callable[[], object], name: str) -> None:
        """Run it in a daemon thread, which does not keep the process alive. Raises `RuntimeError`
        when the machine has no room for another thread.

        For threads that nobody asks about again. Who joins one, or looks whether it lives, makes
        a `threading.Thread` of its own: what ends its loop (an event, a descriptor that a poll
        waits for, a socket) is its own, too, so that no helper would hold more than `run`.
        """
        threading.Thread(target=target, name=name, daemon=True).start()

    def when_dropped(self, owner: object, call: Callable[[], None]) -> None:
        """Call `call` once, when `owner` is dropped or the process ends."""
        weakref.finalize(owner, call)

    def unix_socket(self) -> socket.socket:
        """Return a new Unix stream socket, not connected yet."""
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def peer_uid(self, connection: socket.socket) -> int:
        """See `unix_peer.peer_uid`."""
        return peer_uid(connection)

    def lock_file(self, path: Path) -> HeldFile | None:
        """See `filelock.try_lock`."""
        return filelock.try_lock(path)

    def node_dirs(self, run_dir: Path) -> Iterator[NodeDir]:
        """See `nodedir.node_dirs`."""
        return nodedir.node_dirs(run_dir)

    def sweep(self, run_dir: Path, *, kept: bool = False) -> list[str]:
        """See `nodedir.sweep`."""
        return nodedir.sweep(run_dir, kept=kept)

    def create_memory(self, path: Path, size_bytes: int) -> mmap.mmap:
        """See `memory_files.create`."""
        return memory_files.create(path, size_bytes)

    def reopen_memory(self, path: Path, size_bytes: int) -> mmap.mmap:
        """See `memory_files.reopen`."""
        return memory_files.reopen(path, size_bytes)

    def map_memory(self, path: Path, *, writable: bool, owner: int | None) -> mmap.mmap:
        """See `memory_files.attach`."""
        return memory_files.attach(path, writable=writable, owner=owner)

    def own_memory(self, path: Path) -> HeldFile:
        """See `memory_files.own`."""
        return memory_files.own(path)

    def remove_memory(self, path: Path) -> None:
        """Remove the file; a process that has it mapped keeps the memory until it unmaps it."""
        path.unlink(missing_ok=True)

    def room(self, where: Path) -> Room:
        """See `memory_files.room`."""
        return memory_files.room(where)


REAL = Machine()
