"""Chooses which connection is closed when more come than there is room for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from math import inf
from typing import Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)


class Waiting(Generic[Member]):
    """Holds connections that have not shown yet what they are for, in the order in which they came.
    Each has an owner: an address, or a user. Not thread-safe."""

    def __init__(self) -> None:
        self._owners: dict[Member, Hashable] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._owners)

    def enter(self, member: Member, owner: Hashable, most: float = inf) -> Member | None:
        """Let `member` in. Return the one to be closed where there are more than `most` then: it
        is in here no longer."""
        self._owners[member] = owner
        goes = self.next() if len(self._owners) > most else None
        if goes is not None:
            del self._owners[goes]
        return goes

    def leave(self, member: Member) -> bool:
        """Forget `member`. Return whether it was there."""
        return self._owners.pop(member, None) is not None

    def next(self) -> Member | None:
        """Return the connection to close next, None when there is none: the oldest of the owner
        with most connections. Whoever opens many thus closes their own."""
        for crowd, _ in Counter(self._owners.values()).most_common(1):
            return next(one for one, owner in self._owners.items() if owner == crowd)
        return None
