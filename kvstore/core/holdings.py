"""Keeps the account of what each client of a node holds: reservations and pins."""

from __future__ import annotations

from kvstore.core.memory.slots import Slot

FORMER = -1
"""Session number of all clients of former starts of a node together, because who of them held what
died with the node. It ends when the last of them is known to be gone (rule 5)."""
TRIAL = -2
"""Session number of the node itself while it tries a slot."""


class Session:
    """What one client has reserved and pinned."""

    __slots__ = ("pins", "reserved")

    def __init__(self) -> None:
        self.reserved: dict[int, Slot] = {}
        self.pins: dict[int, int] = {}
