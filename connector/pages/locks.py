"""Pins blocks that an engine has locked, until it unlocks them or their time is over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from connector.limits import LOCK_TIMEOUT_S, LOCKED_KEYS_MAX, Clock
from kvstore import BlockRef, BlockStore, Key, PeerError


@dataclass(slots=True)
class _Lock:
    found: BlockRef
    count: int
    ends_at: float


class Locks:
    """Counts locks by key over a store's pins. Used by one thread.

    One pin holds a block however often it is locked. A lock that is not given
    back within `timeout_s` of the last lookup that took it is over: an engine
    that forgets one must not take the node's memory for good. What was locked
    then may be loaded still; it is only no longer certain to be there.
    """

    def __init__(
        self,
        store: BlockStore,
        *,
        most: int = LOCKED_KEYS_MAX,
        timeout_s: float = LOCK_TIMEOUT_S,
        clock: Clock = time.monotonic,
    ) -> None:
        self._store = store
        self._most = most
        self._timeout_s = timeout_s
        self._clock = clock
        self._locks: dict[Key, _Lock] = {}  # in the order in which they end

    def __len__(self) -> int:
        return len(self._locks)

    def lock(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each block is on the local node and locked now; at most one request.

        Never raises for a peer's fault. Beyond the number of locks there may be,
        and with a node that does not answer, nothing more is found.
        """
        self.expire()
        fresh = list(dict.fromkeys(key for key in keys if key not in self._locks))
        fresh = fresh[: max(0, self._most - len(self._locks))]
        pinned = self._pin(fresh)
        ends_at = self._clock() + self._timeout_s
        for key, found in zip(fresh, pinned, strict=True):
            if found is not None:
                self._locks[key] = _Lock(found, 0, ends_at)
        locked: list[bool] = []
        for key in keys:
            lock = self._locks.pop(key, None)
            if lock is not None:
                lock.count += 1
                lock.ends_at = ends_at
                self._locks[key] = lock
            locked.append(lock is not None)
        return locked

    def unlock(self, keys: Sequence[Key]) -> None:
        """Give each lock back once; a key that is not locked (any more) is passed over."""
        ended: list[BlockRef] = []
        for key in keys:
            lock = self._locks.get(key)
            if lock is None:
                continue
            lock.count -= 1
            if lock.count <= 0:
                ended.append(self._locks.pop(key).found)
        self._unpin(ended)

    def lost(self, key: Key) -> None:
        """Note that the block could not be read where it is locked: who looks it up next hears of
        it. A block that somebody always holds a lock of would else be found, and not read, for
        ever."""
        lock = self._locks.pop(key, None)
        if lock is not None:
            self._unpin([lock.found])

    def borrow(self, keys: Sequence[Key]) -> tuple[list[BlockRef | None], list[BlockRef]]:
        """Where each block is, and what of it to give to `give_back` after reading.

        What is not locked is pinned for the moment, so that a load that was
        never looked up works too.
        """
        unlocked = list(dict.fromkeys(key for key in keys if key not in self._locks))
        borrowed = [found for found in self._pin(unlocked) if found is not None]
        there = {found.key: found for found in borrowed}
        where = [self._locks[key].found if key in self._locks else there.get(key) for key in keys]
        return where, borrowed

    def give_back(self, borrowed: Sequence[BlockRef]) -> None:
        self._unpin(borrowed)

    def expire(self) -> None:
        """End the locks whose time is over."""
        now = self._clock()
        ended: list[BlockRef] = []
        while self._locks:
            key, lock = next(iter(self._locks.items()))
            if lock.ends_at > now:
                break
            ended.append(self._locks.pop(key).found)
        self._unpin(ended)

    def close(self) -> None:
        """End all locks."""
        ended = [lock.found for lock in self._locks.values()]
        self._locks.clear()
        self._unpin(ended)

    def _pin(self, keys: Sequence[Key]) -> list[BlockRef | None]:
        if not keys:
            return []
        try:
            return self._store.pin(keys)
        except PeerError:
            return [None] * len(keys)

    def _unpin(self, found: Sequence[BlockRef]) -> None:
        if found:
            self._store.unpin(found)
