"""Runs a thread that handles what it is given, one after another, until it is told to end."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(f"kvstore.{__name__}")

T = TypeVar("T")


class WorkThread(Generic[T]):
    """Handles items in the order in which they were put; one that raises costs only itself.

    The queue is a simple one: where an engine's thread puts, another kind costs it a tenth more.
    """

    def __init__(self, name: str, handle: Callable[[T], None], items_max: int) -> None:
        """`handle` is called with each item, of which at most about `items_max` wait; the thread
        runs from `start` on."""
        self._handle = handle
        self.items_max = items_max
        self._items: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._first: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, first: Callable[[], None] | None = None) -> None:
        """Begin, with `first` if there is one; it must not raise."""
        self._first = first or self._first
        self._thread.start()

    @property
    def full(self) -> bool:
        """Return whether one more item would be refused now."""
        return self._items.qsize() >= self.items_max

    def put(self, item: T) -> bool:
        """Queue an item; False when too many wait already. Never waits."""
        if self.full:
            return False
        self._items.put(item)
        return True

    def next_waiting(self) -> T | None:
        """Give `handle` one more item to handle with its own; None when no other waits."""
        try:
            item = self._items.get_nowait()
        except queue.Empty:
            return None
        if item is None:
            self._items.put(None)
        return item

    def end(self) -> None:
        """Tell the thread to end after what waits in its queue. Returns at once."""
        self._items.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended. Return whether it has. True where it never began."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._first()
        while (item := self._items.get()) is not None:
            try:
                self._handle(item)
            except Exception:
                log.exception("%s: something was not done", self._thread.name)
