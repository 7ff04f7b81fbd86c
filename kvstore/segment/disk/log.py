"""Keeps what must not come back to a device: in memory for every look, and in a log that is durable
before anybody is answered.

The log is two halves with the same content. Each is a row of frames of 512 bytes, what no power
loss tears: generation, commit, number within the commit, own place, records, checksum. A checkpoint
is commit 0 of a new generation and has all that still counts; each commit then has pages of its own
and is written only after the sync of the one before. So after any power loss

    a frame is whole, blank, or of an earlier generation; anything else is damage
    every commit but the last one is whole
    the last one is whole, or was confirmed to nobody

and where only one half has a frame, the other has lost it. A frame that is damaged in both halves,
or a gap before the last commit, says that the log is not whole: then nothing of the device is
believed (device.py makes it anew).

A checkpoint goes to one half, and after a sync to the other. It leaves out what forbids only laps
that are written over, and whose regions' new headers were read back after a sync: until then an old
header may count again, with the blocks of its lap. Where it does not fit, everything up to half of
what is named is forbidden.
"""

from __future__ import annotations

import contextlib
import errno
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvstore.core.disk.base import DISK_PAGE
from kvstore.segment.disk.base import BlockFile, aligned
from kvstore.segment.disk.forbidden import RECORD, Forbidden, Record, record, reset_records
from kvstore.segment.disk.format import SUPERBLOCK_COPIES, Geometry, is_whole, with_checksum
from kvstore.types import DiskBlock, Key

FRAME_BYTES = 512
FRAMES_PER_PAGE = DISK_PAGE // FRAME_BYTES
HALF_BYTES_MIN = 128 << 10
"""A checkpoint takes at most half of a half; the resets that a node remembers (`RESETS_IDS_MAX`)
take 55 KiB."""
APPENDED_MAX = 1 << 16
"""Records that wait for a sync, one by one."""
_FRAME = struct.Struct("<QIIII")
RECORDS_PER_FRAME = (FRAME_BYTES - _FRAME.size - 8) // RECORD.size
_FILL = FRAME_BYTES - _FRAME.size - 8
_BLANK = bytes(FRAME_BYTES)
_BLANK_PAGE = bytes(DISK_PAGE)


class _Frame(NamedTuple):
    """One frame, as it was read; `place` is its number within the half, `number` within its
    commit of `parts`."""

    generation: int
    commit: int
    place: int
    number: int
    parts: int
    records: bytes


_BLANK_FRAME = _Frame(0, 0, 0, 0, 0, b"")


