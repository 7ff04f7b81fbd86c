"""Reads and writes another user's segment by calls: its owner can end nobody who has it open.

A file that is made shorter ends every process that touches what it has mapped beyond the new end
(SIGBUS), and its owner can do that at any time. A read by a call is short then, and a short read
is a miss. What is read is the caller's own from then on, also for a pin.
"""

from __future__ import annotations

from pathlib import Path

from kvstore.machine import REAL, Machine
from kvstore.segment.attached import AttachedHeads, AttachedShm
from kvstore.segment.trusted_files import SegmentFiles


class UnmappedShm(AttachedHeads):
    """Another user's segment; `writable` is for a same-host writer that may write to it all the
    same: root. Raises like `AttachedHeads`."""

    def __init__(
        self,
        data_path: Path,
        head_path: Path,
        *,
        writable: bool = False,
        owner: int,
        machine: Machine = REAL,
    ) -> None:
        super().__init__(head_path, owner=owner, mapped=False, machine=machine)
        self._data = machine.open_memory(data_path, writable=writable, owner=owner)
        if len(self._data) != self.superblock.size_bytes:
            raise ValueError(f"{data_path} does not have the size its header file says")

        self.read = self._data.read
        """A copy of that part of the payload; None when it is not there any more."""
        self.read_into = self._data.read_into
        self.write = self._data.write


def attach(
    files: SegmentFiles, machine: Machine = REAL, *, writable: bool = False
) -> AttachedShm | UnmappedShm:
    """The segment in `files`, mapped where its owner is trusted with this process. Raises like
    `AttachedHeads`."""
    data, head, owner = files.data, files.head, files.owner
    if files.mapped:
        return AttachedShm(data, head, writable=writable, owner=owner, machine=machine)
    return UnmappedShm(data, head, writable=writable, owner=owner, machine=machine)
