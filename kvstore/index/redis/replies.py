"""Decodes Redis' replies: a value, or the error that stands in its place."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.errors import IndexUnavailableError
from kvstore.index.base import Record
from kvstore.index.redis.connection import ErrorReply, LostReply, Reply, refused

_RECORD_TYPES: tuple[set[type], ...] = (
    {bytes},
    {type(None)},
    {bytes, type(None)},
    set(),
)


class Replies:
    """Decodes the replies of the Redis that messages call `label`; calls `mistaken` when it is not
    the server for us (READONLY)."""

    def __init__(self, label: str, mistaken: Callable[[], None]) -> None:
        self._label = label
        self._mistaken = mistaken

    def value(self, reply: Reply) -> Reply:
        """Return `reply` itself; raise `IndexUnavailableError` for a lost one and for an error."""
        if isinstance(reply, LostReply):
            raise reply.why
        if not isinstance(reply, ErrorReply):
            return reply
        if str(reply).startswith(("READONLY", "MASTERDOWN", "LOADING")):
            self._mistaken()
        raise refused(self._label, reply)

    def number(self, reply: Reply) -> int:
        """Return the number in `reply`; 0 from a shard that is away: what it holds is stale, a
        miss."""
        if isinstance(reply, LostReply):
            return 0
        value = self.value(reply)
        if not isinstance(value, int):
            raise self.surprised(value)
        return value

    def records(self, reply: Reply, size: int) -> list[Record | None]:
        """Return the records of `size` keys; None for those that are not there or whose shard is
        away."""
        if isinstance(reply, LostReply):
            return [None] * size
        if type(reply) is not list or len(reply) != size:
            raise self.surprised(self.value(reply))
        if set(map(type, reply)) not in _RECORD_TYPES:
            raise self.surprised(reply)
        return reply

    def surprised(self, reply: Reply) -> IndexUnavailableError:
        return IndexUnavailableError(f"Redis at {self._label}: invalid reply {str(reply)[:80]!r}")


def banned(reply: Reply) -> bool:
    """Return whether this user may not use the command, or the server does not know it."""
    if not isinstance(reply, ErrorReply):
        return False
    text = str(reply)
    return text.startswith(("NOPERM", "ERR unknown command"))


def full(reply: Reply) -> bool:
    return isinstance(reply, ErrorReply) and str(reply).startswith("OOM")


def no_script(reply: Reply) -> bool:
    return isinstance(reply, ErrorReply) and str(reply).startswith("NOSCRIPT")