class Log:
    """What is forbidden on one device, in memory and in its log."""

    def __init__(
        self,
        file: BlockFile,
        geometry: Geometry,
        seed: int,
        durable_laps: Callable[[], Mapping[int, int]],
        failed: Callable[[str], None],
    ) -> None:
        """`durable_laps` tells the lap of each region, as its header on the disk says; it may sync
        and read. `failed` is called once, when something could not be made durable."""
        self.said = Forbidden()
        self._file, self._seed = file, seed
        self._geometry, self._half_bytes = geometry, geometry.log_bytes // 2
        self._durable_laps, self._failed = durable_laps, failed
        self._generation = self._commit = 0
        self._next_page = self._half_bytes // DISK_PAGE
        """Within a half; none is left until the first checkpoint of this run."""
        self._lock = threading.Lock()
        """Over `said` and what was appended, for moments."""
        self._writing = threading.Lock()
        """Over the file, for a sync."""
        self._appended: list[bytes] = []
        self._all_anew = False
        """More was appended than a commit takes: the next one is a checkpoint."""
        self._ticket = 0
        self._error: OSError | None = None

    # --- what is forbidden ---------------------------------------------------------

    def forbids(self, block: DiskBlock) -> bool:
        """Return whether a block of this device must not be found any more."""
        return self.said.forbids(block, self._geometry.region_of(block.place.page))

    def append(
        self,
        keys: Sequence[Key],
        namespace_ids: Sequence[int] | None,
        reset_number: int,
        up_to: int,
    ) -> int:
        """Forbid what a `Forbid` names, up to that order on this device: `forbids` says so at once.
        Return the ticket that `commit` has to reach. Without keys and namespaces it says only that
        this run deleted something, for devices that are away.

        A key that is not in the index needs no record, if whatever left the index before was
        forbidden (format.py), and nobody is answered before that is durable. Called by any thread;
        waits for nobody's I/O.
        """
        if namespace_ids is None:
            records = [record(Record.KEY, up_to, key) for key in keys]
            run = self.said.numbers[Record.RUN]
            if self.said.numbers[Record.DELETED_IN] != run:
                records.append(record(Record.DELETED_IN, run))
        else:
            kind = Record.NAMESPACE if reset_number else Record.CLEARED
            records = [record(kind, up_to, one) for one in namespace_ids]
            records = records or [record(Record.ALL_UP_TO, up_to)]
            if reset_number:
                records += reset_records(reset_number, namespace_ids)
        return self.add(records)

    def forbid_region(self, region: int, below_lap: int) -> int:
        """Forbid what earlier laps wrote to a region; return the ticket. That is durable before its
        blocks leave the index, because it is to be written over or fails: the new header may be
        lost, or the region be readable at the next start, and then they would all be back."""
        return self.add([record(Record.REGION, (below_lap << 32) - 1, region)])

    def note_closed(self, uuid: bytes) -> int:
        """Note that another device was closed for good; return the ticket."""
        return self.add([record(Record.CLOSED, 0, uuid)])

    def add(self, records: Sequence[bytes]) -> int:
        """Take in records: they hold at once, and are durable with the ticket that this returns."""
        with self._lock:
            self.said.add(records)
            self._appended += records
            self._ticket += 1
            if len(self._appended) > APPENDED_MAX:  # a sync hangs; all of it is in `said`
                self._appended, self._all_anew = [], True
                self._fitting()
            return self._ticket

    def _fitting(self) -> list[bytes]:
        """Return all that is forbidden in as many records as a checkpoint takes."""
        room = self._half_bytes // FRAME_BYTES // 2 * RECORDS_PER_FRAME
        while len(records := list(self.said.records())) > room:
            self.said.fold()
        return records

    # --- making it durable ------------------------------------------------------------

    def commit(self) -> int:
        """Make durable all that was appended, with one sync; return the last ticket of it.

        Raises `OSError`: what was appended is not confirmed, and will not be; every later call
        raises again, and the device is closed for good.
        """
        with self._exclusively():
            with self._lock:
                if not self._all_anew:
                    records, self._appended, ticket = self._appended, [], self._ticket
            if self._all_anew:
                return self._checkpoint()
            if not records:
                return ticket
            frames = -(-len(records) // RECORDS_PER_FRAME)
            pages = -(-frames // FRAMES_PER_PAGE)
            if self._next_page + pages > self._half_bytes // DISK_PAGE:
                return self._checkpoint()
            self._commit += 1
            self._write(records, (0, 1))
            self._file.sync()
            return ticket

    def checkpoint(self) -> None:
        """Write all of it anew. Raises as `commit`."""
        with self._exclusively():
            self._checkpoint()

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Have the file alone, and give the log up when it fails."""
        with self._writing:
            if self._error is not None:
                raise self._error
            try:
                yield
            except OSError as error:
                self._error = OSError(errno.EIO, f"its log is closed, since it failed: {error}")
                self._failed(f"its log failed ({error})")
                raise

    def _checkpoint(self) -> int:
        laps = self._durable_laps()
        with self._lock:
            self.said.forget((min(laps.values()) << 32) - 1, laps)
            records = self._fitting()
            self._appended, self._all_anew, ticket = [], False, self._ticket
        self._generation, self._commit, first_page = self._generation + 1, 0, 0
        for half in (0, 1):
            self._next_page = first_page
            self._write(records, (half,))
            self._file.sync()
        return ticket

    def _write(self, records: Sequence[bytes], halves: Sequence[int]) -> None:
        """Write a commit to the next pages of these halves."""
        each = range(0, len(records), RECORDS_PER_FRAME)
        place = self._next_page * FRAMES_PER_PAGE
        raw = b"".join(
            with_checksum(
                _FRAME.pack(self._generation, self._commit, place + index, index, len(each))
                + b"".join(records[start : start + RECORDS_PER_FRAME]).ljust(_FILL, b"\0"),
                self._seed,
            )
            for index, start in enumerate(each)
        )
        pages = -(-len(raw) // DISK_PAGE)
        buffer = aligned(pages * DISK_PAGE)
        buffer[: len(raw)] = raw
        for half in halves:
            self._file.write(self._start(half) + self._next_page * DISK_PAGE, [buffer])
        self._next_page += pages

    def _start(self, half: int) -> int:
        return SUPERBLOCK_COPIES * DISK_PAGE + half * self._half_bytes

    # --- a start ----------------------------------------------------------------------

    def make(self) -> None:
        """Write an empty log over whatever is there. Raises as `commit`."""
        blank = aligned(self._half_bytes)
        for half in (0, 1):
            self._file.write(self._start(half), [blank])
        self.checkpoint()

    def read(self) -> bool:
        """Take over what the log says; return whether it is whole. Raises `OSError`."""
        commits: defaultdict[tuple[int, int], dict[int, _Frame]] = defaultdict(dict)
        halves = [self._read_half(half) for half in (0, 1)]
        for place in range(self._half_bytes // FRAME_BYTES):
            at = place * FRAME_BYTES
            if at % DISK_PAGE == 0:
                is_blank = all(half[at : at + DISK_PAGE] == _BLANK_PAGE for half in halves)
            if is_blank:
                continue
            frames = [self._frame(half[at : at + FRAME_BYTES], place) for half in halves]
            if frames == [None, None]:
                return False
            for frame in frames:
                if frame is not None and frame.generation:
                    commits[frame.generation, frame.commit][frame.number] = frame
        whole = {
            at for at, parts in commits.items() if len(parts) == next(iter(parts.values())).parts
        }
        generation = max((g for g, commit in whole if commit == 0), default=0)
        last = max((commit for g, commit in commits if g == generation), default=0)
        needed = {(generation, commit) for commit in range(last)}
        # A checkpoint that was not finished has no commits behind it.
        unfinished = {commit for g, commit in commits if g > generation}
        if not generation or not needed <= whole or not unfinished <= {0}:
            return False
        counted = whole & (needed | {(generation, last)})
        bodies = [frame.records for at in counted for frame in commits[at].values()]
        # Together: the records of one reset may be in two frames.
        self.said.add(
            body[i : i + RECORD.size] for body in bodies for i in range(0, len(body), RECORD.size)
        )
        self._generation = max(g for g, _ in commits)
        return True

    def _read_half(self, half: int) -> bytes:
        """Return a half as it is; damage where it cannot be read."""
        pages = aligned(self._half_bytes)
        try:
            self._file.read(self._start(half), pages)
        except OSError:
            return b"?" * self._half_bytes
        return bytes(pages)

    def _frame(self, raw: bytes, place: int) -> _Frame | None:
        """Return a frame, of generation 0 where it is blank; None where it is damaged."""
        if raw == _BLANK:
            return _BLANK_FRAME
        generation, commit, own_place, number, parts = _FRAME.unpack_from(raw)
        if not is_whole(raw, self._seed) or own_place != place:
            return None
        return _Frame(generation, commit, place, number, parts, raw[_FRAME.size : -8])
