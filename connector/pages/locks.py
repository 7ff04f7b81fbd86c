"""Pins blocks that an engine has locked, until it unlocks them or their time is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from connector.limits import LOCK_TIMEOUT_S, LOCKED_KEYS_MAX, Clock
from kvstore import PeerError
from kvstore.spi import BlockRef, BlockStore, Key


@dataclass(slots=True)
class _Lock:
    found: BlockRef
    pinned: bool
    """Whether it is on a node of this host and stays there; a block of another host may leave
    it."""
    count: int
    ends_at: float


class Locks:
    """Counts locks by key over a store's pins. Thread-safe; no lock of ours is held while a peer is
    asked.

    One pin holds a block however often it is locked. A lock that is not given
    back within `timeout_s` of the last lookup that took it is over: an engine
    that forgets one must not take the node's memory for good. What was locked
    then may be loaded still; it is only no longer certain to be there. Nor is a
    block of another host: no client may pin there, so its lock is the place where
    it was found.
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
        self._lock = threading.Lock()
        self._locks: dict[Key, _Lock] = {}  # in the order in which they end

    def __len__(self) -> int:
        return len(self._locks)

    def __contains__(self, key: Key) -> bool:
        return key in self._locks

    def lock(self, keys: Sequence[Key]) -> list[bool]:
        """Return whether each block is in the store and locked now.

        At most one request to the nodes of this host, and one to the index for what they do not
        have. Never raises for a peer's fault. Beyond the number of locks there may be, and with
        peers that do not answer, nothing more is found.
        """
        self.expire()
        with self._lock:
            fresh = list(dict.fromkeys(key for key in keys if key not in self._locks))
            fresh = fresh[: max(0, self._most - len(self._locks))]
        pinned, elsewhere = self._find(fresh)
        twice: list[BlockRef] = []
        with self._lock:
            ends_at = self._clock() + self._timeout_s
            for key in fresh:
                found = pinned.get(key) or elsewhere.get(key)
                if found is None:
                    continue
                if key in self._locks:  # by another thread meanwhile
                    twice += [pinned[key]] if key in pinned else []
                else:
                    self._locks[key] = _Lock(found, key in pinned, 0, ends_at)
            locked: list[bool] = []
            for key in keys:
                lock = self._locks.pop(key, None)
                if lock is not None:
                    lock.count += 1
                    lock.ends_at = ends_at
                    self._locks[key] = lock
                locked.append(lock is not None)
        self._unpin(twice)
        return locked

    def unlock(self, keys: Sequence[Key]) -> None:
        """Give each lock back once; a key that is not locked (any more) is passed over."""
        ended: list[_Lock] = []
        with self._lock:
            for key in keys:
                lock = self._locks.get(key)
                if lock is None:
                    continue
                lock.count -= 1
                if lock.count <= 0:
                    ended.append(self._locks.pop(key))
        self._end(ended)

    def lost(self, key: Key) -> None:
        """Note that the block could not be read where it is locked: who looks it up next hears of
        it. A block that somebody always holds a lock of would else be found, and not read, for
        ever."""
        with self._lock:
            lock = self._locks.pop(key, None)
        if lock is not None:
            self._end([lock])

    def borrow(self, keys: Sequence[Key]) -> tuple[list[BlockRef | None], list[BlockRef]]:
        """Return where each block is, and what of it to give to `give_back` after reading.

        What is not locked is pinned for the moment, or looked for elsewhere, so
        that a load that was never looked up works too.
        """
        with self._lock:
            there = {key: self._locks[key].found for key in keys if key in self._locks}
        pinned, elsewhere = self._find([k for k in dict.fromkeys(keys) if k not in there])
        there |= elsewhere | pinned
        return [there.get(key) for key in keys], list(pinned.values())

    def give_back(self, borrowed: Sequence[BlockRef]) -> None:
        self._unpin(borrowed)

    def expire(self) -> None:
        """End the locks whose time is over."""
        ended: list[_Lock] = []
        with self._lock:
            now = self._clock()
            while self._locks:
                key, lock = next(iter(self._locks.items()))
                if lock.ends_at > now:
                    break
                ended.append(self._locks.pop(key))
        self._end(ended)

    def close(self) -> None:
        """End all locks."""
        with self._lock:
            ended = list(self._locks.values())
            self._locks.clear()
        self._end(ended)

    def _find(self, keys: Sequence[Key]) -> tuple[dict[Key, BlockRef], dict[Key, BlockRef]]:
        """Return what is pinned now, and what else can be read from here."""
        if not keys:
            return {}, {}
        try:
            pins = self._store.pin(keys)
        except PeerError:
            pins = [None] * len(keys)
        pinned = {found.key: found for found in pins if found is not None}
        missing = [key for key in keys if key not in pinned]
        elsewhere = self._store.lookup(missing) if missing else []
        return pinned, {found.key: found for found in elsewhere if found is not None}

    def _end(self, locks: Sequence[_Lock]) -> None:
        self._unpin([lock.found for lock in locks if lock.pinned])

    def _unpin(self, found: Sequence[BlockRef]) -> None:
        if found:
            self._store.unpin(found)
