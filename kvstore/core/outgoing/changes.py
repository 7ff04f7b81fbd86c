"""Keeps which blocks came and went since the last look, for reports to others.

Only what is left of it counts: a block that came and went again in between, or went and came
back, has not changed. So a block that moves within its segment is never told, and whoever adds up
all changes has exactly the blocks that are SEALED.
"""

from __future__ import annotations

from typing import NamedTuple

from kvstore.types import Key


class NetChanges(NamedTuple):
    """Blocks that came and blocks that left since the last look; false when there are none of
    either."""

    stored: list[Key]
    removed: list[Key]

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed)


class Changes:
    """What changed since the last `take`. At most as many entries as there have been blocks."""

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending: dict[Key, bool] = {}
        """Key -> True if it was not there at the last look and is now; False if it was there and
        left."""

    def __bool__(self) -> bool:
        return bool(self._pending)

    def stored(self, key: Key) -> None:
        if self._pending.pop(key, None) is None:
            self._pending[key] = True

    def removed(self, key: Key) -> None:
        if self._pending.pop(key, None) is None:
            self._pending[key] = False

    def take(self) -> NetChanges:
        """Return what changed, and begin anew."""
        pending, self._pending = self._pending, {}
        return NetChanges(
            [key for key, there in pending.items() if there],
            [key for key, there in pending.items() if not there],
        )
