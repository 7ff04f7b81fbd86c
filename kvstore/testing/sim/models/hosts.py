"""Models a host's file system: which nodes have a directory here, and which processes live."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from kvstore.errors import UsageError
from kvstore.node.control.liveness import ClientSession, Sessions
from kvstore.node.takeover import FormerClients
from kvstore.nodedir import Announcement, NodeDir
from kvstore.testing.sim.scheduler import Process

if TYPE_CHECKING:
    from kvstore.testing.sim.world import World


class _Folder(PurePosixPath):
    """Models a directory that is always there."""

    def mkdir(self, *, exist_ok: bool, mode: int) -> None:
        """Do nothing: the directory is there."""

    def unlink(self) -> None:
        """Do nothing: the world forgets no lease."""


class _KeepFile:
    """Models the file `keep`: its node lived a moment ago."""

    def unlink(self, *, missing_ok: bool) -> None:
        """Do nothing: every node here stays restartable."""


class _WordFile:
    """Models the file `node.json`."""

    def __init__(self) -> None:
        self.announcement: Announcement | None = None

    def unlink(self, *, missing_ok: bool) -> None:
        self.announcement = None


class SimNodeDir(NodeDir):
    """Models `RUN_DIR/nodes/NAME`; it outlives the starts of its node."""

    def __init__(self, world: World, run_dir: Path, name: str) -> None:
        super().__init__(run_dir, name)
        self._world = world
        self.leases: Any = _Folder(self.leases)
        self.file = _WordFile()
        self.announcement_path: Any = self.file
        self.keep: Any = _KeepFile()
        self._kept_resets: dict[str, object] = {}
        self.holder: Process | None = None
        """Whose lock it is; a dead process holds nothing."""
        self._free_bytes = 0

    def announcement(self) -> Announcement | None:
        return self.file.announcement

    def owner(self) -> int:
        return os.geteuid()

    def alive(self) -> bool:
        return self.holder is not None and not self.holder.dead

    def lives_as(self, announcement: Announcement) -> bool:
        return self.alive() and self.announcement() == announcement

    def announce(self, announcement: Announcement) -> None:
        self.file.announcement = announcement

    def stranger(self) -> None:
        return None

    def remove_segment(self) -> None:
        """Do nothing: the world keeps its files until their directory goes."""

    def say_room(self, free_bytes: int) -> None:
        self._free_bytes = free_bytes

    def room(self) -> int:
        return self._free_bytes

    def keep_resets(self, kept: Mapping[str, object]) -> None:
        self._kept_resets = dict(kept)

    def kept_resets(self) -> dict[str, object]:
        return self._kept_resets

    def kept_for_s(self) -> float:
        announcement = self.file.announcement
        return (
            1.0
            if announcement is not None and self._world.files.exists(announcement.head_path)
            else 0.0
        )

    def remove(self) -> None:
        announcement = self.file.announcement
        if announcement is not None:
            self._world.files.remove(announcement.data_path, announcement.head_path)
        self.file.announcement = None
        self._kept_resets = {}


class SimLease:
    """Models the locked file of a lease (`kvstore.client.nodes.lease.Lease`)."""

    def __init__(self, world: World, path: Path) -> None:
        """Raises `FileNotFoundError` when there is no such node."""
        world.pause()
        if str(path.parent.with_name("control.sock")) not in world.listening:
            raise FileNotFoundError(errno.ENOENT, "no node", str(path))
        self.leases = str(path.parent)
        self._holder = world.current.process
        self._released = False
        world.leases[path.name] = self

    @property
    def fd(self) -> int:
        return -1 if self._released else 0

    @property
    def held(self) -> bool:
        return not (self._released or self._holder.gone)

    @property
    def holder(self) -> Process:
        return self._holder

    def release(self) -> None:
        self._released = True


class SimFormerClients(FormerClients):
    """Looks at simulated leases."""

    world: World

    def __init__(self, leases: Path, *, matter: bool) -> None:
        held = [lease for lease in self.world.leases.values() if lease.held]
        self._held = [lease for lease in held if matter and lease.leases == str(leases)]

    def gone(self) -> bool:
        self._held = [lease for lease in self._held if lease.held]
        return not self._held

    def close(self) -> None:
        """Stop watching."""


class SimSessions(Sessions):
    """Knows sessions by simulated lease files."""

    def __init__(self, world: World, leases: Path, clients_max: int) -> None:
        super().__init__(leases, clients_max)
        self.world = world

    def _admit(self, client_id: str) -> ClientSession:
        lease = self.world.leases.get(client_id)
        if lease is None or not lease.held:
            raise UsageError("client_id", client_id, "its lease is not locked by its process")
        self.admitted += 1
        session = ClientSession(self.admitted, client_id, Path(client_id), -1)
        self._by_client[client_id] = self._by_number[session.number] = session
        return session

    def close(self, *, keep: bool = False) -> None:
        for session in self.all():
            self.forget(session)

    def forget(self, session: ClientSession) -> None:
        del self._by_client[session.client_id]
        del self._by_number[session.number]

    def dead(self, session: ClientSession) -> bool:  # type: ignore[override]
        return not self.world.leases[session.client_id].held
