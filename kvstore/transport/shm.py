"""Reading from a node of this host: copies out of its segment, checked after copying (rule 4)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kvstore.nodedir import Announcement
from kvstore.transport.base import Outcome, Read, Wanted, check_wanted
from kvstore.types import Key, Location

NAME = "shm"
CopyOut = Callable[[Key, Location, Sequence[memoryview]], tuple[int, int] | None]
"""Copies one block out of a segment: its kind and meta length, None when it is not there or was
changed meanwhile (`kvstore.segment.locate.copy_out`)."""
_MISS = Outcome(Read.MISS, "the node does not have it (any more)")


class ShmTransport:
    """Implements `Transport` over the segments that `attach` finds; None: not on this host."""

    name = NAME

    def __init__(self, attach: Callable[[Announcement], CopyOut | None]) -> None:
        self._attach = attach
        self._closed = False

    def submit(self, node: Announcement, wanted: Sequence[Wanted], deadline: float) -> ShmTransfer:
        """See `Transport.submit`."""
        check_wanted(wanted)
        return ShmTransfer(
            None if self._closed else self._attach(node), node.epoch, wanted, deadline
        )

    def close(self) -> None:
        """See `Transport.close`; the segments are whoever's that gave them."""
        self._closed = True


class ShmTransfer:
    """Implements `Transfer`: a poll copies one block."""

    def __init__(
        self, copy_out: CopyOut | None, epoch: int, wanted: Sequence[Wanted], deadline: float
    ) -> None:
        self._copy_out = copy_out
        self._epoch = epoch
        self._wanted = wanted
        self._deadline = deadline
        self._lock = threading.Lock()
        self._outcomes: list[Outcome] = []
        if copy_out is None:
            self._end("the node is not on this host (any more)")

    def poll(self) -> bool:
        """See `Transfer.poll`."""
        if not self._done and self._lock.acquire(blocking=False):
            try:
                self._step()
            finally:
                self._lock.release()
        return self._done

    def wait(self) -> Sequence[Outcome]:
        """See `Transfer.wait`."""
        with self._lock:
            while not self._done:
                self._step()
        return self._outcomes

    def cancel(self) -> None:
        """See `Transfer.cancel`."""
        with self._lock:
            self._end("cancelled")

    @property
    def _done(self) -> bool:
        return len(self._outcomes) == len(self._wanted)

    def _step(self) -> None:
        if self._done:
            return
        if time.monotonic() >= self._deadline:
            self._end("too late")
            return
        self._outcomes.append(self._read(self._wanted[len(self._outcomes)]))

    def _read(self, wanted: Wanted) -> Outcome:
        assert self._copy_out is not None
        if wanted.location.epoch != self._epoch:
            return _MISS
        seen = self._copy_out(wanted.key, wanted.location, wanted.into)
        return _MISS if seen is None else Outcome(Read.HIT, "", *seen)

    def _end(self, reason: str) -> None:
        left = len(self._wanted) - len(self._outcomes)
        self._outcomes += [Outcome(Read.FAILED, reason)] * left
