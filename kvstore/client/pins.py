"""Ends each pin of a client with the last view of its memory, whoever holds that."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from operator import itemgetter

from kvstore.machine import REAL, Machine
from kvstore.system.fork import in_each_child
from kvstore.system.memory_files import address_of
from kvstore.types import Key

IDLE_S = 1.0
"""How long the thread waits for a further pin after the last has ended."""

Pin = tuple[Key, bytes]
"""A key and the record that the node gave for it."""
Memory = ctypes.Array[ctypes.c_ubyte]
"""All of a pinned payload."""


class Pins:
    """Keeps each pin of a client until nobody holds its memory any more. Thread-safe.

    `unpin` takes off its argument the pins that it has let go, which have ended. It is called by
    who closes one or by a thread of its own: never by the garbage collector, which may run inside
    a lock."""

    def __init__(self, unpin: Callable[[deque[Pin]], None], machine: Machine = REAL) -> None:
        self._unpin = unpin
        self._machine = machine
        self._pid = os.getpid()
        # A handler of signals may close the client at any moment.
        self._lock = self._machine.lock()
        self._settling = self._machine.lock()
        self._held: dict[int, tuple[weakref.ref[Memory], Pin]] = {}
        """By the id of the reference."""
        self._dropped: deque[weakref.ref[Memory]] = deque()
        self._ended: deque[Pin] = deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closing = threading.local()
        self._thread: threading.Thread | None = None
        in_each_child(self)

    def hold(self, pin: Pin, payload: memoryview) -> Memory:
        """Return all of `payload` as a ctypes array: the pin ends when nobody holds it, or a
        buffer, array, tensor or slice made of it. `payload` stays mapped as long."""
        memory = (ctypes.c_ubyte * payload.nbytes).from_address(address_of(payload))
        memory.payload = payload  # type: ignore[attr-defined]  # it is kept as long
        with self._lock:
            # A function of C: what a handler of signals raises in another would be lost, and with
            # it the pin.
            dropped = weakref.ref(memory, self._dropped.append)
            self._held[id(dropped)] = dropped, pin
            if self._thread is None or not self._thread.is_alive():  # its start was interrupted
                self._thread = threading.Thread(target=self._run, name="kvstore-pins", daemon=True)
                # No more threads: who closes one lets go of all that have ended.
                with contextlib.suppress(RuntimeError):
                    self._thread.start()
        weakref.finalize(memory, self._wake_up).atexit = False
        return memory

    def _wake_up(self) -> None:
        """In whatever thread dropped the last view, at any point of it: take no lock."""
        if not getattr(self._closing, "here", False):
            self._wake.put(None)

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Tell the node at the end of this block which pins ended in it, if it can be reached."""
        self._closing.here = True
        try:
            yield
        finally:
            self._closing.here = False
            self.settle()

    def settle(self) -> None:
        """Let go what has ended. Never raises for a peer's fault; who is interrupted leaves the
        rest to the next one. A forked child has the views too, but not the pins."""
        if os.getpid() != self._pid:
            return
        with self._settling:
            with contextlib.suppress(IndexError):  # none is left; all is one step, as in link.py
                dropped = map(self._held.pop, map(id, iter(self._dropped.popleft, None)))
                self._ended.extend(map(itemgetter(1), dropped))
            if self._ended:
                self._unpin(self._ended)

    def _run(self) -> None:
        while True:
            try:
                self._wake.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if not self._held and not self._ended:
                        self._thread = None
                        return
            self.settle()

    def after_fork_in_child(self) -> None:
        self._lock, self._settling = self._machine.lock(), self._machine.lock()
        self._dropped.clear()
        self._ended.clear()
