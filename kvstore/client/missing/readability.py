"""Says which of the blocks that are there this client can read, and why not the others.

What a lookup leaves out asks nobody: a cause is learned when a node is first heard of, or first
fails, and forgotten at its next start, or when the node serves this client again. `tried` and
`reach` connect, for people.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from threading import Thread
from typing import NamedTuple

from kvstore.batches import in_batches
from kvstore.client.local.nodes import LocalNodes
from kvstore.client.missing.explanation import MissReason, Unreadable, reason_of
from kvstore.client.remote.reader import RemoteNodes
from kvstore.errors import IndexUnavailableError
from kvstore.index.announced import announced_nodes
from kvstore.index.base import Index
from kvstore.limits import STREAM_NODES_AT_ONCE
from kvstore.nodedir import Announcement
from kvstore.record import RecordSigner
from kvstore.transport.registry import CUDA_IPC
from kvstore.types import Location

NO_CHECKSUM = Unreadable(
    MissReason.UNREADABLE_NO_CHECKSUM,
    "it was saved without a checksum, and this client reads only what has one; "
    'saving it with verify="always" replaces it',
)
LATE = Unreadable(MissReason.OUT_OF_REACH, "it did not answer in time")


class Reach(NamedTuple):
    """One node that is announced, and whether this client can read it."""

    announcement: Announcement
    here: bool
    """It is this user's, and lives in this client's run directory."""
    unreadable: Unreadable | None

    @property
    def name(self) -> str:
        return f"{self.announcement.name} on {self.announcement.host}"

    @property
    def fault(self) -> Unreadable | None:
        """Return what is wrong: nothing, where the node is to serve its own host alone."""
        why, ways = self.unreadable, {*self.announcement.transports} - {CUDA_IPC}
        return None if why and why.reason is MissReason.OUT_OF_REACH and not ways else why


def without_index(readability: Readability | None, error: IndexUnavailableError) -> Unreadable:
    """Return why nothing is found while the index cannot be asked for this `error`."""
    others = None if readability is None else readability.only_others()
    if others is None:
        return Unreadable(reason_of(error), str(error))
    return Unreadable(others.reason, f"this host's node cannot be read: {others.detail}; {error}")


class Readability:
    """Thread-safe. Never raises for a peer's fault."""

    def __init__(
        self,
        index: Index,
        nodes: LocalNodes,
        remote: RemoteNodes,
        signer: RecordSigner | None,
        *,
        verifies: bool,
    ) -> None:
        """With `verifies`, this client reads memory of its own host by checksums alone."""
        self._index = index
        self._nodes = nodes
        self._remote = remote
        self._signer = signer
        self.verifies = verifies

    def needs_checksum(self, node_id: int, epoch: int) -> bool:
        """Return whether blocks of that node can be read only with a checksum of their own. A
        stream makes one."""
        if self._nodes.mapped_start(node_id, epoch):
            return self.verifies
        return self._remote.needs_checksum(node_id, epoch, verifies=self.verifies)

    def why_not(self, node_id: int, epoch: int) -> Unreadable:
        """Return why that start of that node, which cannot be read, cannot. Asks nobody."""
        unmapped = self._nodes.unmapped_because.get((node_id, epoch))
        if unmapped is not None and (
            unmapped.reason is not MissReason.OTHER_USER or not self._announces(node_id, epoch)
        ):
            return unmapped
        return self._remote.why_not(node_id, epoch)

    def _announces(self, node_id: int, epoch: int) -> bool:
        """Return whether the index has named that start of that node."""
        known = self._remote.directory.get(node_id)
        return known is not None and known.epoch == epoch

    def only_others(self) -> Unreadable | None:
        """Return why this host's memory has nothing for this client: its nodes are other users',
        and no index has named them. None where that is not so."""
        if self._nodes.mapped:
            return None
        for start, why in [*self._nodes.unmapped_because.items()]:
            if why.reason is MissReason.OTHER_USER and not self._announces(*start):
                return why
        return None

    def tried(self, words: Collection[Announcement], deadline: float) -> list[Unreadable | None]:
        """Return why each of these nodes cannot be read now; None for what can. Those that are not
        mapped are connected to, many at the same time, by `deadline`."""
        now = self._nodes.machine.monotonic()
        away = [w for w in words if self._nodes.segment(w.node_id, w.epoch, now) is None]
        found: dict[int, Unreadable | None] = {word.node_id: LATE for word in away}

        def try_one(word: Announcement) -> None:
            why = self._remote.try_now(word, deadline)
            unmapped = self._nodes.unmapped_because.get((word.node_id, word.epoch))
            others = unmapped is not None and unmapped.reason is MissReason.OTHER_USER
            found[word.node_id] = why and (why if others else unmapped or why)

        for batch in in_batches(away, STREAM_NODES_AT_ONCE):
            threads = [Thread(target=try_one, args=(word,), daemon=True) for word in batch]
            for thread, word in zip(threads, batch, strict=True):
                try:
                    thread.start()
                except RuntimeError:  # this host has no more threads to give
                    try_one(word)
            for thread in threads:
                if thread.ident is not None:
                    thread.join(max(deadline - time.monotonic(), 0.0))
        return [found.get(word.node_id) for word in words]

    def why_not_read(self, node: Announcement, at: Location, deadline: float) -> Unreadable | None:
        """Return why a block there cannot be read now; None when it can, if it is there."""
        (why,) = self.tried([node], deadline)
        checked = why is None and not at.checksum and self.needs_checksum(*at[:2])
        return NO_CHECKSUM if checked else why

    def cannot_read(self, locations: Iterable[Location], deadline: float) -> set[tuple[int, int]]:
        """Return the starts of nodes of other hosts among those of `locations` that fail now."""
        now, starts = self._nodes.machine.monotonic(), {location[:2] for location in locations}
        words = [word for at in starts if (word := self._remote.node(*at, now)) is not None]
        whys = zip(words, self.tried(words, deadline), strict=True)
        return {(word.node_id, word.epoch) for word, why in whys if why is not None}

    def reach(self, deadline: float) -> list[Reach]:
        """Return every node that is announced, in the index or on this host, by host and name."""
        here = {word.node_id: word for word in self._nodes.living()}
        near = {word.node_id: word for word, _ in self._nodes.others()} | here
        try:
            words = dict(announced_nodes(self._index, self._signer)) | near
        except IndexUnavailableError:
            known = self._remote.directory.all()
            words = {word.node_id: word for _, word in known} | near
        ordered = sorted(words.values(), key=lambda word: (word.host, word.name))
        tried = zip(ordered, self.tried(ordered, deadline), strict=True)
        return [Reach(word, word.node_id in here, why) for word, why in tried]
