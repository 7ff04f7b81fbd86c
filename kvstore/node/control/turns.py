"""Divides a node's thread among connections with much work: a turn of bounded work each, in a row.

Work is counted in items: a block that a request names is one, the request itself
`MESSAGE_ITEMS`. What is small is carried out as it comes (control_server.py); whoever has
sent more stands here. Between two turns the loop reads what has come from others, so a small
request waits for one turn and not for a message of thousands of keys, and the large ones of
several clients go on side by side. Who took more than a turn's work at once, because it could not
be cut, is passed over until that is made up for (deficit round robin).

The thread of the node's event loop alone uses this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

MESSAGE_ITEMS = 8
"""Cost of a message besides its blocks: it is read, decoded and answered."""
TURN_ITEMS = 256
"""Work of one turn: 0.1 to 1 ms, 8 ms where each block needs another evicted. Half of it costs
large requests a tenth more: each turn is a look at all sockets."""
AT_ONCE_ITEMS = 64
"""Items of one connection that are carried out as they come, before any turn: requests for a few
blocks."""


class Loop(Protocol):
    """Calls back, as asyncio's event loop does."""

    def call_later(self, delay_s: float, call: Callable[[], None]) -> object: ...


class Turns:
    """Connections that wait for their turns."""

    turn_items = TURN_ITEMS
    at_once_items = AT_ONCE_ITEMS

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waiting: deque[Callable[[], bool]] = deque()

    def enter(self, turn: Callable[[], bool]) -> None:
        """Have `turn` called in turn with the others, as long as it says that there is more."""
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            self._soon()

    def _soon(self) -> None:
        # By a timer: those come behind what the loop has just read, calls that are made soon
        # before it.
        self._loop.call_later(0.0, self._next)

    def _next(self) -> None:
        turn = self._waiting[0]
        more = False
        try:
            more = turn()
        finally:
            self._waiting.popleft()
            if more:
                self._waiting.append(turn)
            if self._waiting:
                self._soon()
