"""Limits connections of other users that have not said HELLO yet.

A member of the group that opens one connection after the other must not take the file
descriptors that the node's own clients need.
"""

from __future__ import annotations

from typing import Protocol

UNHEARD_MAX = 32
UNHEARD_PER_USER_MAX = 8


class Unheard(Protocol):
    """A connection that has not said HELLO yet."""

    def peer_uid(self) -> int: ...

    def hang_up(self) -> None: ...


class UnheardReaders:
    """The connections of other users to one node that have not said HELLO. Not thread-safe."""

    def __init__(self) -> None:
        self._users: dict[Unheard, int] = {}
        """In the order in which they came."""

    def enter(self, connection: Unheard) -> None:
        """Let a connection in. Where there is no room, the one that came first is hung up on: of
        the same user, if that has its share, else of all."""
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
        """Forget a connection that has said HELLO, or is gone."""
        self._users.pop(connection, None)
