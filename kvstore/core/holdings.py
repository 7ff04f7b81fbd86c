"""What the clients of a node hold."""

from __future__ import annotations

from kvstore.core.slots import Slot


class Session:
    """What one client holds."""

    __slots__ = ("pins", "reserved")

    def __init__(self) -> None:
        self.reserved: dict[int, Slot] = {}
        self.pins: dict[int, int] = {}
