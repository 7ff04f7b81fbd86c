"""Keeps the resets of namespaces that a node knows of, and compares them with what others know.

A reset is a number and the namespaces whose blocks it drops. A node that hears of one it
does not know drops them once and knows it from then on; it never forgets one that others
may still come to tell of. docs/decisions/0029-reset.md has the whole protocol.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable

from kvstore.limits import RESET_NAMESPACES_MAX, RESETS_IDS_MAX

EVERYTHING: tuple[int, ...] = ()
"""Namespaces of a reset that drops all blocks."""
RANDOM_BITS = 20
"""Low bits of a number that are random; above them is the time in milliseconds."""
TOLD_MAX = 1 << 62
"""The largest number that is believed from others, that of a time in 2109: a number is 64 bits, and
the next reset needs a larger one."""
_HEAD = struct.Struct("<QH")


class Resets:
    """Numbers of resets with their namespaces: the largest numbers, as many as find room."""

    __slots__ = ("_known", "floor")

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, ...]] = {}
        self.floor = 0
        """No number up to this one is known any more, or ever taken again."""

    def __contains__(self, number: int) -> bool:
        return number in self._known

    def __len__(self) -> int:
        return len(self._known)

    @property
    def newest(self) -> int:
        """Return the largest number that is or was known."""
        return max(self.floor, max(self._known, default=0))

    def knows(self, number: int) -> bool:
        """Return whether that reset was carried out here, or is older than those that were
        forgotten."""
        return number in self._known or number <= self.floor

    def add(self, number: int, namespace_ids: Iterable[int]) -> bool:
        """Remember a reset from here on; False when it was known, or is older than those that were
        forgotten."""
        if self.knows(number):
            return False
        self._known[number] = tuple(sorted(set(namespace_ids)))
        while sum(map(_room, self._known.values())) > RESETS_IDS_MAX and len(self._known) > 1:
            self.floor = min(self._known)
            del self._known[self.floor]
        return True

    def next_number(self, wanted: int) -> int:
        """Return `wanted`, or a number with the same low bits that is larger than all known here.

        The low bits are random, so that nodes whose clocks are behind do not choose the same
        number.
        """
        if wanted > self.newest:
            return wanted
        return (self.newest >> RANDOM_BITS) + 1 << RANDOM_BITS | wanted & (1 << RANDOM_BITS) - 1

    def news(self, theirs: Resets) -> list[tuple[int, tuple[int, ...]]]:
        """Return the resets in `theirs` that are not known here, the oldest first.

        A node that has forgotten resets that are not known here may have forgotten any: then
        everything is dropped.
        """
        fresh = sorted((n, ids) for n, ids in theirs._known.items() if n not in self._known)
        fresh = [one for one in fresh if self.floor < one[0] <= TOLD_MAX]
        if TOLD_MAX >= theirs.floor > self.newest:
            return [(theirs.floor, EVERYTHING), *fresh]
        return fresh

    def pack(self) -> str:
        """Return the resets as text (base64), for an announcement or a file."""
        raw = struct.pack("<Q", self.floor) + b"".join(
            _HEAD.pack(number, len(ids)) + struct.pack(f"<{len(ids)}I", *ids)
            for number, ids in sorted(self._known.items())
        )
        return base64.b64encode(raw).decode() if self._known or self.floor else ""

    @classmethod
    def unpack(cls, text: str) -> Resets:
        """Return the resets that `pack` wrote; none where the text is damaged."""
        found = cls()
        try:
            raw = base64.b64decode(text, validate=True)
            (found.floor,) = struct.unpack_from("<Q", raw)
            at = 8
            while at < len(raw):
                number, count = _HEAD.unpack_from(raw, at)
                at += _HEAD.size
                if count > RESET_NAMESPACES_MAX:
                    return cls()
                found._known[number] = struct.unpack_from(f"<{count}I", raw, at)
                at += 4 * count
        except (ValueError, struct.error):
            return cls()
        return found


def _room(namespace_ids: tuple[int, ...]) -> int:
    """Return the room that a reset takes in `RESETS_IDS_MAX`: its ids, and about three more for its
    number."""
    return len(namespace_ids) + 3
