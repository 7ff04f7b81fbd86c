"""Lets another thread end a transfer without a race against its copies."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from connector.limits import COPY_STUCK_S
from kvstore import InternalError


class CopyGuard:
    """Lets the copying thread in until somebody ends the transfer; then never again.

    The engine reuses blocks as soon as a transfer is reported ended. So whoever
    reports must first know that no copy is running and that none will start.
    """

    def __init__(self) -> None:
        # It knows whose it is, so that a handler of signals can raise at any moment.
        self._lock = threading.RLock()
        self._ended = False
        self._began: float | None = None
        """Time at which the running copy began (`time.monotonic`)."""
        self._logged = False

    @property
    def ended(self) -> bool:
        return self._ended

    @contextmanager
    def copying(self) -> Iterator[bool]:
        """Hold off `try_end` in here; False when the transfer has ended."""
        try:
            self._lock.acquire()
            self._began, self._logged = time.monotonic(), False
            yield not self._ended
        finally:
            self._began = None
            with suppress(RuntimeError):  # it was never got
                self._lock.release()

    def stuck_s(self) -> float:
        """Return for how many seconds a copy has been under way, once for each copy and only when
        that is more than `COPY_STUCK_S`; 0 otherwise. Never waits."""
        began = self._began
        took_s = 0.0 if began is None else time.monotonic() - began
        if took_s <= COPY_STUCK_S or self._logged:
            return 0.0
        self._logged = True
        return took_s

    def try_end(self) -> bool:
        """End the transfer unless a copy is running right now; never waits."""
        return self._end(0.0)

    def end(self, timeout_s: float) -> None:
        """End the transfer after the copy that is running, if any.

        Raises `InternalError` when that copy goes on for longer than `timeout_s`:
        the blocks can then neither be used nor given back.
        """
        if not self._end(timeout_s):
            raise InternalError(f"a copy of the engine's blocks did not end within {timeout_s:g} s")

    def _end(self, timeout_s: float) -> bool:
        if self._lock._is_owned():  # type: ignore[attr-defined]  # in a handler amid the copy
            return False
        try:
            if not self._lock.acquire(timeout=timeout_s):
                return False
            self._ended = True
            return True
        finally:
            with suppress(RuntimeError):  # it was never got
                self._lock.release()
