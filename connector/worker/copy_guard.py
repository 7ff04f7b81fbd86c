"""Lets another thread end a transfer without a race against its copies."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore import InternalError


class CopyGuard:
    """Lets the copying thread in until somebody ends the transfer; then never again.

    The engine reuses blocks as soon as a transfer is reported ended. So whoever
    reports must first know that no copy is running and that none will start.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = False

    @property
    def ended(self) -> bool:
        return self._ended

    def enter(self) -> bool:
        """Hold off `try_end` until `leave`; False when the transfer has ended."""
        self._lock.acquire()
        return not self._ended

    def leave(self) -> None:
        self._lock.release()

    @contextmanager
    def copying(self) -> Iterator[bool]:
        """`enter`, and `leave` in the end."""
        with self._lock:
            yield not self._ended

    def try_end(self) -> bool:
        """End the transfer unless a copy is running right now; never waits."""
        if not self._lock.acquire(blocking=False):
            return False
        self._ended = True
        self._lock.release()
        return True

    def end(self, timeout_s: float) -> None:
        """End the transfer after the copy that is running, if any.

        Raises `InternalError` when that copy goes on for longer than `timeout_s`:
        the blocks can then neither be used nor given back.
        """
        if not self._lock.acquire(timeout=timeout_s):
            raise InternalError(f"a copy of the engine's blocks did not end within {timeout_s:g} s")
        self._ended = True
        self._lock.release()
