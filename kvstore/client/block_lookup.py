"""Looks up who has each block, in two stages: this host's memory first, then the index.

    key -> found here  by the tables of hints of the segments that are mapped, then by those of
                       their nodes' disks: nobody is asked and
                       nobody waited for, so it needs no deadline. Of nodes of the client's own
                       index alone, which a lookup may believe as it believes the index; and only
                       what this client can read (client/nodes/readability.py)
        -> by record   the index is asked for the keys that were missing, within the deadline. What
                       its record names counts where that node can be read from here; where not,
                       this host's memory may have the block of another node
        -> missing     with the reason

While the index is away the second stage looks through all segments of this host that serve the
same keys. Either stage gives a hint (rule 7): whoever reads the block compares its header (rule 4).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from kvstore.batches import in_batches
from kvstore.client.base import BlockRef, LookupResult, PrefixMatch
from kvstore.client.explanation import MissReason
from kvstore.client.nodes.directory import NodeDirectory
from kvstore.client.nodes.known import Attached
from kvstore.client.nodes.readability import NO_CHECKSUM, ReadSource
from kvstore.client.reader import Reader
from kvstore.errors import IndexUnavailableError
from kvstore.index.base import Index, Record
from kvstore.limits import BATCH_KEYS_MAX
from kvstore.record import RecordSigner, disk_location, has_checksum, pack_place, pack_record
from kvstore.segment.header import KEY_PART, fields
from kvstore.segment.locate import offset_of
from kvstore.types import Key, Tier

T = TypeVar("T", Record, Record | None)

KEYS_AT_ONCE = 64
"""Looked for between two looks at the clock; about 0.1 ms."""
RECORDS_KEPT_MAX = 1 << 14
"""Of one segment: about 5 MB. To make one costs more than all the rest of finding it."""
_NODE_PART = slice(2, 16)
"""Segment, epoch and node id in a record (record.py)."""
_NODE_PART_BYTES = 14
_SEGMENT_START = struct.Struct("<HIQ")
_block_ref: Callable[[tuple[Key, Record | None]], BlockRef] = partial(tuple.__new__, BlockRef)
"""Makes one of a key and its record, which is none of those that are None, in less time."""


def found_here(
    nodes: NodeDirectory,
    signer: RecordSigner | None,
    keys: Sequence[Key],
    give_up_at: float | None = None,
) -> Iterator[BlockRef | None]:
    """Yield each of `keys` with the record that its node would publish; None when it is not found
    here.

    Without `give_up_at`, of nodes of the client's own index alone; then nobody is waited for, and
    a starved reader finds what lies here. With it, of all that serve the same keys, and it ends
    early at that time of the machine's clock.
    Tables of hints forget some keys: such a block is a miss until the index answers. Records are
    for processes that may be others.
    """
    now = nodes.machine.monotonic
    if give_up_at is None:
        # With a signer, only a signed record says that a node is to be believed.
        mapped: Sequence[Attached] = nodes.ours(now(), find=signer is None)
    else:
        mapped = nodes.every(now())
    with_disks = [attached for attached in mapped if attached.disks is not None]
    for batch in in_batches(keys, KEYS_AT_ONCE):
        if give_up_at is not None and now() >= give_up_at:
            return
        found = _found_in(mapped, signer, batch)
        yield from _or_on_disk(with_disks, signer, batch, found) if with_disks else found


def _or_on_disk(
    with_disks: Sequence[Attached],
    signer: RecordSigner | None,
    keys: Sequence[Key],
    found: Sequence[BlockRef | None],
) -> Iterator[BlockRef | None]:
    """Yield what was found in memory, else what the tables of disks have: these are not looked at
    beyond what is asked for."""
    for key, one in zip(keys, found, strict=True):
        yield one if one is not None else _on_disk(with_disks, signer, key)


def _on_disk(
    with_disks: Sequence[Attached], signer: RecordSigner | None, key: Key
) -> BlockRef | None:
    for attached in with_disks:
        block = None if attached.disks is None else attached.disks.find_readable(key)
        if block is not None:
            node = attached.announcement
            record = pack_record(key, disk_location(node.node_id, node.epoch, block))
            return BlockRef(key, record if signer is None else signer.signed(key, record))
    return None


def _found_in(
    mapped: Sequence[Attached], signer: RecordSigner | None, keys: Sequence[Key]
) -> list[BlockRef | None]:
    found: list[BlockRef | None] = [None] * len(keys)
    for attached in mapped:
        records = None
        if signer is None:  # a signature costs more than to look up what was made before
            records = attached.shm.records(list(keys), attached.start)
        if records is None:
            _look_up_kept(attached, signer, keys, found)
        elif None not in records and len(mapped) == 1:
            return list(map(_block_ref, zip(keys, records, strict=True)))
        else:
            for i, record in enumerate(records):
                if record is not None:
                    found[i] = BlockRef(keys[i], record)
    return found


def _look_up_kept(
    attached: Attached,
    signer: RecordSigner | None,
    keys: Sequence[Key],
    found: list[BlockRef | None],
) -> None:
    """Fill in what is in that segment; of a header that was seen before, what was made of it."""
    known = attached.records.get
    for i, (slot_id, image) in enumerate(attached.shm.hinted_each(keys)):
        seen = known(slot_id)
        if seen is None or seen[0] != image:
            if image[KEY_PART] != keys[i]:
                continue
            seen = _made_of(attached, signer, slot_id, image)
        if seen is not None and seen[1][0] == keys[i]:
            found[i] = seen[1]


def _made_of(
    attached: Attached, signer: RecordSigner | None, slot_id: int, image: bytes
) -> tuple[bytes, BlockRef] | None:
    """Return the header and the block that it describes, None unless that is whole and in the
    segment."""
    header = fields(image)
    if header is None or offset_of(attached.shm.superblock.size_bytes, slot_id, header) is None:
        return None
    generation, key, length, granule, _, _, checksum, _ = header
    node = attached.announcement
    record = pack_place(
        key, node.node_id, node.epoch, 0, slot_id, generation, granule, length, checksum
    )
    ref = BlockRef(key, record if signer is None else signer.signed(key, record))
    if len(attached.records) >= RECORDS_KEPT_MAX:
        attached.records.clear()
    attached.records[slot_id] = made = image, ref
    return made


def _leading(found: Iterable[BlockRef | None]) -> Iterator[BlockRef]:
    """Yield the leading blocks, up to the first that is missing."""
    for one in found:
        if one is None:
            return
        yield one


def _start(part: bytes) -> tuple[int, int, int]:
    """Return (node id, epoch, segment) of what `_NODE_PART` cuts out."""
    segment, epoch, node_id = _SEGMENT_START.unpack(part)
    return node_id, epoch, segment


class BlockLookup:
    """Answers a session's lookups. Thread-safe; never raises for a peer's fault, except
    `readable`."""

    def __init__(
        self,
        index: Index,
        reader: Reader,
        signer: RecordSigner | None,
        index_timeout_s: float,
    ) -> None:
        """`reader` counts misses, and says what can be read. `index_timeout_s` is what a lookup
        without a deadline of its own may still take on this host when the index has failed."""
        self._index = index
        self._reader = reader
        self._signer = signer
        self._index_timeout_s = index_timeout_s
        self._readability = reader.readability
        self._nodes = self._readability.nodes
        self._now = self._nodes.machine.monotonic

    def _found_here(
        self, keys: Sequence[Key], give_up_at: float | None = None
    ) -> Iterator[BlockRef | None]:
        """`found_here`, as far as this client can read it."""
        found = found_here(self._nodes, self._signer, keys, give_up_at)
        if not self._readability.verifies:
            return found
        return (one if one is not None and has_checksum(one.record) else None for one in found)

    def match(self, keys: Sequence[Key], timeout_s: float | None) -> PrefixMatch:
        """See `BlockStore.match`."""
        started = self._now()
        run = PrefixMatch(_leading(self._found_here(keys)))
        rest = keys[len(run) :]
        if rest:
            run.short = self._match_on(run, rest, started, timeout_s)
        return run

    def _match_on(
        self, run: PrefixMatch, keys: Sequence[Key], started: float, timeout_s: float | None
    ) -> MissReason | None:
        """Go on with `run` through `keys` by the index; why it ends before their end."""
        if timeout_s == 0.0:
            return MissReason.DEADLINE
        try:
            records = self._indexed(self._index.match, keys)
        except IndexUnavailableError as e:
            here = list(_leading(self._in_time(keys, started, timeout_s)))
            run += here
            return self._short(e, missed=len(here) < len(keys))
        genuine = len(records)
        if self._signer is not None:
            signed = (i for i, r in enumerate(records) if not self._reader.genuine(keys[i], r))
            genuine = next(signed, genuine)
        if timeout_s is not None and self._now() - started > timeout_s:
            self._reader.missed(MissReason.DEADLINE)
            return MissReason.DEADLINE
        before = len(run)
        run += _leading(self._in_reach(keys, records[:genuine], started, timeout_s))
        if len(run) - before < genuine:
            reason = self._unreadable(records[len(run) - before])
            self._reader.missed(reason)
            return reason
        if genuine < len(records):
            return MissReason.BAD_SIGNATURE
        return MissReason.ABSENT if genuine < len(keys) else None

    def lookup(self, keys: Sequence[Key], timeout_s: float | None) -> LookupResult:
        """See `BlockStore.lookup`."""
        started = self._now()
        answers = LookupResult(self._found_here(keys))
        unknown = [i for i, one in enumerate(answers) if one is None]
        if unknown:
            answers.short = self._look_up_on(answers, keys, unknown, started, timeout_s)
        return answers

    def _look_up_on(
        self,
        answers: LookupResult,
        keys: Sequence[Key],
        unknown: Sequence[int],
        started: float,
        timeout_s: float | None,
    ) -> MissReason | None:
        """Fill in by the index what is `unknown` of `answers`; what kept it from answering."""
        if timeout_s == 0.0:
            return MissReason.DEADLINE
        rest = [keys[i] for i in unknown]
        try:
            records = self._genuine(rest)
        except IndexUnavailableError as e:
            for i, one in zip(unknown, self._in_time(rest, started, timeout_s), strict=False):
                answers[i] = one
            return self._short(e, missed=None in answers)
        if timeout_s is not None and self._now() - started > timeout_s:
            self._reader.missed(MissReason.DEADLINE)
            return MissReason.DEADLINE
        refs = self._in_reach(rest, records, started, timeout_s)
        reason: MissReason | None = None
        for i, ref, record in zip(unknown, refs, records, strict=True):
            answers[i] = ref
            if reason is None and ref is None and record is not None:
                reason = self._unreadable(record)
        if reason is None or reason is MissReason.OUT_OF_REACH:
            return None
        self._reader.missed(reason)
        return reason

    def readable(self, keys: Sequence[Key]) -> list[Record | None]:
        """For each of `keys` its record in the index, if the node it names can be read from here.

        Raises `IndexUnavailableError`.
        """
        return self._reached(self._genuine(keys))

    def taken(self, keys: Sequence[Key]) -> set[Key]:
        """Return the `keys` whose block the index has where it cannot be read from here."""
        try:
            records = self._genuine(keys)
        except IndexUnavailableError:
            return set()
        rows = zip(keys, records, self._reached(records), strict=True)
        return {key for key, there, readable in rows if there is not None and readable is None}

    def _genuine(self, keys: Sequence[Key]) -> list[Record | None]:
        """For each of `keys` its record, signed as it must be; None where the index has none."""
        records = self._indexed(self._index.lookup, keys)
        if self._signer is None:
            return records
        return [
            record if record is not None and self._reader.genuine(key, record) else None
            for key, record in zip(keys, records, strict=True)
        ]

    @staticmethod
    def _indexed(ask: Callable[[Sequence[Key]], list[T]], keys: Sequence[Key]) -> list[T]:
        """Return what the index answers, asked for as many keys at a time as it takes. The first
        answer that is shorter than its question ends a run."""
        if len(keys) <= BATCH_KEYS_MAX:
            return ask(keys)
        records: list[T] = []
        for batch in in_batches(keys, BATCH_KEYS_MAX):
            answer = ask(batch)
            records += answer
            if len(answer) < len(batch):
                break
        return records

    def _in_reach(
        self,
        keys: Sequence[Key],
        records: Sequence[Record | None],
        started: float,
        timeout_s: float | None,
    ) -> list[BlockRef | None]:
        """Return each record whose node can be read from here. The index has one record for a key:
        where that is of a node that cannot, such as one in VRAM, this host's memory may have
        another."""
        reached = self._reached(records)
        refs: list[BlockRef | None]
        if None not in reached:
            return list(map(_block_ref, zip(keys, reached, strict=False)))
        refs = [None if r is None else BlockRef(k, r) for k, r in zip(keys, reached, strict=False)]
        away = [i for i, r in enumerate(records) if r is not None and refs[i] is None]
        if away:
            below = self._in_time([keys[i] for i in away], started, timeout_s)
            for i, found in zip(away, below, strict=False):
                refs[i] = found
        return refs

    def _reached(self, records: Sequence[Record | None]) -> list[Record | None]:
        """Return the records of nodes that can be read from here, None in place of the others.

        Headers are looked at when the block is read; here only who owns it matters, so a long
        run costs little.
        """
        now = self._now()
        self._nodes.check(now)
        parts = {record[_NODE_PART] for record in records if record is not None}
        sources = {part: self._source(part, now) for part in parts}
        away = {part for part, source in sources.items() if source is None}
        checked = {part for part, source in sources.items() if source and source.needs_checksum}
        if not away and not checked:
            return list(records)
        return [
            None
            if r is None
            or r[_NODE_PART] in away
            or (r[_NODE_PART] in checked and not has_checksum(r))
            else r
            for r in records
        ]

    def _unreadable(self, record: Record) -> MissReason:
        """Return why a block that is there cannot be read from here."""
        part = record[_NODE_PART]
        if len(part) != _NODE_PART_BYTES:
            return MissReason.OUT_OF_REACH
        if self._source(part, self._now()) is not None:
            return NO_CHECKSUM.reason
        return self._readability.why_not(*_start(part)).reason

    def _source(self, part: bytes, now: float) -> ReadSource | None:
        if len(part) != _NODE_PART_BYTES:
            return None
        node_id, epoch, segment = _start(part)
        return self._readability.find(node_id, epoch, now, segment=segment)

    def tiers(self, found: Sequence[BlockRef]) -> list[Tier]:
        """See `BlockStore.tiers`."""
        parts = [one.record[_NODE_PART] for one in found]
        by_part = {part: self._readability.tier(*_start(part)) for part in set(parts)}
        return [by_part[part] for part in parts]

    def sources(self, found: Sequence[BlockRef]) -> list[str]:
        """See `BlockStore.sources`."""
        near = (Tier.VRAM, Tier.HOST)
        return [
            tier.value if tier in near else f"{tier}:{one.record[_NODE_PART].hex()}"
            for one, tier in zip(found, self.tiers(found), strict=True)
        ]

    def _in_time(
        self, keys: Sequence[Key], started: float, timeout_s: float | None
    ) -> Iterator[BlockRef | None]:
        """Return what can be found without the index, in what is left of the time."""
        if timeout_s is None:
            give_up_at = self._now() + self._index_timeout_s
        else:
            give_up_at = started + timeout_s
        return self._found_here(keys, give_up_at)

    def _short(self, error: IndexUnavailableError, *, missed: bool) -> MissReason | None:
        """Return why not all was found: the index was not there to be asked."""
        reason = self._reader.index_failed(error, missed=missed)
        return reason if missed else None
