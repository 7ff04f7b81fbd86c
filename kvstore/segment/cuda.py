"""Makes and attaches segments in VRAM: headers in shared memory, the payload one allocation.

An empty file stands where the payload's would be, so that who can only map files finds none. The
owner holds the lock on the header file as long as the segment's blocks may be read. The memory
stays for those who have it open (`CudaDevice.free`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstore.cuda.base import CudaDevice, Shared, address_of, wait
from kvstore.cuda.checksum import DeviceChecksums
from kvstore.cuda.probe import PROBE_BYTES, write_probe
from kvstore.errors import DeviceError
from kvstore.limits import CUDA_IPC_DRAIN_S
from kvstore.segment.attached import AttachedHeads
from kvstore.segment.header import HEADER_BYTES, SUPERBLOCK_BYTES, Superblock, header_file_bytes
from kvstore.segment.shm import OwnedHeads, check_free
from kvstore.system.filelock import fd_is_locked

log = logging.getLogger("kvstore.node")

WIPE_BYTES = 1 << 20


class OwnedCuda(OwnedHeads):
    """A node's own segment in VRAM. Only the node's event loop uses it.

    It takes no values inline.
    """

    def __init__(
        self, base_path: Path, superblock: Superblock, device: CudaDevice, *, home: str = ""
    ) -> None:
        """Allocate the segment and make its files. Raises `NoSpaceError` when the device or
        /dev/shm has no room, and `DeviceError`."""
        self.data_path = base_path.with_suffix(".data")
        self.device = device
        self._checksums = DeviceChecksums(device)
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
        """Return the checksum of a block in place; 0, which is none's, where it cannot be read."""
        try:
            return self._checksums.of([[(self.address + offset, length)]])[0]
        except DeviceError as e:
            log.warning("a block in VRAM cannot be looked at: %s", e)
            return 0

    def checksum_steps(self, offset: int, length: int, step_bytes: int) -> Iterator[int | None]:
        """Yield the checksum, in one step: a device reads a block before a host has asked twice."""
        yield self.checksum(offset, length)

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
        self._checksums.close()
        os.close(self.shared.fd)
        self.device.free(self.address)


class ServedCuda(AttachedHeads):
    """A node's own segment in VRAM, for threads that send its blocks to other hosts.

    The memory is opened once more, read-only where the driver can: it is there until `close`,
    whatever its owner frees. Raises `OSError` and `DeviceError`.
    """

    payload = None
    """A thread of this process never writes to it."""

    def __init__(self, head_path: Path, device: CudaDevice, shared: Shared) -> None:
        super().__init__(head_path)
        self._device = device
        self._hanging: list[memoryview] = []
        """Memory that copies may still write to."""
        with contextlib.ExitStack() as undo:
            undo.callback(super().close)
            self._address = device.open(shared)
            undo.callback(device.close, self._address)
            self._stream = device.stream()
            undo.pop_all()

    def payloads(self, places: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes at each (offset, length), copied to memory of the host. Raises
        `DeviceError` when the device does not copy them, or did not before."""
        if self._hanging:
            raise DeviceError("copies on the device hang")
        copied = memoryview(bytearray(sum(length for _, length in places)))
        found, copies, at = [], [], 0
        for offset, length in places:
            found.append(copied[at : at + length])
            if length:
                copies.append((address_of(found[-1]), self._address + offset, length))
            at += length
        if not copies:
            return found
        try:
            self._stream.copy(copies)
        finally:  # some may be queued
            if not wait(self._stream.record(), time.monotonic() + CUDA_IPC_DRAIN_S):
                self._hanging.append(copied)
                raise DeviceError(f"copies on the device hang for {CUDA_IPC_DRAIN_S} s")
        return found

    def close(self) -> None:
        """Close the memory; nobody asks for payloads any more. Where copies hang, what they use
        stays."""
        if self._hanging:
            _kept.append(self)
            return
        with contextlib.suppress(DeviceError):
            self._stream.close()
            self._device.close(self._address)
        super().close()


_kept: list[ServedCuda] = []


class AttachedCuda(AttachedHeads):
    """The headers of somebody else's segment in VRAM.

    Raises `OSError` when the segment is not on this host or its owner has ended, and `ValueError`
    when the file is of no segment.
    """

    def __init__(self, head_path: Path, *, owner: int | None = None) -> None:
        """Map the headers, as `AttachedHeads` does."""
        super().__init__(head_path, owner=owner)
        with contextlib.ExitStack() as undo:
            undo.callback(super().close)
            # Another user may have put a pipe or a link there meanwhile.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._lock = os.open(head_path, flags)
            undo.callback(os.close, self._lock)
            if not self.alive():
                raise FileNotFoundError(f"the owner of {head_path} has ended")
            undo.pop_all()

    def alive(self) -> bool:
        """Return whether the owner's process lives and keeps the segment."""
        return fd_is_locked(self._lock)

    def close(self) -> None:
        os.close(self._lock)
        super().close()
