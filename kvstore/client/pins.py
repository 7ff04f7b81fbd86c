"""Ends each pin of a client with the last view of its memory, whoever holds that."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence

from kvstore.errors import NodeUnavailableError
from kvstore.machine import REAL, Machine
from kvstore.record import slot_of
from kvstore.system.fork import in_each_child
from kvstore.system.memory_files import address_of
from kvstore.system.scoped import Giving, Scoped
from kvstore.types import Key

IDLE_S = 1.0
"""How long the thread waits for a further pin after the last has ended."""

Pin = tuple[Key, bytes]
"""A key and the record that the node gave for it."""
Handle = tuple[int, int]
"""(slot, generation) at one start of one node."""
Memory = ctypes.Array[ctypes.c_ubyte]
"""All of a pinned payload."""


class HeldPin:
    """A pin that ends when nobody has this any more."""

    __slots__ = ("__weakref__", "pins", "record", "ref")

    def __init__(self, record: bytes, pins: Pins) -> None:
        self.record = record
        self.pins = pins
        # A function of C: what a handler of signals raises in another would be lost, and with
        # it the pin.
        self.ref = PinRef(self, pins.dropped.append)
        self.ref.handle = slot_of(record)


class PinRef(weakref.ref[HeldPin]):
    """Stands for a pin in what is held, and in what has ended."""

    __slots__ = ("handle",)
    handle: Handle
    # It is itself alone, also when its pin is gone.
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Pins:
    """Tells the nodes of the pins of one client that have ended. Thread-safe.

    `unpin` tells them of those that it is given, as far as they are held. It is called by who
    closes one, by the housekeeper (reaper.py) or by a thread of its own: never by the garbage
    collector, which may run inside a lock."""

    def __init__(
        self,
        unpin: Callable[[Sequence[PinRef]], None],
        held: Callable[[], Sequence[Collection[object]]],
        machine: Machine = REAL,
        *,
        tidy: Callable[[], None] | None = None,
    ) -> None:
        """`held` returns what has not ended, by node, and what else its thread has to `tidy` for
        when the client is closed."""
        self._unpin = unpin
        self._tidy = tidy or self.settle
        self._held = held
        self._machine = machine
        self._pid = os.getpid()
        # A handler of signals may close the client at any moment.
        self._lock = self._machine.lock()
        self._settling = self._machine.lock()
        self.dropped: deque[PinRef] = deque()
        """Of pins that have ended. They leave it once the nodes were told."""
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closing: Scoped[None] = Scoped()
        self._thread: threading.Thread | None = None
        in_each_child(self)

    def hold(self, pin: HeldPin, payload: memoryview) -> Memory:
        """Return all of `payload` as a ctypes array: it keeps the pin as long as anybody holds it,
        or a buffer, array, tensor or slice made of it. `payload` stays mapped as long. Raises
        `NodeUnavailableError` when the client was closed meanwhile, or the node is gone."""
        if not [pins for pins in self._held() if pin.ref in pins]:
            raise NodeUnavailableError("the node that has pinned it is gone")
        memory = (ctypes.c_ubyte * payload.nbytes).from_address(address_of(payload))
        memory.payload = payload  # type: ignore[attr-defined]  # it is kept as long
        memory.pin = pin  # type: ignore[attr-defined]  # so is this
        self.watch()
        weakref.finalize(pin, self._wake_up).atexit = False
        return memory

    def watch(self) -> None:
        """Have a thread that lives as long as anything is held."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # its start was interrupted
                self._thread = threading.Thread(target=self._run, name="kvstore-pins", daemon=True)
                # No more threads: who closes one lets go of all that have ended.
                with contextlib.suppress(RuntimeError):
                    self._thread.start()

    def end(self, pins: Sequence[HeldPin]) -> None:
        """Let these go, whoever still has them."""
        self.dropped.extend([pin.ref for pin in pins])
        self.settle()

    def _wake_up(self) -> None:
        """In whatever thread dropped the last view, at any point of it: take no lock."""
        if not (self._closing.entries and self._closing.in_force()):
            self._wake.put(None)

    def closing(self) -> Giving[None]:
        """Return a context for who lets a pin go and calls `settle` then: no thread is woken."""
        return self._closing.giving(None)

    def settle(self) -> None:
        """Let go what has ended. Never raises for a peer's fault; who is interrupted leaves the
        rest to the next one. A forked child has the views too, but not the pins."""
        if not self.dropped or os.getpid() != self._pid:
            return
        with self._settling:
            ended = list(self.dropped)
            self._unpin(ended)
            for ref in ended:
                with contextlib.suppress(ValueError):  # a handler that closes the client was here
                    self.dropped.remove(ref)

    def _run(self) -> None:
        while True:
            try:
                self._wake.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if not any(self._held()):
                        self._thread = None
                        return
            self._tidy()

    def after_fork_in_child(self) -> None:
        self._lock, self._settling = self._machine.lock(), self._machine.lock()
        self.dropped.clear()
