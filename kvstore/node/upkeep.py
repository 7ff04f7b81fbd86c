"""Restores the files of a living node in the run directory, where cleaners and people remove them.

Every `LOOK_EVERY_S` the node looks whether what new clients need is there, and puts back what is
not. Every `SIGN_OF_LIFE_S` it writes down that it lives (host_clock.py), and gives all its
files the time of now: a cleaner that goes by age finds none of them old. All this only while the
lock of its name is its own; a node that has lost that ends (daemon.py).

The lease of a living client cannot be put back: nobody else can hold its lock. This start goes on
with the descriptor that it has; the next one could not tell when that client ends (rule 5), so it
is told, by the file `unwatched`, to begin empty.

Nor can a file of the segment be put back: the kernel gives no name again to a file that has lost
its last. Who has it mapped goes on; who starts later finds nothing here and saves nothing. So it
is said, by the log and by what health checks read (`Readiness.lost`), until an operator restarts
the node; ending would lose what its present clients have.

Nothing here ends the node: what cannot be written is said, once in a while.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from kvstore.node.control.control_listener import ControlListener
from kvstore.node.control.liveness import Sessions
from kvstore.node.epoch import record_of, remember
from kvstore.node.readiness import Readiness
from kvstore.node.seldom import Seldom
from kvstore.nodedir import Announcement, NodeDir
from kvstore.system import host_clock
from kvstore.system.filelock import fd_is_locked

log = logging.getLogger("kvstore.node")

LOOK_EVERY_S = 0.5
"""Seconds between two checks of whether the node's files are there."""
SIGN_OF_LIFE_S = 5.0
"""Seconds between two signs of life; what the node leaves behind counts its age from the last."""
PutBack = tuple[Path, Callable[[], bool]]
"""A file, and a function that restores it if it is missing and returns whether it was; it may raise
`OSError`."""


class Living(Protocol):
    """A segment that can say that its node lives."""

    def sign_of_life(self) -> None: ...


class Parts(NamedTuple):
    """The parts of a node that concern its files."""

    directory: NodeDir
    run_dir: Path
    announcement: Announcement
    listener: ControlListener
    sessions: Sessions
    readiness: Readiness
    free_bytes: Callable[[], int]
    segment: Living | None
    """The segment that is to wait for the node's next start; None when it is not."""
    more: Sequence[PutBack]


class Upkeep:
    """The files of one start of one node. The thread of its event loop alone uses it."""

    def __init__(self, parts: Parts, has_name: Callable[[], bool]) -> None:
        """Prepare the upkeep. `has_name` says whether the lock of the name is this process's."""
        self._parts = parts
        self._has_name = has_name
        self._directory = parts.directory
        self._epoch_path = record_of(parts.run_dir, parts.directory.name)
        self._say = Seldom(log)
        self._keep_fd = -1
        self._files: list[PutBack] = [
            (self._directory.socket, parts.listener.open_again),
            (self._directory.announcement_path, self._directory.announce_again),
            (self._directory.leases, self._make_leases),
            (self._directory.ready_path, parts.readiness.say_again),
            (self._directory.room_path, self._say_room),
            (self._epoch_path, self._remember_epoch),
            *parts.more,
        ]
        word = parts.announcement
        self._memory = [p for p in map(Path, (word.data_path, word.head_path)) if p.exists()]
        """The files that clients map; of VRAM only the headers."""
        self._others = [
            *(self._directory.lock, self._directory.keep, self._directory.resets_path),
            *(self._directory.path, self._directory.path.parent, parts.run_dir),
            *(Path(word.data_path), Path(word.head_path), self._epoch_path.parent),
        ]

    async def look_after(self) -> None:
        """Restore missing files, forever."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self._has_name():
                self.put_back()

    async def stay_fresh(self) -> None:
        """Leave signs of life, for ever."""
        while True:
            self.refresh()
            await asyncio.sleep(SIGN_OF_LIFE_S)

    def put_back(self) -> None:
        """Restore missing files."""
        name = self._directory.name
        for path, again in self._files:
            try:
                if again():
                    self._say.warning("node %s: %s was removed: it is there again", name, path)
            except OSError as e:
                self._say.warning("node %s: %s cannot be put back: %s", name, path, e.strerror)
        self._look_at_memory()

    def _look_at_memory(self) -> None:
        for path in self._memory:
            if not os.path.lexists(path):
                why = f"its memory {path} was removed: new clients cannot use it; restart it"
                self._parts.readiness.lost(why)
                self._say.warning("node %s: %s", self._directory.name, why)

    def refresh(self) -> None:
        """Leave a sign of life, and give every file the time of now."""
        if not self._has_name():
            return
        if self._parts.segment is not None:
            self._write_down()
            self._parts.segment.sign_of_life()
        self._touch([*(path for path, _ in self._files), *self._others])
        self._look_at_leases()

    def _write_down(self) -> None:
        """Let the segment of the dead node wait for its next start, for `RESTART_WITHIN_S` from now
        on. It needs no descriptor that the process has not had before."""
        keep = self._directory.keep
        try:
            if self._keep_fd < 0 or not self._is_there(keep):
                self.close()
                self._keep_fd = self._directory.open_keep()
            os.pwrite(self._keep_fd, host_clock.now().pack(), 0)
        except OSError as e:
            text = "node %s: %s cannot be written: %s; a restart may find its memory freed"
            self._say.warning(text, self._directory.name, keep, e.strerror)

    def _is_there(self, path: Path) -> bool:
        try:
            return os.path.samestat(os.fstat(self._keep_fd), path.lstat())
        except FileNotFoundError:
            return False

    def _touch(self, paths: Sequence[Path]) -> list[Path]:
        """Give those that are there the time of now; those that are not."""
        missing: list[Path] = []
        for path in paths:
            try:
                os.utime(path, follow_symlinks=False)
            except FileNotFoundError:
                missing.append(path)
            except OSError as e:
                text = "node %s: %s keeps its old time: %s; a cleaner by age may remove it"
                self._say.warning(text, self._directory.name, path, e.strerror)
        return missing

    def _make_leases(self) -> bool:
        missing = not self._directory.leases.is_dir()
        if missing:
            self._directory.leases.mkdir(mode=0o700)
            self._look_at_leases()
        return missing

    def _look_at_leases(self) -> None:
        """Make the next start begin empty while the lease of a living client is missing."""
        leases = dict(self._parts.sessions.leases())
        missing = self._touch([*leases])
        try:
            if any(fd_is_locked(leases[path]) for path in missing):  # else it was let go of
                self._directory.unwatched.touch(mode=0o600)
            else:
                self._directory.unwatched.unlink(missing_ok=True)
        except OSError as e:
            text = "node %s: %s cannot be written: %s"
            self._say.warning(text, self._directory.name, self._directory.unwatched, e.strerror)

    def _say_room(self) -> bool:
        missing = not self._directory.room_path.exists()
        if missing:
            self._directory.say_room(self._parts.free_bytes())
        return missing

    def _remember_epoch(self) -> bool:
        missing = not self._epoch_path.exists()
        if missing:
            remember(self._epoch_path, self._parts.announcement.epoch)
        return missing

    def close(self) -> None:
        """Let go of what is open. Safe to call twice."""
        fd, self._keep_fd = self._keep_fd, -1
        if fd >= 0:
            os.close(fd)
