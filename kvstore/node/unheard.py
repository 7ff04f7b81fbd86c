"""Limits connections of other users that have not said HELLO yet: a member of the group that opens
one after the other must not take the file descriptors that the node's own clients need."""

from __future__ import annotations

from typing import Protocol

UNHEARD_MAX = 32
UNHEARD_PER_USER_MAX = 8


class Unheard(Protocol):
    """One of these connections."""

    def peer_uid(self) -> int: ...

    def hang_up(self) -> None: ...


class UnheardReaders:
    """Those of one node. Not thread-safe."""

    def __init__(self) -> None:
        self._users: dict[Unheard, int] = {}
        """In the order in which they came."""

    def enter(self, connection: Unheard) -> None:
        """For it goes who has been here for longest, of the same user where that has its share."""
        uid = connection.peer_uid()
        same = [one for one, user in self._users.items() if user == uid]
        longest = None
        if len(same) >= UNHEARD_PER_USER_MAX:
            longest = same[0]
        elif len(self._users) >= UNHEARD_MAX:
            longest = next(iter(self._users))
        if longest is not None:
            self.leave(longest)
            longest.hang_up()
        self._users[connection] = uid

    def leave(self, connection: Unheard) -> None:
        """It has said HELLO, or is gone."""
        self._users.pop(connection, None)
