"""Chooses which connection is closed when more come than there is room for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
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

    def enter(self, member: Member, owner: Hashable, most: int) -> Member | None:
        """Let `member` in. Return the one to be closed where there are more than `most` then."""
        self._owners[member] = owner
        return self.pick() if len(self._owners) > most else None

    def leave(self, member: Member) -> bool:
        """Forget `member`; whether it was there."""
        return self._owners.pop(member, None) is not None

    def pick(self) -> Member | None:
        """Take out the member that came first of the owner who has most: whoever opens many pushes
        out their own. None when there is none."""
        for most_of_all, _ in Counter(self._owners.values()).most_common(1):
            picked = next(one for one, owner in self._owners.items() if owner == most_of_all)
            del self._owners[picked]
            return picked
        return None
