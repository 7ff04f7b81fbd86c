"""Remembers the last keys that left a node, or were never kept, with the reason.

A ring of fixed size with a table beside it: what is noted costs the same for
ever, and the oldest goes first. Only for telling people; nothing is decided by it.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable
from typing import NamedTuple

from kvstore.types import TAG_BYTES, Key

GONE_KEYS_MAX = 1 << 15
"""Departures that a node remembers for `explain`: about 170 bytes each."""
_PREFIX = slice(TAG_BYTES, TAG_BYTES + 8)
"""64 bits of the digest stand for a key. A collision gives a wrong reason, once in 2**48
questions."""


class GoneWhy(enum.IntEnum):
    """Why a key is not here (any more). The numbers are part of the protocol."""

    EVICTED = 2
    DELETED = 3
    CLEARED = 4
    """Its namespace was cleared."""
    ABORTED = 5
    """Its writer gave the slot back unwritten, or lost it with a connection."""
    WRITER_DIED = 6
    REFUSED_SPACE = 7
    """It was never kept: every slot that fits was reserved or pinned."""
    REFUSED_SIZE = 8
    """It was never kept: too large for the node, or its writer holds too many slots."""
    CORRUPT = 9
    """Its bytes did not have the checksum that was saved with them."""
    EXPIRED = 10
    """Its namespace bounds the life of its blocks."""


class Departure(NamedTuple):
    why: GoneWhy
    at: float
    """The time that was given as `now`, in seconds."""


class Departures:
    """Remembers the last `keys_max` departures."""

    __slots__ = ("_at", "_keys", "_next", "_places", "_why", "forgotten")

    def __init__(self, keys_max: int) -> None:
        self._keys: list[bytes] = [b""] * keys_max
        self._at = array("d", bytes(8 * keys_max))
        self._why = bytearray(keys_max)
        self._places: dict[bytes, int] = {}
        """Prefix -> position of its latest departure in the ring."""
        self._next = 0
        self.forgotten = 0
        """Departures that newer ones have overwritten."""

    def __len__(self) -> int:
        return len(self._places)

    def note(self, key: Key, why: GoneWhy, now: float) -> None:
        """Remember that `key` left at `now`, in place of an earlier departure of the same key."""
        self.note_each((key,), why, now)

    def note_each(self, keys: Iterable[Key], why: GoneWhy, now: float) -> None:
        """Note the departure of several blocks, one after the other."""
        ring, places, position = self._keys, self._places, self._next
        for key in keys:
            prefix, old = key[_PREFIX], ring[position]
            if places.get(old) == position:
                del places[old]
                self.forgotten += 1
            ring[position] = prefix
            self._at[position] = now
            self._why[position] = why
            places[prefix] = position
            position = position + 1 if position + 1 < len(ring) else 0
        self._next = position

    def get(self, key: Key) -> Departure | None:
        """Return the latest departure of `key`; None when there was none or it is forgotten."""
        position = self._places.get(key[_PREFIX])
        if position is None:
            return None
        return Departure(GoneWhy(self._why[position]), self._at[position])

    def reaches_back_s(self, now: float) -> float | None:
        """Return the age of the oldest departure that is remembered; None while none was
        forgotten."""
        if not self.forgotten:
            return None
        return max(now - self._at[self._next], 0.0)
