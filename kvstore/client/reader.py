"""Finds blocks and reads them: in place on this host, fetched from another.

Whoever copies from a place checks it afterwards (rule 4).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import xxhash

from kvstore.batches import in_batches
from kvstore.client.explanation import MissReason
from kvstore.client.health import IndexWatch
from kvstore.client.nodes.corruption_reporter import CorruptionReporter
from kvstore.client.nodes.fetch import FetchedBlock, OnDisk, RemoteBlock, fetch
from kvstore.client.nodes.known import Attached
from kvstore.client.nodes.readability import NO_CHECKSUM, Readability
from kvstore.client.payloads.out import Out
from kvstore.errors import IndexUnavailableError
from kvstore.index.base import Index, Record
from kvstore.limits import BATCH_KEYS_MAX
from kvstore.record import RecordSigner, disk_location, unpack_record
from kvstore.segment.copying import copy
from kvstore.segment.header import KEY_PART, Fields
from kvstore.segment.locate import locate, spot_of
from kvstore.types import Key, Location

if TYPE_CHECKING:
    from kvstore.cuda.base import DeviceRange
    from kvstore.segment.disk.attached import AttachedDisks

log = logging.getLogger("kvstore.client")

PLACES_KEPT_MAX = 1 << 16


class Place:
    """A block in place in this host's memory, with the header that was seen there."""

    __slots__ = (
        "attached",
        "buffer",
        "checksum",
        "data",
        "image",
        "kind",
        "meta_length",
        "slot_id",
    )

    attached: Attached
    slot_id: int
    image: bytes
    """The header when it was found."""
    kind: int
    meta_length: int
    checksum: int
    buffer: memoryview
    """The whole payload, value and meta, read-only."""
    data: memoryview
    """The value alone."""

    def valid(self) -> bool:
        """Return whether everything read of its payload so far is this key's block (rule 4)."""
        attached = self.attached
        return not attached.gone and attached.shm.header(self.slot_id) == self.image

    @property
    def size_bytes(self) -> int:
        """Of the value alone, without its description."""
        return len(self.data)

    @property
    def meta(self) -> memoryview:
        return self.buffer[len(self.data) :]

    def value(self) -> bytes:
        """Return a copy of the value."""
        return self.data.tobytes()

    def copy_to(self, target: memoryview) -> None:
        """Copy the value over `target`, which has its size."""
        copy(target, self.data)

    def verified(self, copied: memoryview | bytes | None = None) -> bool:
        """Return whether the payload's checksum was saved and is right; with `copied`, that of the
        value as it was copied rather than as it lies here."""
        if self.checksum == 0:
            return False
        state = xxhash.xxh3_64(self.data if copied is None else copied)
        state.update(self.meta)
        return state.intdigest() == self.checksum


class Search(list[Place | RemoteBlock | None]):
    """Where each block that was looked for is: in this host's memory or on its disks, on another
    host, nowhere."""

    @property
    def places(self) -> list[Place | None]:
        return [None if isinstance(ref, RemoteBlock) else ref for ref in self]

    @property
    def remote(self) -> dict[int, Location]:
        return {i: ref.location for i, ref in enumerate(self) if type(ref) is RemoteBlock}

    @property
    def fetched(self) -> dict[int, Location]:
        """What is in no memory of this host: on another one, or on a disk."""
        return {i: ref.location for i, ref in enumerate(self) if isinstance(ref, RemoteBlock)}


