"""Values that a function gives to all that it calls, and to nothing afterwards.

A handler of signals that raises (Ctrl-C) can keep a `with` from leaving, and whoever keeps its
traceback keeps all that it has. So a value knows the frame of its function, and counts only as long
as that is on the stack of its thread.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Generic, TypeVar

T = TypeVar("T")


class Scoped(threading.local, Generic[T]):
    """The values of one kind, of each thread its own."""

    def __init__(self) -> None:
        self.entries: list[Giving[T]] = []
        """Those that were entered, whether they count or not. Mostly none: who is on the path of
        each call looks here first."""

    def giving(self, value: T) -> Giving[T]:
        """Return a context in which the value counts. A generator must not yield in it."""
        return Giving(self, value)

    def in_force(self) -> list[T]:
        """Return the values of the functions that run in this thread, the innermost last."""
        frame: FrameType | None = sys._getframe(1)
        running: set[FrameType] = set()
        while frame is not None:
            running.add(frame)
            frame = frame.f_back
        self.entries = [one for one in self.entries if one.frame in running]
        return [one.value for one in self.entries]


class Giving(Generic[T]):
    """A context of `Scoped`."""

    def __init__(self, scoped: Scoped[T], value: T) -> None:
        """Use `Scoped.giving`."""
        self._scoped = scoped
        self.value = value
        self.frame: FrameType | None = None

    def __enter__(self) -> None:
        self.frame = sys._getframe(1)
        self._scoped.entries.append(self)

    def __exit__(self, *exc: object) -> None:
        self._scoped.entries = [one for one in self._scoped.entries if one is not self]
        self.frame = None
