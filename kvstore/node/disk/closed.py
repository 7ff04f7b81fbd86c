"""Remembers, in the run directory, which disks of a node were closed for good: a drive that can no
longer be written does not say so itself, and there may be no other whose log could."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvstore.system.small_files import read_small

NOTED_BYTES_MAX = 1 << 20
_UUID = re.compile(rb"^[0-9a-f]{32}$", re.MULTILINE)


def note_closed(run_dir: Path, name: str, uuid: bytes) -> None:
    """Remember a disk of the node of that name, durably. Raises `OSError`."""
    path = record_of(run_dir, name)
    path.parent.mkdir(exist_ok=True, mode=0o700)
    with path.open("ab") as file:
        file.write(b"\n" + uuid.hex().encode())  # behind one that was torn
        file.flush()
        os.fsync(file.fileno())
    for directory in (path.parent, run_dir):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def closed_disks(run_dir: Path, name: str) -> set[bytes]:
    """Return the UUIDs of those that were noted. Raises `OSError` where that cannot be read."""
    try:
        raw = read_small(record_of(run_dir, name), NOTED_BYTES_MAX)
    except FileNotFoundError:
        return set()
    return {bytes.fromhex(uuid.decode()) for uuid in _UUID.findall(raw)}


def record_of(run_dir: Path, name: str) -> Path:
    """Return where those of a node are noted."""
    return run_dir / "closed_disks" / name