class Reader:
    """Finds places by key. Remembers where blocks were: rule 4 makes a stale place a miss."""

    def __init__(
        self,
        index: Index,
        readability: Readability,
        *,
        signer: RecordSigner | None = None,
        reporter: CorruptionReporter | None = None,
        watch: IndexWatch | None = None,
    ) -> None:
        """With `signer` only records count that it signed; `reporter` tells nodes of damage,
        `watch` people of an index that fails."""
        self._index = index
        self.readability = readability
        self._nodes = readability.nodes
        self._now = self._nodes.machine.monotonic
        self._signer = signer
        self._believes_names = signer is None
        """Whether a node of this host is believed for what it says its index is, before a record
        names it. With a signer, only a signed record says that a node is to be believed."""
        self._reporter = reporter
        self._verifies = readability.verifies
        self.remembered: dict[Key, Place] = {}
        """Where blocks were seen in this host's memory: to be used without looking for them."""
        self._seen_remote: dict[Key, Location] = {}
        """Where blocks were read on other hosts."""
        self.index_failures = 0
        self.miss_reasons: dict[str, int] = {}
        """Calls that missed for another reason than that the index had no record, by reason."""
        self._watch = watch or IndexWatch(index)
        self._gone_seen = 0

    def index_failed(self, error: IndexUnavailableError, *, missed: bool = True) -> MissReason:
        """Count a failure of the index, and the call when it `missed` for it; return why it did."""
        self.index_failures += 1
        reason = self.readability.without_index(error).reason
        if missed:
            self.missed(reason)
        self._watch.failed(error)
        return reason

    def missed(self, reason: MissReason) -> None:
        name = reason.value
        self.miss_reasons[name] = self.miss_reasons.get(name, 0) + 1

    def verified(self, key: Key, place: Place, copied: memoryview | bytes | None = None) -> bool:
        """`place.verified`; what is damaged is counted, and its node is told."""
        if place.verified(copied):
            return True
        self.forget(key)
        if place.checksum == 0 or not place.valid():
            self.missed(MissReason.LOAD_FAILED)
            return False
        self.missed(MissReason.CORRUPT)
        log.warning("a block of node %s is damaged: a miss", place.attached.announcement.name)
        if self._reporter is not None:
            attached = place.attached
            self._reporter.report(attached.directory, attached.announcement, key)
        return False

    def forget(self, key: Key) -> None:
        self.remembered.pop(key, None)
        self._seen_remote.pop(key, None)

    def let_go(self) -> None:
        """Forget the places in segments of dead nodes: each keeps its segment mapped."""
        gone = self._nodes.gone
        if gone == self._gone_seen:
            return
        self._gone_seen = gone
        for key, place in list(self.remembered.items()):
            if place.attached.gone:
                self.remembered.pop(key, None)

    def search(
        self, keys: Sequence[Key], *, remembered: bool = False, give_up_at: float = math.inf
    ) -> Search:
        """Return where each of `keys` is, here or on other hosts.

        This host's segments are searched first; the index is asked for the rest, unless it is
        `give_up_at` by then, in seconds of the machine's clock. With
        `remembered`, what was seen in them before is not searched for: it may have left.
        """
        now = self._now()
        self._nodes.check(now)
        seen = self.remembered if remembered else {}
        found = Search(map(seen.get, keys))
        self._find_here(found, keys)
        unknown: list[int] = []
        for i, place in enumerate(found):
            if place is None:
                location = self._seen_remote.get(keys[i])
                if location is not None and self._travels(location, now):
                    found[i] = RemoteBlock(keys[i], location, remembered=True)
                else:
                    unknown.append(i)
        if unknown and self._believes_names and self._nodes.map_ours(now):
            self._find_here(found, keys)
            unknown = [i for i in unknown if found[i] is None]
        if not unknown:
            return found
        if self._now() >= give_up_at:
            return found
        try:
            if len(unknown) == 1:
                (i,) = unknown
                for only in self._index.match([keys[i]]):
                    found[i] = self.resolve(keys[i], only)
                return found
            for wanted in in_batches(unknown, BATCH_KEYS_MAX):
                batch = [keys[i] for i in wanted]
                for i, record in zip(wanted, self._index.lookup(batch), strict=True):
                    if record is not None:
                        found[i] = self.resolve(keys[i], record)
        except IndexUnavailableError as e:
            if self._nodes.map_all(now):
                self._find_here(found, keys)
            self.index_failed(e)
        return found

    def resolve(self, key: Key, record: Record) -> Place | RemoteBlock | None:
        """Return where a record says that the block is: in this host's memory, where its header is
        SEALED and says the same, on its disks, or on another host that can be reached."""
        if self._signer is not None and not self.genuine(key, record):
            return None
        location = unpack_record(key, record)
        if location is None:
            return None
        source = self.readability.find(
            *location[:2], self._now(), location.length, location.segment
        )
        if source is None:
            self.missed(self.readability.why_not(*location[:3]).reason)
            return None
        if source.needs_checksum and not location.checksum:
            self.missed(NO_CHECKSUM.reason)
            return None
        there = source.there
        if not isinstance(there, Attached):
            return RemoteBlock(key, location)
        if location.segment:
            return OnDisk(key, location)
        # A segment that is mapped here has the last word on what is in it.
        spot = locate(there.shm, key, location)
        return None if spot is None else self._place(there, *spot)

    def refused(self, block: RemoteBlock) -> MissReason | None:
        """Return why its node does not serve this client, when it failed for that."""
        reason = self.readability.why_not(*block.location[:2]).reason
        return None if reason is MissReason.OUT_OF_REACH else reason

    def read(
        self,
        refs: Sequence[Place | RemoteBlock | None],
        into: Sequence[Out | None] | None = None,
        deadline: float | None = None,
        rooms: Sequence[DeviceRange | None] | None = None,
    ) -> list[Place | FetchedBlock | None]:
        """Return each of `refs` as it can be read now, None for what cannot.

        What is on this host is read where it is. Blocks of other hosts come in one batch per node,
        into `into` as far as it has room, else into memory of their own; `deadline`, in seconds
        of the machine's clock, bounds that beside the deadlines of streams. `rooms` are those of
        `fetch`. Raises `UsageError` for an `out` that is too small for such a block.
        """
        views: list[Place | FetchedBlock | None] = []
        remote: dict[int, RemoteBlock] = {}
        for i, ref in enumerate(refs):
            if isinstance(ref, RemoteBlock):
                remote[i] = ref
                views.append(None)
            else:
                views.append(ref)
        if remote:
            for i, block in fetch(self.readability.remote, remote, into, deadline, rooms).items():
                views[i] = block
        return views

    def remote_location(self, key: Key, record: Record) -> Location | None:
        """Return where a record says that a node on another host has the block, when it can be
        reached."""
        if self._signer is not None and not self._signer.right(key, record):
            return None  # `resolve` has counted it
        location = unpack_record(key, record)
        return location if location is not None and self._travels(location, self._now()) else None

    def _travels(self, at: Location, now: float) -> bool:
        """Return whether the block is on another host or in VRAM, and can be read from there."""
        source = self.readability.find(*at[:2], now, at.length)
        return source is not None and not isinstance(source.there, Attached)

    def seen_remote(self, key: Key, location: Location) -> None:
        """Remember that the block was read there; `forget` it when it is there no more."""
        if len(self._seen_remote) >= PLACES_KEPT_MAX:
            _drop_oldest(self._seen_remote)
        self._seen_remote[key] = location

    def forget_remote(self, keys: Sequence[Key]) -> bool:
        """Forget where blocks of other hosts were; whether any of `keys` was among them."""
        return sum(self._seen_remote.pop(key, None) is not None for key in keys) > 0

    def _find_here(self, found: Search, keys: Sequence[Key]) -> None:
        """Fill in what is missing of `found` and lies in a segment that is mapped already, by its
        table of hints, or on the disks of its node, by theirs."""
        for attached in self._nodes.mapped:
            unknown = [i for i, place in enumerate(found) if place is None]
            if not unknown:
                return
            shm = attached.shm
            headers = shm.hinted_each([keys[i] for i in unknown])
            for i, (slot_id, image) in zip(unknown, headers, strict=True):
                if image[KEY_PART] == keys[i]:
                    spot = spot_of(shm.superblock.size_bytes, slot_id, image)
                    if spot is not None:
                        found[i] = self._place(attached, *spot)
        for attached in self._nodes.mapped:
            if attached.disks is not None:
                self._find_on_disk(attached, attached.disks, found, keys)

    def _find_on_disk(
        self, attached: Attached, disks: AttachedDisks, found: Search, keys: Sequence[Key]
    ) -> None:
        node = attached.announcement
        for i, place in enumerate(found):
            block = disks.find_readable(keys[i]) if place is None else None
            if block is not None:
                found[i] = OnDisk(keys[i], disk_location(node.node_id, node.epoch, block))

    def place(self, key: Key, record: Record) -> Place | None:
        """`resolve`, for what is in this host's memory."""
        ref = self.resolve(key, record)
        return ref if isinstance(ref, Place) else None

    def _place(
        self, attached: Attached, slot_id: int, image: bytes, header: Fields, offset: int
    ) -> Place | None:
        _, key, length, _, kind, meta_length, checksum, _ = header
        if self._verifies and checksum == 0:
            return None
        shm = attached.shm
        if not shm.populate(offset, length):
            return None
        place = Place()
        place.buffer = shm.payload[offset : offset + length]
        place.data = place.buffer[: length - meta_length] if meta_length else place.buffer
        place.attached, place.slot_id, place.image = attached, slot_id, image
        place.kind, place.meta_length, place.checksum = kind, meta_length, checksum
        if len(self.remembered) >= PLACES_KEPT_MAX:
            _drop_oldest(self.remembered)
        self.remembered[key] = place
        if attached.gone:  # meanwhile: `let_go` may have passed by already
            self.remembered.pop(key, None)
        return place

    def genuine(self, key: Key, record: Record) -> bool:
        """Return whether a record is from one of our nodes, as far as that can be told; else
        counted."""
        if self._signer is None or self._signer.right(key, record):
            return True
        self.missed(MissReason.BAD_SIGNATURE)
        return False

    def close(self) -> None:
        self.remembered.clear()
        self._seen_remote.clear()


def _drop_oldest(kept: dict[Key, Any]) -> None:
    """Whoever changes it at this moment makes room, or will: no lock for one entry too many."""
    with suppress(RuntimeError, StopIteration):
        kept.pop(next(iter(kept)), None)
