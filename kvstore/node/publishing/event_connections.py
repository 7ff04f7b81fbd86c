"""Knows the connection by which a question to a ZeroMQ socket came, and whether it is still there.

ZeroMQ names a listener, and does not say when it is gone; but a message tells the descriptor it was
read from. That may be closed by now and stand for something else, so it counts only together with
the number that the kernel gave to what it stood for.
"""

from __future__ import annotations

import os


class ListenerConnection:
    """What a descriptor stands for now; `None` where it is not known, which is never gone."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._identity = None if fd is None else _identity(fd)

    @property
    def gone(self) -> bool:
        """Whether it was closed."""
        if self._fd is None:
            return False
        return self._identity is None or self._identity != _identity(self._fd)


def _identity(fd: int) -> tuple[int, int] | None:
    """What the kernel calls what is open under that number; `None` if nothing is."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino
