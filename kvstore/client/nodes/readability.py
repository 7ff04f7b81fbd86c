"""Says which of the blocks that are there this client can read, where, and why not the others: here
alone is asked whether a node is in this host's memory, in its VRAM or elsewhere.

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
from kvstore.client.explanation import MissReason, Unreadable, reason_of
from kvstore.client.nodes.directory import NodeDirectory
from kvstore.client.nodes.known import Attached
from kvstore.client.nodes.remote import RemoteNodes
from kvstore.errors import IndexUnavailableError
from kvstore.limits import STREAM_NODES_AT_ONCE, VALUE_BYTES_MAX
from kvstore.nodedir import Announcement
from kvstore.transport.registry import CUDA_IPC
from kvstore.types import Location, Tier

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
    disks: Unreadable | None = None
    """Why what it has on a disk cannot be read, where its memory can."""

    @property
    def name(self) -> str:
        return f"{self.announcement.name} on {self.announcement.host}"

    @property
    def fault(self) -> Unreadable | None:
        """Return what is wrong: nothing, where the node is to serve its own host alone."""
        why, ways = self.unreadable, {*self.announcement.transports} - {CUDA_IPC}
        return None if why and why.reason is MissReason.OUT_OF_REACH and not ways else why


class ReadSource(NamedTuple):
    """From where blocks of one start of one node are read now."""

    there: Attached | Announcement
    """Its memory, which is mapped here, and its disks, or what it announces, where they have to
    travel."""
    needs_checksum: bool
    """Only blocks with a checksum of their own can be read from there."""


class Readability:
    """Thread-safe. Never raises for a peer's fault."""

    def __init__(self, nodes: NodeDirectory, remote: RemoteNodes, *, verifies: bool) -> None:
        """With `verifies`, this client reads memory of its own host by checksums alone."""
        self.nodes = nodes
        self.remote = remote
        self.verifies = verifies

    def find(
        self, node_id: int, epoch: int, now: float, length: int = 0, segment: int = 0
    ) -> ReadSource | None:
        """Return from where blocks in that segment of that start of that node are read now. None
        where they cannot be read, nor a block of `length` bytes that no block of it can have."""
        here = self.nodes.segment(node_id, epoch, now)
        if here is not None:
            if not segment:
                return ReadSource(here, self.verifies)
            if here.disks is not None and here.disks.reads(segment - 1):
                return ReadSource(here, True) if length <= VALUE_BYTES_MAX else None
            if here.disks is not None and not here.disks.unopened(segment - 1):
                return None
        word = self.remote.node(node_id, epoch, now)
        # A reader makes room for all of a block before it asks its node, and records can lie.
        if word is None or length > min(word.size_bytes, VALUE_BYTES_MAX):
            return None
        if self.remote.vram is not None and self.nodes.entry(node_id, epoch).in_vram is not None:
            return ReadSource(word, self.verifies)
        known = self.nodes.get(node_id)
        # A stream makes a checksum, and the node itself reads its disks for it.
        unchecked = known is not None and not any(way.checks_bytes for way in known.offered)
        return None if segment and unchecked else ReadSource(word, unchecked)

    def tier(self, node_id: int, epoch: int, segment: int) -> Tier:
        """Return where blocks in that segment of that start of that node lie, as far as is known;
        asks nobody."""
        known = self.nodes.entry(node_id, epoch)
        if known.attached is not None:
            return Tier.DISK if segment else Tier.HOST
        return Tier.OTHER_HOST if known.in_vram is None else Tier.VRAM

    def without_index(self, error: IndexUnavailableError) -> Unreadable:
        """Return why nothing is found while the index cannot be asked for this `error`."""
        others = self.nodes.only_others()
        if others is None:
            return Unreadable(reason_of(error), str(error))
        detail = f"this host's node cannot be read: {others.detail}; {error}"
        return Unreadable(others.reason, detail)

    def why_not(self, node_id: int, epoch: int, segment: int = 0) -> Unreadable:
        """Return why that start of that node, or its disks, cannot be read. Asks nobody."""
        known = self.nodes.entry(node_id, epoch)
        if segment and known.attached is not None:
            return self._no_disk(known.attached, segment - 1)
        if known.unmapped is not None and (
            known.unmapped.reason is not MissReason.OTHER_USER or not known.indexed
        ):
            return known.unmapped
        return self.remote.why_not(node_id, epoch)

    def _no_disk(self, here: Attached, device: int) -> Unreadable:
        disks = here.disks
        why = "it is not mapped, or not allowed" if disks is None else disks.unopened(device)
        if why:
            word = here.announcement
            stream = self.remote.why_not(word.node_id, word.epoch).detail
            why = f"its disk cannot be opened by this process ({why}), nor read by stream: {stream}"
        elif disks is not None:
            why = disks.locked or "its disk failed or hung lately, or its node has closed it"
        return Unreadable(MissReason.UNREADABLE_DISK, why)

    def _disks(self, word: Announcement) -> Unreadable | None:
        """Return why a disk of a node of this host cannot be read now; None where all can, or its
        memory is not mapped."""
        start = word.node_id, word.epoch
        here, now = self.nodes.entry(*start).attached, self.nodes.machine.monotonic()
        if here is None:
            return None
        segments = [1 + int(number) for number in here.announcement.disks]
        whys = (self.why_not(*start, at) for at in segments if not self.find(*start, now, 0, at))
        return next(whys, None)

    def tried(self, words: Collection[Announcement], deadline: float) -> list[Unreadable | None]:
        """Return why each of these nodes cannot be read now; None for what can. Those that are not
        mapped are connected to, many at the same time, by `deadline`."""
        now = self.nodes.machine.monotonic()
        away = [w for w in words if self.nodes.segment(w.node_id, w.epoch, now) is None]
        found: dict[int, Unreadable | None] = {word.node_id: LATE for word in away}

        def try_one(word: Announcement) -> None:
            why = self.remote.try_now(word, deadline)
            unmapped = self.nodes.unmapped(word.node_id, word.epoch)
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
        now = self.nodes.machine.monotonic()
        source = self.find(*at[:2], now, segment=at.segment) if why is None else None
        if why is None and source is None and at.segment:
            return self.why_not(*at[:3])
        checked = source is not None and not at.checksum and source.needs_checksum
        return NO_CHECKSUM if checked else why

    def cannot_read(self, locations: Iterable[Location], deadline: float) -> set[tuple[int, int]]:
        """Return the starts of nodes of other hosts among those of `locations` that fail now."""
        now, starts = self.nodes.machine.monotonic(), {location[:2] for location in locations}
        words = [word for at in starts if (word := self.remote.node(*at, now)) is not None]
        whys = zip(words, self.tried(words, deadline), strict=True)
        return {(word.node_id, word.epoch) for word, why in whys if why is not None}

    def reach(self, deadline: float) -> list[Reach]:
        """Return every node that is announced, in the index or on this host, by host and name."""
        here = {word.node_id: word for word in self.nodes.living()}
        near = {word.node_id: word for word, _ in self.nodes.others()} | here
        try:
            words = self.nodes.announcements() | near
        except IndexUnavailableError:
            words = {word.node_id: word for _, word in self.nodes.all()} | near
        ordered = sorted(words.values(), key=lambda word: (word.host, word.name))
        tried = zip(ordered, self.tried(ordered, deadline), strict=True)
        return [
            Reach(word, word.node_id in here, why, self._disks(word) if why is None else None)
            for word, why in tried
        ]
