"""Page-locks the store's shared memory, so that a device reads and writes it by DMA.

What to lock is decided here; `Registrar` calls CUDA. Memory that is not page-locked can be
copied all the same, through the driver's own staging: all that is lost is speed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from connector.copiers.base import Payload
from connector.copiers.cuda.kernel_plan import HostPlace, apart
from connector.limits import POOL_LOOK_EVERY_S, SHUTDOWN_TIMEOUT_S
from kvstore import DeviceRange, PoolMapping

log = logging.getLogger(__name__)

Place = tuple[int, int, int]
"""Node, epoch, size: mappings that share it are the same memory."""


class Registrar(Protocol):
    def lock(self, address: int, size_bytes: int, writable: bool) -> str:
        """Page-lock a range that this process has mapped; why it cannot be, empty when it is."""
        ...

    def unlock(self, address: int) -> None: ...


class _Locked(NamedTuple):
    mapping: PoolMapping
    """Holds the mapping: memory that is mapped anew where some is still locked would have the
    device write to what was there before."""
    address: int
    parts: list[int]
    """Addresses that are locked."""


class _Table:
    """What is locked, as one copy sees it; immutable but for `users`."""

    def __init__(
        self, ranges: list[tuple[int, int, int]], locked: list[tuple[int, int, int]]
    ) -> None:
        """Of (start, end, how far from there the same memory is locked), and of (start, end,
        bytes of a part) what is locked, or will be."""
        self.ranges = ranges
        self.locked = locked
        self.users = 0

    def address(self, view: Payload) -> int:
        """See `HostMemory.address`."""
        address = address_of(view)
        for start, end, distance in self.ranges:
            if start <= address < end:
                return address + distance
        return address

    def apart(self, place: HostPlace) -> Iterable[tuple[int, HostPlace]]:
        """See `HostMemory.apart`."""
        if not place.on_device:
            last = place.address + (place.rows - 1) * place.pitch_bytes + place.row_bytes - 1
            for start, end, part_bytes in self.locked:
                if start <= place.address < end:
                    if (place.address - start) // part_bytes != (last - start) // part_bytes:
                        return apart(place, start, part_bytes)
                    break
        return ((0, place),)


class LockedPool:
    """Looks for memory of the store, in a thread of its own, and locks it part by part.

    Memory that the process may write is locked once. A second, read-only mapping of it
    is not: few devices can lock one, so reads from there are made from the first.
    """

    def __init__(
        self,
        registrar: Registrar,
        mappings: Callable[[], Sequence[PoolMapping]],
        count: Callable[[int, str], None],
    ) -> None:
        """`count` is told of bytes and why they could not be locked, empty when they are."""
        self._registrar = registrar
        self._mappings = mappings
        self._count = count
        self._changed = threading.Condition()
        self._locked: dict[int, _Locked] = {}
        """By address; of the thread alone while it runs."""
        self._new: list[_Locked] = []
        """To be locked once no copy runs that does not know of their parts."""
        self._table = _Table([], [])
        self._older: list[_Table] = []
        """That were replaced while somebody used them."""
        self._leaving: list[tuple[list[_Table], list[_Locked]]] = []
        """What to let go when nobody uses one of the tables of then any more."""
        self._closing = False
        self._said = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name="kvstore-page-lock", daemon=True)
        self._thread.start()

    @contextmanager
    def held(self) -> Iterator[_Table]:
        """What is locked stays so, and mapped, meanwhile."""
        with self._changed:
            table = self._table
            table.users += 1
        try:
            yield table
        finally:
            with self._changed:
                table.users -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Unlock all, at most within `SHUTDOWN_TIMEOUT_S`; nothing is copied any more."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is None:
            self._unlock_all()
        else:
            self._thread.join(SHUTDOWN_TIMEOUT_S)
            if self._thread.is_alive():
                log.warning("page-locked memory is left to the end of the process")

    # The thread

    def _loop(self) -> None:
        try:
            while not self._closing:
                self.look()
                with self._changed:
                    if not self._closing:
                        self._changed.wait(POOL_LOOK_EVERY_S)
        except Exception:
            log.exception("the store's memory is not page-locked: copies are slower")
        finally:
            self._unlock_all()

    def _unlock_all(self) -> None:
        gone, self._locked, self._new = list(self._locked.values()), {}, []
        self._publish([], gone)
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
        while self._leaving and time.monotonic() < deadline:
            self._let_go()
            with self._changed:
                if self._leaving:
                    self._changed.wait(POOL_LOOK_EVERY_S)

    def look(self) -> None:
        """One round: let go what is gone, lock what is new."""
        there = {address_of(m.memory): m for m in self._mappings() if len(m.memory)}
        gone = [self._locked.pop(address) for address in set(self._locked) - set(there)]
        if gone:
            self._publish(self._ranges(there), gone)
        self._let_go()
        written = {_place(m) for m in there.values() if m.writable}
        for address, mapping in there.items():
            if address not in self._locked and (mapping.writable or _place(mapping) not in written):
                locked = self._locked[address] = _Locked(mapping, address, [])
                self._new.append(locked)
        self._publish(self._ranges(there))
        with self._changed:
            in_use = any(table.users for table in self._older)
        if not in_use:
            new, self._new = self._new, []
            for locked in new:
                if self._locked.get(locked.address) is locked:
                    self._lock(locked)

    def _ranges(self, there: Mapping[int, PoolMapping]) -> list[tuple[int, int, int]]:
        """Read-only memory that is locked elsewhere."""
        at = {_place(x.mapping): x.address for x in self._locked.values() if x.mapping.writable}
        return [
            (address, address + len(mapping.memory), at[_place(mapping)] - address)
            for address, mapping in there.items()
            if not mapping.writable and _place(mapping) in at
        ]

    def _lock(self, locked: _Locked) -> None:
        """Part by part: each call keeps the driver, and with it the engine, a moment."""
        size_bytes, part_bytes = len(locked.mapping.memory), locked.mapping.part_bytes
        for offset in range(0, size_bytes, part_bytes):
            if self._closing:
                return
            address, part = locked.address + offset, min(part_bytes, size_bytes - offset)
            failure = self._registrar.lock(address, part, locked.mapping.writable)
            self._count(part if not failure else size_bytes - offset, failure)
            if failure:
                self._say(failure)
                return
            locked.parts.append(address)

    def _say(self, failure: str) -> None:
        if not self._said:
            log.warning(
                "the store's memory cannot be page-locked (%s): copies between it and the "
                "device are slower. A limit on locked memory? `ulimit -l` shows it",
                failure,
            )
        self._said = True

    def _publish(self, ranges: list[tuple[int, int, int]], gone: Sequence[_Locked] = ()) -> None:
        """Let new copies see `ranges`; `gone` goes when no older copy runs any more."""
        locked = [
            (x.address, x.address + len(x.mapping.memory), x.mapping.part_bytes)
            for x in self._locked.values()
        ]
        with self._changed:
            if (ranges, locked) == (self._table.ranges, self._table.locked) and not gone:
                return
            old, self._table = self._table, _Table(ranges, locked)
            self._older = [table for table in (*self._older, old) if table.users]
            if gone:
                self._leaving.append((list(self._older), list(gone)))

    def _let_go(self) -> None:
        with self._changed:
            free: list[_Locked] = []
            waiting = []
            for tables, gone in self._leaving:
                if any(table.users for table in tables):
                    waiting.append((tables, gone))
                else:
                    free += gone
            self._leaving = waiting
        for locked in free:
            for address in locked.parts:
                self._registrar.unlock(address)
            with contextlib.suppress(BufferError):  # else it is unmapped with the last view
                locked.mapping.memory.release()


def address_of(memory: Payload) -> int:
    """Of its first byte, read-only memory included. Imports numpy."""
    if isinstance(memory, DeviceRange):
        return memory.address
    import numpy as np

    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def _place(mapping: PoolMapping) -> Place:
    return mapping.node_id, mapping.epoch, len(mapping.memory)
