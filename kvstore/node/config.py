"""Settings of one node: its size, directories and address, and who may read it."""

from __future__ import annotations

import ipaddress
import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from kvstore.core.disk.base import DEVICES_MAX
from kvstore.core.disk.tier import VALUE_BYTES_MIN, WRITE_MODES
from kvstore.core.memory.eviction import POLICIES
from kvstore.errors import UsageError
from kvstore.limits import SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, SLOT_BYTES_MIN, Limits
from kvstore.nodedir import Announcement
from kvstore.protocol.block_events import endpoints_of
from kvstore.segment.abandoned import segment_base
from kvstore.segment.disk.table import table_bytes
from kvstore.segment.header import SHM_DIR
from kvstore.transport.stream.security import StreamSecurity
from kvstore.types import DiskKeys

SIZE_BYTES_DEFAULT = 1 << 30
INLINE_BYTES = 32 << 10
"""Values up to this size are sent inside the reserve request, without a second round trip; a value
that is put alone up to twice this size."""
BLOCK_BYTES = 256 << 10
"""Size of the blocks that a large disk is expected to have, and a quarter of what they mostly have:
the table has 73 bytes for each."""
DISK_BYTES_MIN = 8 << 20
"""Room for a few regions of the smallest size."""
TABLE_MIN = 1 << 16
"""Blocks for which even the table of a small disk has room, if they fit."""


