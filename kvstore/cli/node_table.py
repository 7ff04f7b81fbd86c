"""Reads `[node]` of the operator's file: what `kvstore node` can also be told by options."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from kvstore.cli.options import KEY_PREFIX_DEFAULT, size_bytes
from kvstore.cli.output import human_bytes
from kvstore.config_file import ConfigFile
from kvstore.core.disk.base import DEVICES_MAX
from kvstore.errors import UsageError
from kvstore.index.open import URL_VARIABLE
from kvstore.limits import SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN
from kvstore.node.config import DiskConfig
from kvstore.rundir import RUN_DIR_ENV
from kvstore.settings.reader import ItemsMax, NumberRange, allowed_in, check_settings, read_settings
from kvstore.system import numa
from kvstore.transport.stream.address import parse_advertise

VARIABLES = {"url": URL_VARIABLE, "run_dir": RUN_DIR_ENV}
"""Which variable wins over which name of the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTable:
    """How one node is made. An option of `kvstore node` wins over what is here."""

    url: str | None = None
    """The index's Redis; KVSTORE_URL wins over it; without both it is the embedded Redis."""
    key_prefix: str = KEY_PREFIX_DEFAULT
    """Prefix of the index's keys: stores with different ones know nothing of each other."""
    run_dir: Path | None = None
    """Where processes of this host find each other; KVSTORE_RUN_DIR wins over it; without both it
    is a directory of this user."""
    name: str = "node"
    """Unique on its host."""
    size: str = ""
    """Of its memory in /dev/shm: 1GiB, 512MiB, 1048576; empty: 1 GiB, or less where the
    container's memory limit allows less."""
    vram: str = ""
    """Of VRAM of a CUDA device that this node owns, in place of `size` (docs/decisions/0055)."""
    device: Annotated[int, NumberRange(0)] = 0
    """Which device `vram` is of."""
    numa: str = numa.NONE
    """On which NUMA nodes its memory is: `interleave` over all, the number of one, or `none`: of
    whichever core touches it first (docs/decisions/0049)."""
    policy: Literal["head-start", "lru"] = "lru"
    """What goes when it is full: what nobody has used for longest (`lru`), or by how often it was
    used, too (`head-start`, docs/decisions/0092)."""
    listen: str = ""
    """HOST:PORT to serve other hosts at, HOST for port 7600 there, or :PORT at every address;
    empty: not at all."""
    advertise: str = ""
    """The name or address by which they reach it, with a port where that is another (HOST:PORT);
    empty: that of `listen`, else this host's."""
    open: bool = False
    """Serve without a secret whoever can connect."""
    nixl: Literal["", "read-only", "writable"] = ""
    """Let other hosts read by RDMA through NIXL too; experimental (docs/rdma.md)."""
    events: str = ""
    """Where to tell routers which blocks are stored and removed: PORT (on this host alone),
    tcp://HOST:PORT or ipc://PATH, and the port after it; empty: nowhere (docs/decisions/0064)."""
    metrics: str = ""
    """HOST:PORT, or :PORT at every address, to answer Prometheus (/metrics) and probes (/live,
    /ready) at; empty: nowhere."""
    keep: bool = False
    """Leave the memory for the next start of this name when told to stop."""
    group: str = ""
    """A Unix group whose members may ask how it is; empty: its user alone."""
    disk: Annotated[Sequence[str], ItemsMax(DEVICES_MAX)] = ()
    """Directories on ext4 or XFS, each for a file with copies of blocks (docs/disk.md)."""
    disk_size: Annotated[Sequence[str], ItemsMax(DEVICES_MAX)] = ()
    """How much each of them takes, in their order, or one size for all: ["2TiB"]."""
    disk_write: Literal["eviction", "idle", "through"] = "idle"
    """When blocks are written there: ahead of their eviction (`eviction`), when the node is idle
    too (`idle`), or each at once (`through`)."""
    disk_writes_per_day: Annotated[float, NumberRange(0)] = 0.0
    """How often each disk may be written over in 24 hours; 0: without limit."""
    disk_force: bool = False
    """Use directories of other file systems too."""

    def __post_init__(self) -> None:
        check_settings(self, inside="node.")
        numa.check_setting("node.numa", self.numa)
        self.size_in_bytes, self.vram_in_bytes, self.disks  # noqa: B018  # refuse what is no size
        if self.advertise:
            parse_advertise(self.advertise)
            if not self.listen:
                must = "is for a node that serves other hosts: say where with listen"
                raise UsageError("node.advertise", self.advertise, must)
        if not self.vram:
            return
        if self.numa != numa.NONE:
            raise UsageError("node.numa", self.numa, "is not for a node with `vram`")
        for name in ("size", "keep", "group", "disk"):
            if value := getattr(self, name):
                raise UsageError(f"node.{name}", value, "is not for a node with `vram`")

    @property
    def size_in_bytes(self) -> int | None:
        """Return `size` as a number; None where it is not asked for."""
        return _bytes_of("size", self.size)

    @property
    def vram_in_bytes(self) -> int | None:
        """Return `vram` as a number; None where it is not asked for."""
        return _bytes_of("vram", self.vram)

    @property
    def disks(self) -> list[DiskConfig]:
        """Return the directories of `disk`, each with its size."""
        sizes = [_size_of("disk_size", size) for size in self.disk_size]
        sizes = sizes * len(self.disk) if len(sizes) == 1 and self.disk else sizes
        if len(sizes) != len(self.disk):
            must = f"must be one size, or one for each of {len(self.disk)} directories (disk)"
            raise UsageError("node.disk_size", list(self.disk_size), must)
        return [DiskConfig(Path(name), size) for name, size in zip(self.disk, sizes, strict=True)]


def _size_of(field: str, size: str) -> int:
    try:
        return size_bytes(size)
    except argparse.ArgumentTypeError as e:
        raise UsageError(f"node.{field}", size, f"must be a size: {e}") from e


def _bytes_of(field: str, size: str) -> int | None:
    asked = _size_of(field, size) if size else None
    if asked is not None and not SEGMENT_BYTES_MIN <= asked <= SEGMENT_BYTES_MAX:
        least, most = human_bytes(SEGMENT_BYTES_MIN), human_bytes(SEGMENT_BYTES_MAX)
        must = f"is {asked} bytes: must be {least} to {most}, with a unit such as 1GiB"
        raise UsageError(f"node.{field}", size, must)
    return asked


def node_table(file: ConfigFile, options: argparse.Namespace | None = None) -> NodeTable:
    """Return `[node]` of `file`, and in its place what the command line says."""
    given = {name: getattr(options, name, None) for name in allowed_in(NodeTable)}
    over: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    for name, variable in VARIABLES.items():
        if value := os.environ.get(variable):
            over.setdefault(name, value)
    for name in {"size", "vram"} & over.keys():
        over[name] = str(over[name])
    if (sizes := getattr(options, "disk_size", None)) is not None:
        over["disk_size"] = [str(size) for size in sizes]
    table = file.table("node")
    read_settings(NodeTable, table, where=file.where("node"))
    return read_settings(NodeTable, {**table, **over}, where="options")
