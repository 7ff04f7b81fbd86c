"""Finds blocks and reads them: in place on this host, fetched from another.

Whoever copies from a place checks it afterwards (rule 4).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import xxhash

from kvstore.batches import in_batches
from kvstore.client.explanation import MissReason, reason_of
from kvstore.client.health import IndexWatch
from kvstore.client.local.corruption_reporter import CorruptionReporter
from kvstore.client.local.nodes import Attached, LocalNodes
from kvstore.client.remote.fetch import FetchedBlock, RemoteBlock, fetch
from kvstore.client.remote.reader import RemoteNodes
from kvstore.client.values.out import Out
from kvstore.errors import IndexUnavailableError
from kvstore.index.base import Index, Record
from kvstore.limits import BATCH_KEYS_MAX, VALUE_BYTES_MAX
from kvstore.record import RecordSigner, unpack_record
from kvstore.segment.header import Fields
from kvstore.segment.locate import hinted, locate
from kvstore.types import Key, Location

log = logging.getLogger("kvstore.client")

PLACES_KEPT_MAX = 1 << 16
_NODE_PART = slice(4, 16)
"""Epoch and node id in a record (record.py)."""


class Place:
    """A block found in shared memory, with the header that was seen there."""

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
    written_bytes = 0
    """Of it, those that are in the caller's memory already."""

    @property
    def size_bytes(self) -> int:
        """Of the value alone, without its description."""
        return len(self.data)

    @property
    def meta(self) -> memoryview:
        return self.buffer[len(self.data) :]

    def valid(self) -> bool:
        """Whether everything read from `buffer` so far is this key's block (rule 4)."""
        attached = self.attached
        return not attached.gone and attached.shm.header(self.slot_id) == self.image

    def verified(self, copied: memoryview | bytes | None = None) -> bool:
        """Whether the payload's checksum was saved and is right; with `copied`, that of the
        value as it was copied rather than as it lies here."""
        if self.checksum == 0:
            return False
        if copied is None or self.meta_length:
            state = xxhash.xxh3_64(self.data if copied is None else copied)
            state.update(self.buffer[len(self.data) :])
            return state.intdigest() == self.checksum
        return xxhash.xxh3_64_intdigest(copied) == self.checksum


class Search(list[Place | RemoteBlock | None]):
    """Where each block that was looked for is: in this host's memory, on another host, nowhere."""

    @property
    def places(self) -> list[Place | None]:
        return [ref if isinstance(ref, Place) else None for ref in self]

    @property
    def remote(self) -> dict[int, Location]:
        return {i: ref.location for i, ref in enumerate(self) if isinstance(ref, RemoteBlock)}


