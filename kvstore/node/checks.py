"""Checks blocks whose bytes a client reported as wrong, in turns with the requests of clients.

How many bytes a second are looked at is the core's to decide (core/node.py); here they are cut
into turns, so that nobody waits for a gigabyte. A block that was moved or dropped meanwhile has
another generation, and what was found of it says nothing.

The thread of the node's event loop alone uses this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kvstore.core.events import CheckSlot
from kvstore.limits import BATCH_KEYS_MAX
from kvstore.node.control.turns import Turns

STEP_BYTES = 4 << 20
"""Bytes checked in one turn: about 0.5 ms."""
WAITING_MAX = BATCH_KEYS_MAX
"""Blocks that wait to be checked. A further one is not checked; its next reader reports it
again."""


class Checked(Protocol):
    """The part of a segment that `Checks` needs."""

    def checksum_steps(self, offset: int, length: int, step_bytes: int) -> Iterator[int | None]: ...


class Checks:
    """The blocks of one node that are to be checked."""

    def __init__(
        self, segment: Checked, turns: Turns, damaged: Callable[[CheckSlot], None]
    ) -> None:
        self._segment = segment
        self._turns = turns
        self._damaged = damaged
        self._waiting: deque[CheckSlot] = deque()
        self._steps: Iterator[int | None] | None = None
        """The remaining steps of the first of them."""

    def add(self, checks: Sequence[CheckSlot]) -> None:
        """Have these looked at, one after the other."""
        begins = not self._waiting
        self._waiting.extend(checks[: WAITING_MAX - len(self._waiting)])
        if begins and self._waiting:
            self._turns.enter(self._turn)

    def _turn(self) -> bool:
        """Look at up to `STEP_BYTES`. Return whether there is more."""
        left_bytes = STEP_BYTES
        while self._waiting and left_bytes > 0:
            check = self._waiting[0]
            if self._steps is None:
                where = check.offset, check.length
                self._steps = self._segment.checksum_steps(*where, STEP_BYTES)
            seen = next(self._steps)
            left_bytes -= min(check.length, STEP_BYTES)
            if seen is not None:
                self._waiting.popleft()
                self._steps = None
                if seen != check.checksum:
                    self._damaged(check)
        return bool(self._waiting)

    def stop(self) -> None:
        """Look at nothing any more: the segment is closed."""
        self._waiting.clear()
        self._steps = None
