"""Makes and attaches segments in VRAM: headers in shared memory, the payload one allocation.

An empty file stands where the payload's would be, so that who can only map files finds none. The
owner holds the lock on the header file as long as the segment's blocks may be read. The memory
stays for those who have it open (`CudaDevice.free`).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kvstore.cuda.base import CudaDevice
from kvstore.cuda.probe import PROBE_BYTES, write_probe
from kvstore.errors import InternalError
from kvstore.filelock import fd_is_locked
from kvstore.segment.attached import AttachedHeads
from kvstore.segment.header import HEADER_BYTES, SUPERBLOCK_BYTES, Superblock
from kvstore.segment.shm import OwnedHeads, check_free, header_file_bytes

WIPE_BYTES = 1 << 20


class OwnedCuda(OwnedHeads):
    """A node's own segment in VRAM. Only the node's event loop uses it.

    It takes no values inline and knows no checksums: its bytes never cross a host.
    """

    def __init__(
        self, base_path: Path, superblock: Superblock, device: CudaDevice, *, home: str = ""
    ) -> None:
        """Allocate the segment and make its files. Raises `NoSpaceError` when the device or
        /dev/shm has no room, and `DeviceError`."""
        self.data_path = base_path.with_suffix(".data")
        self.device = device
        check_free(base_path.parent, header_file_bytes(superblock.size_bytes))
        self.address = device.allocate(superblock.size_bytes + PROBE_BYTES)
        with contextlib.ExitStack() as undo:
            undo.callback(device.free, self.address)
            self.shared = device.export(self.address)
            undo.callback(os.close, self.shared.fd)
            write_probe(device, self.address + superblock.size_bytes, self.shared.name)
            os.close(os.open(self.data_path, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o600))
            undo.callback(self.data_path.unlink)
            super().__init__(base_path, superblock, home=home)
            undo.pop_all()

    def checksum(self, offset: int, length: int) -> int:
        raise InternalError("a block in VRAM was saved with a checksum")

    def close(self, *, keep: bool = False) -> None:
        """Make every block a miss, for those who have the headers mapped too, and remove the files.

        The memory itself stays until `free`.
        """
        if self._closed:
            return
        end = SUPERBLOCK_BYTES + len(self._held) * HEADER_BYTES
        for start in range(SUPERBLOCK_BYTES, end, WIPE_BYTES):
            size_bytes = min(WIPE_BYTES, end - start)
            self._head[start : start + size_bytes] = bytes(size_bytes)
        self.data_path.unlink(missing_ok=True)
        super().close()

    def free(self) -> None:
        """Give the memory back after `close`, once. Nobody may write to it any more."""
        os.close(self.shared.fd)
        self.device.free(self.address)


class AttachedCuda(AttachedHeads):
    """The headers of somebody else's segment in VRAM.

    Raises `OSError` when the segment is not on this host or its owner has ended, and `ValueError`
    when the file is of no segment.
    """

    def __init__(self, head_path: Path, *, owner: int | None = None) -> None:
        super().__init__(head_path, owner=owner)
        with contextlib.ExitStack() as undo:
            undo.callback(super().close)
            self._lock = os.open(head_path, os.O_RDONLY | os.O_CLOEXEC)
            undo.callback(os.close, self._lock)
            if not self.alive():
                raise FileNotFoundError(f"the owner of {head_path} has ended")
            undo.pop_all()

    def alive(self) -> bool:
        """Whether the owner's process lives and keeps the segment."""
        return fd_is_locked(self._lock)

    def close(self) -> None:
        os.close(self._lock)
        super().close()
