"""Remembers what users call the keys of their values, for people who look; clients tell it."""

from __future__ import annotations

from kvstore.types import Key


class Names:
    """Names of at most `names_max` blocks that are there; the one told first goes first.

    A key is a hash, so this alone leads back to what it was made of. Nothing depends on it, and
    a restarted node knows none.
    """

    __slots__ = ("_by_key", "_names_max")

    def __init__(self, names_max: int) -> None:
        self._names_max = names_max
        self._by_key: dict[Key, bytes] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def told(self, key: Key, name: bytes) -> None:
        """`key` is the hash of `name`, or so a client says."""
        self._by_key[key] = name
        if len(self._by_key) > self._names_max:
            del self._by_key[next(iter(self._by_key))]

    def get(self, key: Key) -> bytes:
        """What users call that key; empty when nobody has told."""
        return self._by_key.get(key, b"")

    def forget(self, key: Key) -> None:
        """Forget the name of a key whose block is gone."""
        self._by_key.pop(key, None)