class Reader:
    """Finds places by key. Remembers where blocks were: rule 4 makes a stale place a miss."""

    def __init__(
        self,
        index: Index,
        nodes: LocalNodes,
        remote: RemoteNodes | None = None,
        *,
        signer: RecordSigner | None = None,
        reporter: CorruptionReporter | None = None,
        watch: IndexWatch | None = None,
    ) -> None:
        """Without `remote`, only blocks of this host can be read. With `signer` only records
        count that it signed; `reporter` tells nodes of damage, `watch` people of an index that
        fails."""
        self._index = index
        self._nodes = nodes
        self._now = nodes.machine.monotonic
        self._remote = remote
        self._signer = signer
        self._reporter = reporter
        self.remembered: dict[Key, Place] = {}
        """Where blocks were seen in this host's memory: to be used without looking for them."""
        self._seen_remote: dict[Key, Location] = {}
        """Where blocks were read on other hosts."""
        self.index_failures = 0
        self.miss_reasons: dict[str, int] = {}
        """Calls that missed for another reason than that the index had no record, by reason."""
        self._watch = watch or IndexWatch(index)
        self._gone_seen = 0

    def index_failed(self, error: IndexUnavailableError, *, missed: bool = True) -> None:
        """Count a failure of the index, and the call when it `missed` for it."""
        self.index_failures += 1
        if missed:
            self.missed(reason_of(error))
        self._watch.failed(error)

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
            self._reporter.report(place.attached, key)
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

    def search(self, keys: Sequence[Key], *, remembered: bool = False) -> Search:
        """Where each of `keys` is, here or on other hosts.

        This host's segments are searched first; the index is asked for the rest. With
        `remembered`, what was seen in them before is not searched for: it may have left.
        """
        now = self._now()
        self._nodes.check(now)
        seen = self.remembered if remembered else {}
        found = Search([seen.get(key) or self._local(key) for key in keys])
        unknown: list[int] = []
        for i, place in enumerate(found):
            if place is None:
                location = self._seen_remote.get(keys[i])
                if location is not None and self._reached(location, now):
                    found[i] = RemoteBlock(keys[i], location, remembered=True)
                else:
                    unknown.append(i)
        if not unknown:
            return found
        try:
            for wanted in in_batches(unknown, BATCH_KEYS_MAX):
                batch = [keys[i] for i in wanted]
                records = self._index.match(batch) if len(batch) == 1 else self._index.lookup(batch)
                for i, key, record in zip(wanted, batch, records, strict=False):
                    if record is not None:
                        found[i] = self.resolve(key, record)
        except IndexUnavailableError as e:
            if self._nodes.map_all(now):
                for i in unknown:
                    found[i] = found[i] or self._local(keys[i])
            self.index_failed(e)
        return found

    def resolve(self, key: Key, record: Record) -> Place | RemoteBlock | None:
        """Where a record says that the block is: in this host's memory, where its header is SEALED
        and says the same, or on another host that can be reached."""
        if not self._genuine(key, record):
            return None
        location = unpack_record(key, record)
        if location is None:
            return None
        now = self._now()
        attached = self._nodes.segment(location.node_id, location.epoch, now)
        if attached is None:
            return RemoteBlock(key, location) if self._reached(location, now) else None
        # A segment that is mapped here has the last word on what is in it.
        spot = locate(attached.shm, key, location)
        return None if spot is None else self._place(attached, *spot)

    def read(
        self,
        refs: Sequence[Place | RemoteBlock | None],
        into: Sequence[Out | None] | None = None,
        deadline: float | None = None,
    ) -> list[Place | FetchedBlock | None]:
        """Each of `refs` as it can be read now, None for what cannot.

        What is on this host is read in place. Blocks of other hosts come in one batch per node,
        into `into` as far as it has room, else into memory of their own; `deadline`, in seconds
        of the machine's clock, bounds that beside the deadlines of streams. Raises `UsageError`
        for an `out` that is too small for such a block.
        """
        remote = {i: ref for i, ref in enumerate(refs) if isinstance(ref, RemoteBlock)}
        views: list[Any] = list(refs)
        if remote and self._remote is not None:
            fetched = fetch(self._remote, remote, into, deadline)
            for i in remote:
                views[i] = fetched.get(i)
        return views

    def remote_location(self, key: Key, record: Record) -> Location | None:
        """Where a record says that a node on another host has the block, when it can be reached."""
        if self._signer is not None and not self._signer.right(key, record):
            return None  # `resolve` has counted it
        location, now = unpack_record(key, record), self._now()
        if location is None or self._nodes.segment(location.node_id, location.epoch, now):
            return None
        return location if self._reached(location, now) else None

    def _reached(self, location: Location, now: float) -> bool:
        """Also that it can be: a reader makes room for all of a block before it asks its node."""
        remote = self._remote
        announcement = (
            None if remote is None else remote.node(location.node_id, location.epoch, now)
        )
        return announcement is not None and location.length <= min(
            announcement.size_bytes, VALUE_BYTES_MAX
        )

    def seen_remote(self, key: Key, location: Location) -> None:
        """Remember that the block was read there; `forget` it when it is there no more."""
        if len(self._seen_remote) >= PLACES_KEPT_MAX:
            _drop_oldest(self._seen_remote)
        self._seen_remote[key] = location

    def forget_remote(self, keys: Sequence[Key]) -> bool:
        """Forget where blocks of other hosts were; whether any of `keys` was among them."""
        return sum(self._seen_remote.pop(key, None) is not None for key in keys) > 0

    def _local(self, key: Key) -> Place | None:
        """The place of `key` in a segment that is mapped already, by its table of hints."""
        for attached in self._nodes.mapped:
            spot = hinted(attached.shm, key)
            if spot is not None:
                return self._place(attached, *spot)
        return None

    def place(self, key: Key, record: Record) -> Place | None:
        """`resolve`, for what is in this host's memory."""
        ref = self.resolve(key, record)
        return ref if isinstance(ref, Place) else None

    def _place(
        self, attached: Attached, slot_id: int, image: bytes, header: Fields, offset: int
    ) -> Place:
        _, key, length, _, kind, meta_length, checksum, _ = header
        shm = attached.shm
        shm.populate(offset, length)
        place = Place()
        place.attached, place.slot_id, place.image = attached, slot_id, image
        place.kind, place.meta_length, place.checksum = kind, meta_length, checksum
        place.buffer = shm.payload[offset : offset + length]
        place.data = place.buffer[: length - meta_length] if meta_length else place.buffer
        if len(self.remembered) >= PLACES_KEPT_MAX:
            _drop_oldest(self.remembered)
        self.remembered[key] = place
        if attached.gone:  # meanwhile: `let_go` may have passed by already
            self.remembered.pop(key, None)
        return place

    def indexed_run(self, keys: Sequence[Key]) -> list[Record]:
        """Records of the longest leading run that is in the index.

        Raises `IndexUnavailableError`.
        """
        records: list[Record] = []
        for batch in in_batches(keys, BATCH_KEYS_MAX):
            run = self._index.match(batch)
            records += run
            if len(run) < len(batch):
                break
        return records

    def genuine_count(self, keys: Sequence[Key], records: Sequence[Record]) -> int:
        """How many leading `records` are signed as they must be."""
        if self._signer is None:
            return len(records)
        for i, record in enumerate(records):
            if not self._genuine(keys[i], record):
                return i
        return len(records)

    def _genuine(self, key: Key, record: Record) -> bool:
        """Whether a record is from one of our nodes, as far as that can be told; else counted."""
        if self._signer is None or self._signer.right(key, record):
            return True
        self.missed(MissReason.BAD_SIGNATURE)
        return False

    def readable(self, keys: Sequence[Key]) -> list[Record | None]:
        """For each of `keys` its record, if the node it names can be read from here.

        Raises `IndexUnavailableError`.
        """
        return self.in_reach(self.indexed(keys))

    def indexed(self, keys: Sequence[Key]) -> list[Record | None]:
        """For each of `keys` its record, signed as it must be; None where the index has none.

        Raises `IndexUnavailableError`.
        """
        records: list[Record | None] = []
        for batch in in_batches(keys, BATCH_KEYS_MAX):
            records += self._index.lookup(batch)
        if self._signer is None:
            return records
        return [
            record if record is not None and self._genuine(key, record) else None
            for key, record in zip(keys, records, strict=True)
        ]

    def in_reach(self, records: Sequence[Record | None]) -> list[Record | None]:
        """The records of nodes that can be read from here, None in place of the others.

        Headers are looked at when the block is read; here only who owns it matters, so a long
        run costs little.
        """
        now = self._now()
        self._nodes.check(now)
        unreachable = self._unreachable([r for r in records if r is not None], now)
        if not unreachable:
            return list(records)
        return [
            None if record is None or record[_NODE_PART] in unreachable else record
            for record in records
        ]

    def _unreachable(self, records: Sequence[Record], now: float) -> set[bytes]:
        """Nodes that records name and that cannot be read from here."""
        parts = {record[_NODE_PART] for record in records}
        return {part for part in parts if not self._reachable(part, now)}

    def _reachable(self, part: bytes, now: float) -> bool:
        if len(part) != 12:
            return False
        epoch = int.from_bytes(part[:4], "little")
        node_id = int.from_bytes(part[4:], "little")
        if self._nodes.segment(node_id, epoch, now) is not None:
            return True
        return self._remote is not None and self._remote.node(node_id, epoch, now) is not None

    def close(self) -> None:
        self.remembered.clear()
        self._seen_remote.clear()


def _drop_oldest(kept: dict[Key, Any]) -> None:
    """Whoever changes it at this moment makes room, or will: no lock for one entry too many."""
    with suppress(RuntimeError, StopIteration):
        kept.pop(next(iter(kept)), None)
