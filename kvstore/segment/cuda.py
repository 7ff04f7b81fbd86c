"""Segments in VRAM: headers in shared memory as everywhere, the payload one allocation on a device.

An empty file stands where the payload's would be: who can only map files finds none.

The owner holds the lock on the header file as long as the memory is there, each process
that has the memory open a shared one on that empty file. Both are of this start alone,
whatever becomes of the node's name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from kvstore.cuda.base import CudaDevice
from kvstore.errors import InternalError
from kvstore.filelock import FileLock, fd_is_locked
from kvstore.segment.attached import AttachedHeads
from kvstore.segment.header import HEADER_BYTES, SUPERBLOCK_BYTES, Superblock
from kvstore.segment.shm import OwnedHeads, check_free, header_file_bytes

WIPE_BYTES = 1 << 20
READERS_POLL_S = 0.02


class OwnedCuda(OwnedHeads):
    """The own segment of a node that lives in the process that writes it.

    It takes no values inline and knows no checksums: its bytes never cross a host.
    """

    def __init__(
        self, base_path: Path, superblock: Superblock, device: CudaDevice, *, home: str = ""
    ) -> None:
        """Raises `NoSpaceError` (device, /dev/shm) and `DeviceError`."""
        self.data_path = base_path.with_suffix(".data")
        self.device = device
        check_free(base_path.parent, header_file_bytes(superblock.size_bytes))
        self.address = device.allocate(superblock.size_bytes)
        with contextlib.ExitStack() as undo:
            undo.callback(device.free, self.address)
            self.handle = device.export(self.address)
            flags = os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._readers = os.open(self.data_path, flags, 0o600)
            undo.callback(self.data_path.unlink)
            undo.callback(os.close, self._readers)
            super().__init__(base_path, superblock, home=home)
            undo.pop_all()

    def checksum(self, offset: int, length: int) -> int:
        raise InternalError("a block in VRAM was saved with a checksum")

    def close(self, *, keep: bool = False) -> None:
        """Every block is a miss from here on, for those who have the headers mapped too.

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

    def free(self, timeout_s: float) -> bool:
        """Give the memory back after `close`, once; False when somebody has it open until then.

        CUDA leaves undefined what those would find: the memory then stays until this
        process ends. Nobody may write to it any more.
        """
        give_up_at = time.monotonic() + timeout_s
        try:
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(self._readers, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self.device.free(self.address)
                    return True
                if time.monotonic() > give_up_at:
                    return False
                time.sleep(READERS_POLL_S)
        finally:
            os.close(self._readers)


class AttachedCuda(AttachedHeads):
    """Somebody else's segment in VRAM: its headers, and the word that its memory is in use here.

    Raises `OSError` when it is not on this host, has ended or is about to, and
    `ValueError` when the files are no such segment.
    """

    def __init__(self, data_path: Path, head_path: Path, *, owner: int | None = None) -> None:
        super().__init__(head_path, owner=owner)
        with contextlib.ExitStack() as undo:
            undo.callback(super().close)
            self._lock = os.open(head_path, os.O_RDONLY | os.O_CLOEXEC)
            undo.callback(os.close, self._lock)
            self._in_use = FileLock(data_path, os.O_RDONLY)
            undo.callback(self._in_use.release)
            if not self._in_use.take(shared=True):
                raise FileNotFoundError(f"the owner of {head_path} is ending")
            if not self.alive():
                raise FileNotFoundError(f"the owner of {head_path} has ended")
            undo.pop_all()

    def alive(self) -> bool:
        """Whether the owner's process lives and keeps the memory."""
        return fd_is_locked(self._lock)

    def close(self) -> None:
        """Once its memory is no longer open here."""
        os.close(self._lock)
        self._in_use.release()
        super().close()
