"""Settings of one node: its size, directories and address, and who may read it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from kvstore.core.memory.eviction import POLICIES
from kvstore.errors import UsageError
from kvstore.limits import SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, SLOT_BYTES_MIN, Limits
from kvstore.nodedir import Announcement
from kvstore.protocol.block_events import endpoints_of
from kvstore.segment.abandoned import segment_base
from kvstore.segment.header import SHM_DIR
from kvstore.transport.stream.security import StreamSecurity

SIZE_BYTES_DEFAULT = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """How one node is made. Sizes in bytes."""

    run_dir: Path
    name: str = "node"
    size_bytes: int = SIZE_BYTES_DEFAULT
    policy: str = "lru"
    key_prefix: str = "kv:default"
    shm_dir: Path = SHM_DIR
    end_with_last_client: bool = False
    """Stop when the last client is gone, or when none comes (idle_shutdown.py)."""
    listen: tuple[str, int] | None = None
    """(host, port) to serve other hosts at; port 0 takes a free one. None: not at all."""
    advertise: str = ""
    """The host name or address by which others reach it; empty: that of `listen`, or this host's
    own when that is a wildcard."""
    security: StreamSecurity = field(default_factory=StreamSecurity)
    open_to_all: bool = False
    """Serve streams to anyone who can connect, without a secret."""
    nixl: str = ""
    """Let the memory be read through NIXL too (experimental): "read-only", or "writable" where
    RDMA cannot register memory that is mapped read-only. Empty: not."""
    events: str = ""
    """Where to publish which blocks are stored and removed (block_events.py), as
    `endpoints_of` takes it. Empty: not."""
    metrics: tuple[str, int] | None = None
    """Where to answer Prometheus and probes over HTTP (metrics.py); None: nowhere."""
    keep: bool = False
    """At an orderly end too, leave the segment for the next start (takeover.py)."""
    group: int | None = None
    """A group id whose members may ask how this node is (permissions.py); None: nobody else."""
    signing_key: bytes | None = field(default=None, repr=False)
    """Sign index records with it; None: KVSTORE_SIGNING_KEY (secret.py), else unsigned."""
    limits: Limits = field(default_factory=Limits)

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

        if self.events:
            endpoints_of(self.events)

        if self.nixl not in ("", "read-only", "writable"):
            raise UsageError("nixl", self.nixl, "must be read-only or writable")
        if self.nixl and (self.listen is None or self.security.secret is None):
            raise UsageError(
                "nixl", self.nixl, "needs `listen` and a secret: it opens all of the node's memory"
            )

    @property
    def segment_bytes(self) -> int:
        """`size_bytes` in whole pages."""
        return self.size_bytes // SLOT_BYTES_MIN * SLOT_BYTES_MIN

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
            inline_bytes=self.limits.inline_bytes,
            index=index,
        )


def node_id_of(run_dir: Path, name: str) -> int:
    """64 bits that stay the same over restarts of the node called `name` on this host."""
    where = f"{socket.gethostname()}\n{run_dir}\n{name}".encode()
    return int.from_bytes(blake2b(where, digest_size=8).digest(), "little")
