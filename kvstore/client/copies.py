"""Bounds what copies of other users' values take of this process's memory.

What lies in the memory of another user's node is not mapped (segment/unmapped.py): a pin of it, and
a view, is a copy, of a length that its owner says.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Protocol

from kvstore.limits import ANOTHERS_BYTES_MAX


class Lasting(Protocol):
    """Says when it is gone, with all views of it."""

    def when_gone(self, call: Callable[..., object], *args: object) -> None: ...


class _Room(bytearray):
    """Is a bytearray of which can be told when nobody has it, nor any view of it, any more."""


class Copies:
    """The open copies of one client, pins and views, which share `ANOTHERS_BYTES_MAX`.

    Thread-safe, without a lock: a handler of signals may pin too.
    """

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}
        self._claims = itertools.count(1)

    def claim(self) -> int:
        """Return the number of a copy that may be made."""
        return next(self._claims)

    def take(self, claim: int, size_bytes: int) -> bool:
        """Take room for a copy, for `keep` or `release`; whether there is any left."""
        self._bytes[claim] = size_bytes  # first: of two at once rather none than both
        if sum(list(self._bytes.values())) <= ANOTHERS_BYTES_MAX:
            return True
        self.release(claim)
        return False

    def keep(self, claim: int, pinned: Lasting) -> None:
        """Count it, if it was made, as long as anybody has `pinned` or a view of it."""
        if claim in self._bytes:
            # The collector may run inside a lock: what it calls takes none.
            pinned.when_gone(self._bytes.pop, claim, None)

    def release(self, claim: int) -> None:
        self._bytes.pop(claim, None)

    def room(self, size_bytes: int) -> memoryview | None:
        """Return memory for a copy, counted as long as anybody has a view of it; None when there is
        no room left."""
        claim = self.claim()
        try:
            if not self.take(claim, size_bytes):
                return None
            room = _Room(size_bytes)
            weakref.finalize(room, self._bytes.pop, claim, None).atexit = False
        except BaseException:  # interrupted, or no memory: nobody has it
            self.release(claim)
            raise
        return memoryview(room)
