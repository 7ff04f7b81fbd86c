"""Runs a node with its segment in VRAM (docs/decisions/0023).

The node is inside its writer's process, or in one of its own that others save to (0055). It is
read over CUDA IPC on its host, and where it listens as any node by others (0050).
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from kvstore.core.demotion import DemotingCore
from kvstore.core.events import Commit, Event, Reply, Reserve
from kvstore.core.node import NodeCore
from kvstore.cuda.base import CudaDevice
from kvstore.cuda.handover import hand_over
from kvstore.errors import UsageError
from kvstore.index.base import Index
from kvstore.node.config import NodeConfig
from kvstore.node.control.local_session import LocalSession, LocalSessions
from kvstore.node.control.permissions import owns_node
from kvstore.node.daemon import Node
from kvstore.node.nixl_sidecar import NixlSidecar
from kvstore.node.takeover import FormerClients, Started, superblock_of
from kvstore.node.upkeep import PutBack
from kvstore.nodedir import Announcement
from kvstore.segment.cuda import OwnedCuda, ServedCuda
from kvstore.system.on_failure import on_failure
from kvstore.system.unix_peer import peer_uid
from kvstore.transport.cuda_memory import NAME, DeviceAddress
from kvstore.types import Key

log = logging.getLogger("kvstore.node")

BACKLOG = 128
ACCEPT_PAUSE_S = 1.0
"""Pause after a connection that could not be accepted, for example because the process has no
descriptor left."""


class VramNode(Node):
    """A node in VRAM, in a thread of this process, which saves through `session`."""

    core_class = DemotingCore
    medium = "GPU"
    restartable = False

    def __init__(
        self, config: NodeConfig, index: Index, device: CudaDevice, *, takes_saves: bool = False
    ) -> None:
        """Prepare the node. With `takes_saves`, other processes of this user may save to it."""
        if config.disks:
            raise UsageError("disks", len(config.disks), "are not for a node in VRAM")
        super().__init__(config, index)
        self.device = device
        self.takes_saves = takes_saves
        self.on_save: Callable[[], None] = lambda: None
        """Called, in the node's thread, when slots were asked for or filled."""
        self._memory: OwnedCuda | None = None

    def session(self) -> LocalSession:
        """Return a session for one thread at a time, which closes it once it has stopped writing
        (rule 5)."""
        return self._inside.open()

    def tell(self, event: Event) -> None:
        """Hand over an event that nobody waits for, as `LocalSessions.tell` does."""
        self._inside.tell(event)

    @cached_property
    def _inside(self) -> LocalSessions:
        assert self._loop is not None
        return LocalSessions(self._loop, self.sessions, self.act)

    @property
    def ended(self) -> bool:
        """Return whether its thread has ended, by itself or by `stop`."""
        return self._thread is None or not self._thread.is_alive()

    @property
    def address(self) -> int:
        """Return the address of the segment on the device."""
        assert self._memory is not None
        return self._memory.address

    def _begin(self, announcement: Announcement, make_core: Callable[[], NodeCore]) -> Started:
        self.dir.remove_segment()
        self.dir.leases.mkdir(exist_ok=True, mode=0o700)
        clients = FormerClients(self.dir.leases, matter=False)
        # Written before the segment: whoever finds this directory without a living owner
        # knows which files to remove.
        self.dir.announce(announcement)
        base = Path(announcement.data_path).with_suffix("")
        self._memory = OwnedCuda(
            base, superblock_of(announcement), self.device, home=str(self.dir.path)
        )
        announcement = replace(announcement, inline_bytes=0, transports={NAME: self.device.uuid})
        # Whoever has the descriptor can write to the memory: this user's processes get it, by a
        # socket in this directory.
        with on_failure(self._memory.close):
            self._listen()
        address = DeviceAddress(self.device.uuid, self._memory.shared.name, self.takes_saves)
        self._handed_over = {NAME: str(address)}
        self.dir.announce(replace(announcement, transports=self._handed_over))
        return Started(make_core(), self._memory, announcement, clients)

    def _served(self, announcement: Announcement) -> ServedCuda:
        assert self._memory is not None
        return ServedCuda(Path(announcement.head_path), self.device, self._memory.shared)

    def _sidecar(self, announcement: Announcement) -> NixlSidecar:
        assert self._memory is not None
        return NixlSidecar(announcement, self.config.nixl, self._memory.shared, self.device.ordinal)

    def _announce_ways(self, announcement: Announcement, transports: dict[str, str]) -> None:
        self.announcement = replace(announcement, transports=announcement.transports | transports)
        here = replace(announcement, transports=self._handed_over | transports)
        self.dir.announce(here)

    def _try_slot(self, key: Key) -> bool:
        return True  # no byte of it is this process's to write

    def check(self, event: Event) -> None:
        """Raises `UsageError` for what only host memory can: values that travel in a request."""
        if isinstance(event, Reserve) and any(value is not None for value in event.values):
            raise UsageError("values", len(event.values), "this node's slots are written by DMA")

    def carry_out(self, event: Event) -> Sequence[Reply]:
        replies = super().carry_out(event)
        if isinstance(event, Reserve | Commit):
            self.on_save()
        return replies

    def _listen(self) -> None:
        self.dir.vram_socket.unlink(missing_ok=True)
        self._vram_listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._vram_listener.bind(str(self.dir.vram_socket))
        self.dir.vram_socket.chmod(0o600)
        self._vram_listener.listen(BACKLOG)
        self._vram_listener.setblocking(False)
        self._watch()

    def _watch(self) -> None:
        assert self._loop is not None
        if self._vram_listener.fileno() >= 0:
            self._loop.add_reader(self._vram_listener, self._hand_over)

    def _hand_over(self) -> None:
        """Hand the memory over to one process, which waits for it. The message, the first on its
        connection, never has to wait."""
        assert self._loop is not None
        assert self._memory is not None
        try:
            connection, _ = self._vram_listener.accept()
        except BlockingIOError:
            return
        except OSError as e:
            self._say.warning("node %s cannot hand its VRAM over: %s", self.config.name, e)
            self._loop.remove_reader(self._vram_listener)
            self._loop.call_later(ACCEPT_PAUSE_S, self._watch)
            return
        with connection, suppress(OSError):
            if owns_node(peer_uid(connection)):
                hand_over(connection, self._memory.shared)

    def _vanish(self) -> None:
        self._stop_listening()
        if self._has_name():
            self.dir.vram_socket.unlink(missing_ok=True)
        super()._vanish()

    def _stop_listening(self) -> None:
        assert self._loop is not None
        if self._vram_listener.fileno() >= 0:
            self._loop.remove_reader(self._vram_listener)
            self._vram_listener.close()

    def _more_files(self) -> list[PutBack]:
        return [(self.dir.vram_socket, self._listen_again)]

    def _listen_again(self) -> bool:
        if self.dir.vram_socket.exists():
            return False
        self._stop_listening()
        self._listen()
        return True

    def free(self) -> None:
        """See `OwnedCuda.free`; after `stop`."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.free()
