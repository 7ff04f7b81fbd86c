"""Defines what the store needs of a CUDA device. One suite (tests/contract/cuda.py) runs against
each implementation."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

SHARED_NAME_BYTES = 16
POLL_SPIN_S = 1e-3
"""Time for which a wait polls without a pause: a copy of a GiB within a device takes less."""
POLL_PAUSE_SHARE = 1 / 32
"""Later pauses, as a share of the wait so far; a sleep takes about 0.06 ms longer than asked."""
POLL_PAUSE_MAX_S = 1e-3

Copy = tuple[int, int, int]
"""(destination address, source address, bytes). Either may be memory of a device or of the host."""
Driver: TypeAlias = Any
"""`cuda.bindings.driver`, or what stands in for it. Its functions depend on its release."""
Handle: TypeAlias = Any
"""Objects of cuda-python that the driver takes and gives: memory, streams, events, results."""


@dataclass(frozen=True, slots=True)
class DeviceRange:
    """A contiguous range of a CUDA device's memory; its length is its size in bytes."""

    address: int
    """The address in this process."""
    size_bytes: int
    device: int
    """Ordinal of the device in this process."""

    def __len__(self) -> int:
        return self.size_bytes


Buffer = memoryview | DeviceRange
"""The memory of a block's payload, of the host or of a device."""


class Shared(NamedTuple):
    """One allocation as another process opens it. It exists as long as somebody has it open."""

    name: bytes
    """`SHARED_NAME_BYTES`, drawn by its owner; a process recognises its own memory by it."""
    size_bytes: int
    """Size in whole granules of the device."""
    fd: int
    """A descriptor that stands for the memory, as one of a file would; it crosses PID namespaces.
    Whoever has it closes it."""


class CudaEvent(Protocol):
    """Stands for all that was queued on a stream up to one moment."""

    def done(self) -> bool:
        """Return whether all of it has been carried out. Raises `DeviceError` when it failed."""
        ...


class Stream(Protocol):
    """A queue of copies of our own: it waits for no other stream and none waits for it.

    Thread-safe. Memory named in a copy must stay until an event recorded after it is done.
    """

    def copy(self, batch: Sequence[Copy]) -> None:
        """Queue copies, to be carried out in order. Raises `DeviceError`: then some of the batch
        may be queued."""
        ...

    def copy_apart(self, batch: Sequence[Copy]) -> None:
        """Queue copies as `copy` does, but in any order, which takes fewer calls: none of them may
        touch what another one writes."""
        ...

    def record(self) -> CudaEvent:
        """Return an event for all that is queued so far."""
        ...

    def close(self) -> None:
        """Give the stream back, after its last copy is done. Safe to call twice."""
        ...


class CudaDevice(Protocol):
    """One device as one process sees it. Thread-safe.

    Every method raises `DeviceError` when the device or the driver refuses.
    """

    @property
    def ordinal(self) -> int: ...

    @property
    def uuid(self) -> str:
        """Return the device's own name, the same in every process whatever its
        CUDA_VISIBLE_DEVICES."""
        ...

    @property
    def maps_read_only(self) -> bool:
        """Return whether memory that is opened without `writable` cannot be written to; known for
        sure once some was opened so."""
        ...

    def allocate(self, size_bytes: int) -> int:
        """Return the address of new memory of at least `size_bytes`, which `export` takes (the VMM
        API's).

        Raises `NoSpaceError` when the device has no room.
        """
        ...

    def free(self, address: int) -> None:
        """Give back the memory that `allocate` returned; no copy of this process may use it there.

        The memory stays for those who have it open, and is gone with the last of them.
        """
        ...

    def export(self, address: int) -> Shared:
        """Return the allocation as other processes open it; its descriptor is the caller's to
        close.

        Raises `UsageError` for what `allocate` did not return: parts of an allocation, and memory
        of others (torch's, an engine's).
        """
        ...

    def open(self, shared: Shared, *, writable: bool = False) -> int:
        """Map memory that was exported, by this process too, and return its address here: another
        one each time, and each needs its `close`. The descriptor may be closed after it.

        Raises `DeviceError` for a descriptor of anything else.
        """
        ...

    def close(self, address: int) -> None:
        """Unmap the memory that `open` returned; no copy of this process may use it there."""
        ...

    def reaches(self, uuid: str) -> bool:
        """Return whether this device may map memory of the device `uuid`: False when the driver
        says no. True for a device that is hidden from this process, of which `open` will tell."""
        ...

    def register_host(self, address: int, size_bytes: int, *, read_only: bool = False) -> None:
        """Lock pages of this process's memory, so that copies from and to it are DMA.

        A range may be registered once at a time. `read_only` is for a mapping that cannot
        be written.
        """
        ...

    def unregister_host(self, address: int) -> None:
        """Undo `register_host` of the range that begins there."""
        ...

    def flush_rdma_writes(self) -> None:
        """Make what RDMA has written to this device's memory so far visible to copies that are
        queued after it."""
        ...

    def stream(self) -> Stream:
        """Return a new stream, which the caller closes."""
        ...


def wait(event: CudaEvent, deadline: float) -> bool:
    """Return whether `event` was done before `deadline` (seconds of `time.monotonic`).

    The driver's own wait has no deadline (rule 8), hence polls: at once for `POLL_SPIN_S`, then
    with pauses that grow.
    """
    began = time.monotonic()
    while not event.done():
        now = time.monotonic()
        if now >= deadline:
            return event.done()
        if now - began > POLL_SPIN_S:
            time.sleep(min((now - began) * POLL_PAUSE_SHARE, POLL_PAUSE_MAX_S))
    return True


def address_of(memory: memoryview) -> int:
    """Return the address of host memory: writable, contiguous, at least one byte. The caller keeps
    it alive."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
