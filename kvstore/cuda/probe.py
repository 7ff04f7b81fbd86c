"""Writes and reads a probe: bytes that everybody knows, at the end of shared memory of a device.

Whoever reads other bytes there reads nothing else of that memory. That a device has access to
another one's memory is a capability, not a promise: with an IOMMU or PCIe access control in the
way reads come back empty, and nothing says so.
"""

from __future__ import annotations

import time
from hashlib import shake_128

from kvstore.cuda.base import CudaDevice, Stream, address_of, wait
from kvstore.errors import DeviceError

PROBE_BYTES = 4096
PROBE_TIMEOUT_S = 2.0
PROBE_EVERY_S = 60.0
"""How often a process that has memory open reads its probe again."""


def probe_of(name: bytes) -> bytes:
    """Return the `PROBE_BYTES` bytes that memory of that name ends with; the name (`Shared.name`)
    is drawn at random and announced."""
    return shake_128(name).digest(PROBE_BYTES)


def write_probe(device: CudaDevice, address: int, name: bytes) -> None:
    """Write the probe of the memory `name` to `address` of this process's own. Raises
    `DeviceError`."""
    source = memoryview(bytearray(probe_of(name)))
    stream = device.stream()
    _copy(stream, address, address_of(source), source)
    stream.close()


def read_probe(stream: Stream, address: int, name: bytes) -> None:
    """Read the probe of the memory `name` at `address`, where it is open here. Raises
    `DeviceError` for any other bytes, and when the copy takes longer than `PROBE_TIMEOUT_S`."""
    arrived = memoryview(bytearray(PROBE_BYTES))
    _copy(stream, address_of(arrived), address, arrived)
    if arrived != probe_of(name):
        raise DeviceError(
            "what is read there is not what was written: reads between these devices are lost "
            "(an IOMMU or PCIe access control?)"
        )


_hanging: list[memoryview] = []
"""Memory that a copy may still write to; it is kept forever."""


def _copy(stream: Stream, to: int, source: int, host: memoryview) -> None:
    stream.copy([(to, source, PROBE_BYTES)])
    if not wait(stream.record(), time.monotonic() + PROBE_TIMEOUT_S):
        _hanging.append(host)
        raise DeviceError(f"a copy on the device hangs for {PROBE_TIMEOUT_S} s")
