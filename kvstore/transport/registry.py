"""Registers the transports: their names, and the modules that implement them.

A new one is a file, whose class implements `Transport`, and a line of `TRANSPORTS`. The file is
imported when a node that offers the transport is first heard of.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from kvstore.errors import UsageError
from kvstore.nodedir import Announcement
from kvstore.system.fork import in_each_child, no_forks
from kvstore.transport.base import Transport

if TYPE_CHECKING:
    from kvstore.cuda.base import CudaDevice
    from kvstore.transport.nixl.transfer import RemoteLayout
    from kvstore.transport.stream.transport import StreamTransport


class Registered(NamedTuple):
    """One transport."""

    file: str = ""
    """The module of its class; empty for what lies on this host, where the index is not asked."""
    made_by: str = ""
    """Name of the class. It is called with what asks nodes, what says how a node's segment is
    divided, and the device to which blocks may be brought or None."""
    counted: bool = False
    """Whether reads are counted though there is no module."""
    to_vram: bool = False
    """Whether blocks may come to that device: they are counted apart."""


SHM = "shm"
"""Segments of this host, which a reader maps and reads in place."""
CUDA_IPC = "cuda_ipc"
"""Segments in VRAM of this host, which a reader's device opens (client/nodes/vram.py)."""
DISK = "disk"
"""Disks of nodes of this host (client/nodes/disks.py)."""
TRANSPORTS = {
    SHM: Registered(),
    CUDA_IPC: Registered(),
    DISK: Registered(counted=True),
    "nixl": Registered("kvstore.transport.nixl.transport", "NixlTransport", to_vram=True),
    "stream": Registered("kvstore.transport.stream.transport", "StreamTransport"),
}
"""All transports by name, the nearest first. Announcements, settings and counters use the names."""
COUNTED = ("hits", "bytes", "misses", "failed", "checksum")
VARIABLE = "KVSTORE_TRANSPORTS"


def allowed(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return `names` in the order of `TRANSPORTS`; without them, those in KVSTORE_TRANSPORTS
    (separated by commas), else all.

    Raises `UsageError` for a name that is no transport's, and when there is no name.
    """
    if names is None:
        text = os.environ.get(VARIABLE, "")
        names = [name.strip() for name in text.split(",")] if text else tuple(TRANSPORTS)
    unknown = [name for name in names if name not in TRANSPORTS]
    if unknown or not names or isinstance(names, str):
        raise UsageError("transports", names, f"must be some of {', '.join(TRANSPORTS)}")
    return tuple(name for name in TRANSPORTS if name in names)


def counters() -> Iterator[str]:
    """Yield the names of all counters of reads from other hosts and from disks."""
    for name, registered in TRANSPORTS.items():
        if registered.file or registered.counted:
            yield from (f"{name}_{what}" for what in COUNTED)
        if registered.to_vram:
            yield from (f"{name}_vram_{what}" for what in ("hits", "bytes"))


class Transports:
    """The transports by which one client reads from other hosts, each made when a node offers it.
    Thread-safe."""

    def __init__(
        self,
        allowed: Collection[str],
        stream: StreamTransport,
        layout_of: Callable[[Announcement], RemoteLayout],
        device: CudaDevice | None = None,
    ) -> None:
        """Make the transports. `stream` is always there, because it also asks nodes. What is read
        may come to `device`."""
        self.stream = stream
        self.allowed = allowed
        self.names = [name for name, row in TRANSPORTS.items() if row.file and name in allowed]
        """Names of the transports that may be used, the nearest first."""
        self._made: dict[str, Transport] = {stream.name: stream}
        self._make = (stream, layout_of, device)
        self._closed = False
        in_each_child(self)

    def after_fork_in_child(self) -> None:
        """Forget the device, which is the parent's."""
        self._make = (*self._make[:2], None)

    def of(self, node: Announcement) -> list[Transport]:
        """Return those by which `node` can be read, the nearest first."""
        made = [self._get(name) for name in self.names if name in node.transports]
        return [one for one in made if one is not None and one.usable(node)]

    def _get(self, name: str) -> Transport | None:
        """Return the transport of that name; None when it was not made before `close`."""
        found = self._made.get(name)
        if found is not None:
            return found
        # A child that is forked during the import would wait for its lock for ever.
        with no_forks:
            if name not in self._made and not self._closed:
                registered = TRANSPORTS[name]
                made_by = getattr(import_module(registered.file), registered.made_by)
                self._made[name] = made_by(*self._make)
            return self._made.get(name)

    @property
    def why_not_to_vram(self) -> str:
        """Return why nothing that is read comes to a device, for people; empty when it does."""
        to_vram = [name for name in self.names if TRANSPORTS[name].to_vram]
        made = [one for one in map(self._get, to_vram) if one is not None]
        reasons = [one.why_not_to_vram for one in made]
        return "" if "" in reasons else "; ".join(reasons) or "no transport may be used that can"

    def close(self) -> None:
        with no_forks:
            self._closed = True
        for one in self._made.values():
            one.close()
