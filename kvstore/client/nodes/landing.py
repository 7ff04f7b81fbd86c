"""Keeps memory of a device in which blocks of other hosts arrive, beside a caller's staging."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from kvstore.circuit_breaker import Breaker
from kvstore.client.nodes.fetch import RemoteBlock
from kvstore.client.payloads.out import Out
from kvstore.errors import DeviceError, NoSpaceError

if TYPE_CHECKING:
    from kvstore.cuda.base import CudaDevice, DeviceRange

log = logging.getLogger("kvstore.client")

RETRY_AFTER_S = 60.0
RETRY_AFTER_MAX_S = 3600.0
"""A device that is full of an engine's KV stays so."""


class ArrivedInVram:
    """Implements `BlockView`: a block of another host, in memory of a device and checked there."""

    def __init__(self, memory: DeviceRange) -> None:
        self.buffer = memory

    def valid(self) -> bool:
        """Return True: what arrived there is nobody else's."""
        return True


class VramLanding:
    """Belongs to the first staging that it is asked for: views of one caller must not be written
    over by another's. Thread-safe.

        unused -> there, as large as the staging -> given back, by `close`
               -> no room: tried again later
        there  -> lost: a copy to it hangs; it is neither used nor given back any more
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._staging: memoryview | None = None
        self._room: DeviceRange | None = None
        self._over = False
        self._tries = Breaker(
            failures_max=1, retry_after_s=RETRY_AFTER_S, retry_after_max_s=RETRY_AFTER_MAX_S
        )
        self.reason = ""
        """Why there is no memory; empty when there is, or nobody has asked yet."""

    def beside(self, staging: memoryview) -> DeviceRange | None:
        """As much memory as `staging` has, None where there is none for it now."""
        with self._lock:
            if self._over or not staging.nbytes:
                return None
            if self._room is not None:
                return self._room if staging is self._staging else None
            if not self._tries.allows(time.monotonic()):
                return None
            try:
                address = self._device.allocate(staging.nbytes)
            except (DeviceError, NoSpaceError) as e:
                self._tries.failed(time.monotonic())
                self.reason = str(e)
                log.warning("blocks of other hosts arrive in host memory, not in VRAM: %s", e)
                return None
            from kvstore.cuda.base import DeviceRange

            self._tries.succeeded()
            self.reason, self._staging = "", staging
            self._room = DeviceRange(address, staging.nbytes, self._device.ordinal)
            return self._room

    def lost(self) -> None:
        """A copy to it hangs: whatever it writes there, and when, nobody is given it."""
        with self._lock:
            self._over = True
            self.reason = "a copy within the device hangs"

    def close(self) -> None:
        """Give it back; nobody copies from or to it any more. Safe to call twice."""
        with self._lock:
            lost, self._over = self._over, True
            room, self._room = self._room, None
        if room is not None and not lost:
            with contextlib.suppress(DeviceError):
                self._device.free(room.address)


Rooms: TypeAlias = "Sequence[DeviceRange | None]"


def divided(
    staging: memoryview, landing: DeviceRange | None, refs: list[Any]
) -> tuple[list[Out | None], Rooms | None]:
    """Room in `staging`, and at the same offsets in `landing`, for those of other hosts, one after
    the other; what finds none is taken out of `refs`."""
    into: list[Out | None] = [None] * len(refs)
    rooms: list[DeviceRange | None] = [None] * len(refs)
    start = 0
    for i, ref in enumerate(refs):
        if isinstance(ref, RemoteBlock):
            size_bytes = ref.location.length
            end = start + size_bytes
            if end > staging.nbytes:
                refs[i] = None
                continue
            into[i] = Out(staging[start:end])
            if landing is not None:
                address = landing.address + start
                rooms[i] = replace(landing, address=address, size_bytes=size_bytes)
            start = end
    return into, None if landing is None else rooms