class DiskConfig(NamedTuple):
    """A directory, and how much of its file system is for blocks."""

    directory: Path
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """The options with which one node is made. Sizes are in bytes."""

    run_dir: Path
    name: str = "node"
    size_bytes: int = SIZE_BYTES_DEFAULT
    policy: str = "lru"
    key_prefix: str = "kv:default"
    shm_dir: Path = SHM_DIR
    end_with_last_client: bool = False
    """Stop when the last client is gone, or when none comes (idle_shutdown.py)."""
    listen: tuple[str, int] | None = None
    """(host, port) to serve other hosts at; port 0 takes a free one. None: other hosts are not
    served."""
    advertise: str = ""
    """The host name or address by which others reach it; empty: that of `listen`, or this host's
    own when that is a wildcard."""
    security: StreamSecurity = field(default_factory=StreamSecurity)
    open_to_all: bool = False
    """Serve streams to anyone who can connect, without a secret."""
    nixl: str = ""
    """Let the memory be read through NIXL too (experimental): "read-only", or "writable" where RDMA
    cannot register memory that is mapped read-only. Empty: NIXL is off."""
    events: str = ""
    """Where to publish which blocks are stored and removed (block_events.py), as `endpoints_of`
    takes it. Empty: nowhere."""
    metrics: tuple[str, int] | None = None
    """Where to answer Prometheus and probes over HTTP (metrics.py); None: nowhere."""
    page: bool = False
    """Answer browsers there too (page/page.py)."""
    page_password: bytes | None = field(default=None, repr=False)
    """What they have to know; None: nothing, which is for `metrics` on this host alone."""
    keep: bool = False
    """Leave the segment for the next start at an orderly end too (takeover.py)."""
    group: int | None = None
    """A group id whose members may ask for this node's state (permissions.py); None: nobody
    else."""
    signing_key: bytes | None = field(default=None, repr=False)
    """Sign index records with it; None: KVSTORE_SIGNING_KEY (secret.py), else unsigned."""
    limits: Limits = field(default_factory=Limits)
    disks: Sequence[DiskConfig] = ()
    """Where copies of its blocks are kept (core/disk/tier.py); empty: nowhere."""
    disk_write: str = "idle"
    """When they are written, as `WRITE_MODES` says."""
    disk_writes_per_day: float = 0.0
    """How often each disk may be written over in any 24 hours; 0: without limit."""
    disk_keys: DiskKeys = field(default_factory=dict, repr=False)
    """What blocks on disks are encrypted with (`kvstore.secret.disk_keys`); empty: nothing."""
    disk_forced: bool = False
    """Use directories of file systems that are no good place, too."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise UsageError("policy", self.policy, f"must be one of {sorted(POLICIES)}")
        if not SEGMENT_BYTES_MIN <= self.size_bytes <= SEGMENT_BYTES_MAX:
            must = f"must be {SEGMENT_BYTES_MIN} to {SEGMENT_BYTES_MAX}"
            raise UsageError("size_bytes", self.size_bytes, must)

        if self.listen is not None and self.security.secret is None and not self.open_to_all:
            raise UsageError(
                "listen", self.listen, "needs a secret (KVSTORE_SECRET), or to be open to all"
            )

        if self.page and (self.metrics is None or not self._may_show_page(self.metrics[0])):
            where = "nowhere" if self.metrics is None else f"{self.metrics[0]}:{self.metrics[1]}"
            must = "needs --metrics at an address of this host alone (127.0.0.1:9400), or a "
            raise UsageError("page", where, must + "password in a file (--page FILE)")

        if self.events:
            endpoints_of(self.events)

        if self.nixl not in ("", "read-only", "writable"):
            raise UsageError("nixl", self.nixl, "must be read-only or writable")
        if self.nixl and (self.listen is None or self.security.secret is None):
            raise UsageError(
                "nixl", self.nixl, "needs `listen` and a secret: it opens all of the node's memory"
            )

        if self.disks:
            self._check_disks()

    def _may_show_page(self, host: str) -> bool:
        if self.page_password is not None or host == "localhost":
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    def _check_disks(self) -> None:
        if self.disk_write not in WRITE_MODES:
            raise UsageError("disk_write", self.disk_write, f"must be one of {WRITE_MODES}")
        if not 0 <= self.disk_writes_per_day < math.inf:
            raise UsageError("disk_writes_per_day", self.disk_writes_per_day, "must be 0 or more")
        for disk in self.disks:
            if disk.size_bytes < DISK_BYTES_MIN:
                must = f"of {disk.directory}: must be at least {DISK_BYTES_MIN} (8MiB)"
                raise UsageError("disk_size", disk.size_bytes, must)
        named = [disk.directory.resolve() for disk in self.disks]
        if len(named) > DEVICES_MAX or len(named) > len(set(named)):
            must = f"must be at most {DEVICES_MAX} different directories"
            raise UsageError("disks", [str(name) for name in named], must)
        if 2 * self._table_bytes > self.size_bytes:
            least = 2 * self._table_bytes
            must = f"must be at least {least} (--size) for the table of disks of this size"
            raise UsageError("size_bytes", self.size_bytes, must)

    @property
    def disk_blocks(self) -> int:
        """Return for how many blocks on disks the table has room."""
        return sum(
            min(disk.size_bytes // VALUE_BYTES_MIN, max(disk.size_bytes // BLOCK_BYTES, TABLE_MIN))
            for disk in self.disks
        )

    @property
    def _table_bytes(self) -> int:
        return table_bytes(self.disk_blocks, sealed=bool(self.disk_keys))

    @property
    def segment_bytes(self) -> int:
        """Return `size_bytes` in whole pages, without the table of what is on disks."""
        if not self.disks:
            return self.size_bytes // SLOT_BYTES_MIN * SLOT_BYTES_MIN
        left_bytes = self.size_bytes - self._table_bytes
        return left_bytes // SEGMENT_BYTES_MIN * SEGMENT_BYTES_MIN

    def announcement(self, node_id: int, epoch: int, socket_path: Path, index: str) -> Announcement:
        """Return what this start of the node announces itself as, with a segment of its own;
        `index` is `Index.identity`."""
        base = segment_base(self.shm_dir, node_id, epoch)
        return Announcement(
            node_id=node_id,
            epoch=epoch,
            name=self.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            key_prefix=self.key_prefix,
            data_path=f"{base}.data",
            head_path=f"{base}.head",
            control_path=str(socket_path),
            size_bytes=self.segment_bytes,
            inline_bytes=INLINE_BYTES,
            index=index,
        )


def node_id_of(run_dir: Path, name: str) -> int:
    """Return 64 bits that stay the same over restarts of the node called `name` on this host."""
    where = f"{socket.gethostname()}\n{run_dir}\n{name}".encode()
    return int.from_bytes(blake2b(where, digest_size=8).digest(), "little")
