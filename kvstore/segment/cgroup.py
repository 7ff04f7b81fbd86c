"""Reads how much memory the control groups of this process allow: shared memory counts.

A container's limit below a node's size does not fail when the memory is asked for: the kernel
kills a process of the container when it is written to.
"""

from __future__ import annotations

import logging
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from kvstore.errors import UsageError
from kvstore.limits import CGROUP_RESERVE_BYTES
from kvstore.segment.shm import files_bytes

log = logging.getLogger("kvstore.node")

PROC_FILE = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")
UNLIMITED_BYTES = 1 << 60
"""Version 1 expresses "no limit" by the largest multiple of a page."""
HEADERS_LEAVE, HEADERS_OF = 15, 16
"""Headers and hints take less than a 16th of a segment's files."""


class MemoryLimit(NamedTuple):
    """The lowest memory limit, and the file that it stands in."""

    limit_bytes: int
    file: Path

    @property
    def segment_bytes(self) -> int:
        """Return how many bytes both files of a segment may take at most."""
        return self.limit_bytes - min(CGROUP_RESERVE_BYTES, self.limit_bytes // 4)


def memory_limit(proc_file: Path = PROC_FILE, mount: Path = MOUNT) -> MemoryLimit | None:
    """Return the lowest limit of this process's control group and all above it, version 2 or 1;
    None when there is none.

    Never raises: what cannot be read limits nothing.
    """
    found = [MemoryLimit(size, file) for file in _files(proc_file, mount) if (size := _limit(file))]
    return min(found, default=None)


def _files(proc_file: Path, mount: Path) -> list[Path]:
    try:
        lines = proc_file.read_text().splitlines()
    except OSError:
        lines = []
    groups = {(mount, "memory.max"): "/", (mount / "memory", "memory.limit_in_bytes"): "/"}
    for line in lines:
        number, controllers, path = [*line.split(":", 2), "", "", ""][:3]
        if number == "0" and not controllers:
            groups[mount, "memory.max"] = groups[mount / "unified", "memory.max"] = path
        elif "memory" in controllers.split(","):
            groups[mount / "memory", "memory.limit_in_bytes"] = path
    files = []
    for (root, name), path in groups.items():
        # Seen from inside a container the path may be the host's, and only its root be mounted.
        inside = PurePosixPath(path.lstrip("/"))
        files += [
            root / part / name for part in (inside, *inside.parents) if ".." not in part.parts
        ]
    return files


def _limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() and int(text) < UNLIMITED_BYTES else None


def check_limit(size_bytes: int, limit: MemoryLimit | None, *, nodes: int = 1) -> None:
    """Raise `UsageError` when `nodes` segments of `size_bytes` each exceed the limit."""
    need_bytes = files_bytes(size_bytes) * nodes
    of_all = f", of {nodes} nodes" if nodes > 1 else ""
    if limit is not None and need_bytes > limit.limit_bytes:
        raise UsageError(
            "size_bytes",
            size_bytes,
            f"its {need_bytes} bytes of shared memory, headers and all{of_all}, are more than the "
            f"memory limit of this control group, {limit.limit_bytes} bytes ({limit.file}): "
            f"at most {fitting_size(limit, nodes)}, or raise the limit (`docker run --memory`)",
        )


def fitting_size(limit: MemoryLimit, nodes: int = 1) -> int:
    """Return the largest size in bytes, in whole MiB, for the segment of each of `nodes` nodes; it
    leaves room for their processes."""
    return (limit.segment_bytes // nodes * HEADERS_LEAVE // HEADERS_OF) >> 20 << 20


def size_within(size_bytes: int, limit: MemoryLimit | None, *, nodes: int = 1) -> int:
    """Return `size_bytes`, a default, or with a warning the largest size that the limit allows."""
    if limit is None or files_bytes(size_bytes) * nodes <= limit.segment_bytes:
        return size_bytes
    fits = fitting_size(limit, nodes)
    log.warning(
        "a node has %d MiB, not %d MiB: the memory limit of this control group is %d MiB (%s); "
        "raise it, or set a size",
        fits >> 20,
        size_bytes >> 20,
        limit.limit_bytes >> 20,
        limit.file,
    )
    return fits
