"""Remembers which chunks one LMCache server has stored: what it counts, lists and deletes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from connector.limits import INVENTORY_KEYS_MAX
from kvstore import UsageError


class ChunkKey(Protocol):
    """The part of any LMCache key that is used here. It is hashable."""

    model_name: str


_Key = TypeVar("_Key", bound=ChunkKey)


class Stored(NamedTuple, Generic[_Key]):
    key: _Key
    size_bytes: int
    number: int
    """Grows with each chunk that is stored."""


class Inventory(Generic[_Key]):
    """Keeps keys and sizes in the order in which they were stored. Thread-safe and bounded.

    The store itself has hashes of keys only and cannot name a chunk, and what other servers have
    stored is theirs to count.
    """

    def __init__(self, most: int = INVENTORY_KEYS_MAX) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._stored: dict[_Key, Stored[_Key]] = {}
        self._number = 0
        self._checked = 0

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, keys: Sequence[_Key], sizes_bytes: Sequence[int]) -> list[Stored[_Key]]:
        """Remember what was stored; returns what is not to be counted any more: former lives of
        the same keys, and the oldest, for which there is no room."""
        dropped: list[Stored[_Key]] = []
        with self._lock:
            for key, size_bytes in zip(keys, sizes_bytes, strict=True):
                former = self._stored.pop(key, None)
                if former is not None:
                    dropped.append(former)
                self._number += 1
                self._stored[key] = Stored(key, size_bytes, self._number)
            while len(self._stored) > self._most:
                dropped.append(self._stored.pop(next(iter(self._stored))))
        return dropped

    def remove(self, chunks: Iterable[Stored[_Key]]) -> list[Stored[_Key]]:
        """Forget these, unless they were stored again meanwhile; returns which were known."""
        with self._lock:
            dropped = [c for c in chunks if self._stored.get(c.key) == c]
            for chunk in dropped:
                del self._stored[chunk.key]
        return dropped

    def of(self, keys: Iterable[_Key]) -> list[Stored[_Key]]:
        """Return what is known of `keys`."""
        with self._lock:
            found = (self._stored.get(key) for key in keys)
            return [chunk for chunk in found if chunk is not None]

    def next_to_check(self, count: int) -> list[Stored[_Key]]:
        """Return the next of all chunks in turn, at most `count` of them and none twice."""
        with self._lock:
            after = [c for c in self._stored.values() if c.number > self._checked][:count]
            if len(after) < count:
                after += [c for c in self._stored.values() if c.number <= self._checked][
                    : count - len(after)
                ]
            self._checked = after[-1].number if after else 0
        return after

    def page(self, model_name: str | None, count: int, cursor: str | None) -> list[Stored[_Key]]:
        """Return the next chunks after `cursor`, oldest first, at most `count`; a cursor is the
        number of the last one seen. Raises `UsageError` for what is no cursor."""
        try:
            after = 0 if cursor is None else int(cursor)
        except ValueError:
            raise UsageError(
                "cursor", cursor, "must be what a former page gave as its next one"
            ) from None
        with self._lock:
            return [
                chunk
                for chunk in self._stored.values()
                if chunk.number > after and model_name in (None, chunk.key.model_name)
            ][:count]
