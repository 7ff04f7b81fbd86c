"""Reads blocks from the node's disks for clients on other hosts, by the rules by which clients of
its own host read them (transport/disk.py)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvstore.limits import DISK_STAGING_BYTES
from kvstore.node.stream.shares import Shares
from kvstore.nodedir import Announcement
from kvstore.protocol.stream import Asked
from kvstore.record import disk_location
from kvstore.segment.copying import copy
from kvstore.segment.disk.attached import AttachedDisks
from kvstore.transport.base import Outcome, Wanted
from kvstore.transport.disk import DiskTransport
from kvstore.types import DiskBlock, DiskKeys, Key, Location

TIME_SHARE = 0.5
"""Of the time that is left for an answer: what a disk may take of it."""
CLIENTS_SHARE = 4
"""One client host may have one in so many bytes of the staging read, and not yet sent, at a time.
One larger block comes alone."""


class DiskReads:
    """Thread-safe: each connection's thread reads for itself, and the node's event loop never."""

    def __init__(self, word: Announcement, keys: DiskKeys | None = None) -> None:
        """Open the disks that the node announces, encrypted with `keys`. Raises `OSError` and
        `ValueError`."""
        self._word = word
        self._disks = AttachedDisks(word, os.geteuid(), keys=keys)
        self._transport = DiskTransport(lambda _: self._disks, copy)
        self._shares = Shares(DISK_STAGING_BYTES // CLIENTS_SHARE)

    def find(self, key: Key, location: Location) -> DiskBlock | None:
        """Return the block, if it is where and as long as the location says."""
        block = self._disks.find(key)
        word = self._word
        is_there = block and disk_location(word.node_id, word.epoch, block) == location
        return block if is_there else None

    @contextmanager
    def read(
        self, client: str, asked: Sequence[Asked], deadline: float
    ) -> Iterator[tuple[list[memoryview], Sequence[Outcome]]]:
        """Yield memory as long as each block, and what came of reading it there; what did not come
        in time has failed. While this lasts it counts as the client's. Raises `DeadlineError` when
        other reads of the client take all of its share until `deadline`."""
        sizes = [location.length for _, location in asked]
        with self._shares.of(client, sum(sizes), deadline):
            into = [memoryview(bytearray(size_bytes)) for size_bytes in sizes]
            wanted = [Wanted(*one, [room]) for one, room in zip(asked, into, strict=True)]
            now = time.monotonic()
            until = now + (deadline - now) * TIME_SHARE
            yield into, self._transport.read(self._word, wanted, until)

    def close(self) -> None:
        """Have what is being read fail."""
        self._transport.close()
