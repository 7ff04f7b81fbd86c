"""Page-locks the store's shared memory, so that a device reads and writes it by DMA.

What to lock is decided here; `Registrar` calls CUDA. Memory that is not page-locked can be
copied all the same, through the driver's own staging: all that is lost is speed. A part is

    unused -> asked for, by a copy -> locked -> unlocked, when its mapping is gone
                                   -> left alone, beyond `bytes_max`
                                   -> refused -> tried again, later each time

Only the pool's thread locks and unlocks; threads that copy note what they use, and hold the table
of that moment while they do. Must never happen: a part unlocked while a table that a copy holds
has it; a part locked under a copy that does not know where its parts begin, for no DMA may go over
the border of two; memory mapped anew where some is still locked.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from connector.copiers.base import Payload
from connector.copiers.cuda.kernel_plan import HostPlace, apart
from connector.limits import (
    PAGE_LOCK_BYTES_MAX,
    PAGE_LOCK_RETRY_MAX_S,
    PAGE_LOCK_RETRY_S,
    POOL_LOOK_EVERY_S,
    SHUTDOWN_TIMEOUT_S,
    Clock,
)
from kvstore.spi import DeviceRange, PoolMapping

log = logging.getLogger(f"kvstore.{__name__}")

Place = tuple[int, int, int]
"""Node, epoch, size: mappings that share it are the same memory."""


class Registrar(Protocol):
    """Page-locks and unlocks memory: a driver, or a model of one."""

    def lock(self, address: int, size_bytes: int, writable: bool) -> str:
        """Page-lock a range that this process has mapped. Return why that failed, else an empty
        text."""
        ...

    def unlock(self, address: int) -> None: ...


_REMEDIES = {
    "out_of_memory": "The driver has none left for it: page tables take about 2 MiB of the "
    "device's memory for each GiB, and the system may have too little to lock",
    "not_supported": "The device locks no memory that is mapped read-only",
    "operating_system": "The system refuses: look at the container's memory limit",
    "limit": "page_lock_bytes_max is reached: that is all of it",
}


class _Locked:
    """Holds a mapping, and what of it is locked or to be."""

    __slots__ = ("address", "asked", "mapping", "not_before", "parts", "refused", "wait")

    def __init__(self, mapping: PoolMapping, address: int) -> None:
        self.mapping = mapping
        """The mapping is held. If memory were mapped anew while some of it is locked, the device
        would write to the old pages."""
        self.address = address
        self.parts: dict[int, int] = {}
        """Locked bytes of each part, by address."""
        self.asked: set[int] = set()
        """Numbers of the parts that were copied from or to."""
        self.wait: deque[int] = deque()
        """The parts among them that are to be locked."""
        self.refused: dict[int, tuple[float, float]] = {}
        """Parts that could not be locked: when they are tried again, and after which pause."""
        self.not_before = float("-inf")
        """No other part is tried before this time."""

    @property
    def end(self) -> int:
        return self.address + len(self.mapping.memory)

    def due(self, now: float) -> int | None:
        """Return the part to be locked now."""
        if now < self.not_before:
            return None
        if self.wait:
            return self.wait[0]
        return next((n for n, (due, _) in self.refused.items() if now >= due), None)


class _Table:
    """Lists what may be locked, as one copy sees it; immutable but for `users`."""

    def __init__(
        self,
        ranges: list[tuple[int, int, int]],
        locked: list[_Locked],
        use: Callable[[_Locked, range], None],
    ) -> None:
        """Make a table. `ranges` are (start, end, how far from there the same memory is locked),
        `locked` is what is locked, or will be. `use` is called with parts that a copy is about to
        take."""
        self.ranges = ranges
        self.locked = locked
        self.users = 0
        self._use = use

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
            for locked in self.locked:
                start, part_bytes = locked.address, locked.mapping.part_bytes
                if start <= place.address < locked.end:
                    first, final = (
                        at // part_bytes for at in (place.address - start, last - start)
                    )
                    self._use(locked, range(first, final + 1))
                    if first != final:
                        return apart(place, start, part_bytes)
                    break
        return ((0, place),)


class LockedPool:
    """Looks for memory of the store, in a thread of its own, and locks it part by part.

    A part is locked when a copy has used it: a lock holds up all that talk to the driver, about
    0.1 s a GB, and takes page tables on the device. So the thread also rests after each part for
    as long as that took, and locks no more than `bytes_max`. What fails is tried again, later
    each time. Memory that the process may write is locked once. A second, read-only mapping of it
    is not: few devices can lock one, so reads from there are made from the first.
    """

    def __init__(
        self,
        registrar: Registrar,
        mappings: Callable[[], Sequence[PoolMapping]],
        count: Callable[[int, str], None],
        *,
        bytes_max: int = PAGE_LOCK_BYTES_MAX,
        clock: Clock = time.monotonic,
    ) -> None:
        """Make an empty pool. `count` is called with bytes and why they could not be locked, empty
        when they are."""
        self._bytes_max = bytes_max
        self._clock = clock
        self._locked_bytes = 0
        self._registrar = registrar
        self._mappings = mappings
        self._count = count
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._locked: dict[int, _Locked] = {}
        """Locked mappings by address; only the thread uses them while it runs."""
        self._table = _Table([], [], self._use)
        self._older: list[_Table] = []
        """Replaced tables that are still in use."""
        self._leaving: list[tuple[list[_Table], list[_Locked]]] = []
        """Memory to unlock once nobody uses one of the older tables any more."""
        self._closing = False
        self._logged: set[str] = set()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name="kvstore-page-lock", daemon=True)
        self._thread.start()

    @contextmanager
    def held(self) -> Iterator[_Table]:
        """Hold the memory as it is: what is locked stays locked and mapped meanwhile."""
        with self._lock:
            table = self._table
            table.users += 1
        try:
            yield table
        finally:
            with self._lock:
                table.users -= 1
                self._changed.notify_all()

    @contextmanager
    def holding(self, buffers: Iterable[memoryview]) -> Iterator[None]:
        """Do as `held` for copies that somebody else makes, within parts, from or to `buffers`."""
        with self.held() as table:
            for buffer in buffers:
                for _ in table.apart(HostPlace(address_of(buffer), len(buffer), 1, len(buffer))):
                    pass
            yield

    def close(self) -> None:
        """Unlock all, at most within `SHUTDOWN_TIMEOUT_S`; nothing is copied any more."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        if self._thread is None:
            self._unlock_all()
        else:
            self._thread.join(SHUTDOWN_TIMEOUT_S)
            if self._thread.is_alive():
                log.warning(
                    "page-locked memory was not unlocked within %g s and stays locked until this "
                    "process ends",
                    SHUTDOWN_TIMEOUT_S,
                )

    # The thread

    def _loop(self) -> None:
        try:
            look_at = self._clock()
            while not self._closing:
                if self._clock() >= look_at:
                    self.look()
                    look_at = self._clock() + POOL_LOOK_EVERY_S
                took_s = self.lock_next()
                with self._lock:
                    if took_s is not None:  # the driver's locks are the engine's for as long
                        self._changed.wait_for(lambda: self._closing, took_s)
                    elif not self._closing and not self._usable():
                        self._changed.wait(max(0.0, look_at - self._clock()))
        except Exception:
            log.exception("the store's memory is not page-locked: copies are slower")
        finally:
            self._unlock_all()

    def _unlock_all(self) -> None:
        unmapped, self._locked = list(self._locked.values()), {}
        self._publish([], unmapped)
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT_S
        while self._leaving and time.monotonic() < deadline:
            self._unlock_unused()
            with self._lock:
                if self._leaving:
                    self._changed.wait(POOL_LOOK_EVERY_S)

    def look(self) -> None:
        """Do one round: unlock mappings that were closed, and add new ones."""
        there = {address_of(m.memory): m for m in self._mappings() if len(m.memory)}
        unmapped = [self._locked.pop(address) for address in set(self._locked) - set(there)]
        if unmapped:
            self._publish(self._ranges(there), unmapped)
        self._unlock_unused()
        written = {_place(m) for m in there.values() if m.writable}
        for address, mapping in there.items():
            if address not in self._locked and (mapping.writable or _place(mapping) not in written):
                self._locked[address] = _Locked(mapping, address)
        self._publish(self._ranges(there))

    def _use(self, locked: _Locked, parts: range) -> None:
        """Note that a copy takes `parts`. Called by the threads that copy, for every one of their
        copies."""
        if locked.asked.issuperset(parts):
            return
        with self._lock:
            new = [number for number in parts if number not in locked.asked]
            locked.asked.update(new)
            locked.wait.extend(new)
            self._changed.notify_all()

    def _usable(self) -> list[_Locked]:
        """Return what has parts to be locked now; under the lock. Nothing while a copy runs that
        does not know where its parts begin: it may go over the border of two."""
        now = self._clock()
        older = [table for table in self._older if table.users]
        return [
            locked
            for locked in self._locked.values()
            if locked.due(now) is not None
            and not any(locked not in table.locked for table in older)
        ]

    def lock_next(self) -> float | None:
        """Lock one part that was used, and say how many seconds that took; None: there is none
        to be locked now."""
        with self._lock:
            usable = self._usable()
            number = usable[0].due(self._clock()) if usable else None
            if number is None:
                return None
            locked = usable[0]
            if number in locked.wait:
                locked.wait.remove(number)
        memory, part_bytes = locked.mapping.memory, locked.mapping.part_bytes
        address = locked.address + number * part_bytes
        part = min(part_bytes, len(memory) - number * part_bytes)
        if self._locked_bytes + part > self._bytes_max:
            locked.refused.pop(number, None)
            self._count(part, "limit")
            self._say("limit")
            return 0.0
        began = self._clock()
        failure = self._registrar.lock(address, part, locked.mapping.writable)
        took_s = self._clock() - began
        if not failure:
            self._count(part, "")
            self._locked_bytes += part
            locked.parts[address] = part
            locked.refused.pop(number, None)
            return took_s
        if number not in locked.refused:
            self._count(part, failure)
        self._say(failure)
        _, before_s = locked.refused.get(number, (0.0, 0.0))
        pause_s = min(max(before_s * 2, PAGE_LOCK_RETRY_S), PAGE_LOCK_RETRY_MAX_S)
        locked.refused[number] = (self._clock() + pause_s, pause_s)
        locked.not_before = self._clock() + PAGE_LOCK_RETRY_S
        return took_s

    def _ranges(self, there: Mapping[int, PoolMapping]) -> list[tuple[int, int, int]]:
        """Return the ranges of read-only memory that is locked through its writable mapping."""
        at = {_place(x.mapping): x.address for x in self._locked.values() if x.mapping.writable}
        return [
            (address, address + len(mapping.memory), at[_place(mapping)] - address)
            for address, mapping in there.items()
            if not mapping.writable and _place(mapping) in at
        ]

    def _say(self, failure: str) -> None:
        if failure not in self._logged:
            log.warning(
                "some of the store's memory is not page-locked (%s): copies between it and the "
                "device are slower. %s",
                failure,
                _REMEDIES.get(failure, "It is tried again later"),
            )
        self._logged.add(failure)

    def _publish(
        self, ranges: list[tuple[int, int, int]], unmapped: Sequence[_Locked] = ()
    ) -> None:
        """Let new copies see `ranges`; `unmapped` is unlocked when no older copy runs any more."""
        locked = list(self._locked.values())
        with self._lock:
            if (ranges, locked) == (self._table.ranges, self._table.locked) and not unmapped:
                return
            old, self._table = self._table, _Table(ranges, locked, self._use)
            self._older = [table for table in (*self._older, old) if table.users]
            if unmapped:
                self._leaving.append((list(self._older), list(unmapped)))

    def _unlock_unused(self) -> None:
        with self._lock:
            free: list[_Locked] = []
            waiting = []
            for tables, unmapped in self._leaving:
                if any(table.users for table in tables):
                    waiting.append((tables, unmapped))
                else:
                    free += unmapped
            self._leaving = waiting
        for locked in free:
            for address, size_bytes in locked.parts.items():
                self._registrar.unlock(address)
                self._locked_bytes -= size_bytes
            with contextlib.suppress(BufferError):  # else it is unmapped with the last view
                locked.mapping.memory.release()


def address_of(memory: Payload) -> int:
    """Return the address of the first byte, of read-only memory too. Imports numpy."""
    if isinstance(memory, DeviceRange):
        return memory.address
    import numpy as np

    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def _place(mapping: PoolMapping) -> Place:
    return mapping.node_id, mapping.epoch, len(mapping.memory)
