"""Reads blocks from the disks of nodes of this host: asks no node, and believes only checksums.

The node's table says where a block lies (segment/disk/table.py). It is read past the page cache in
pieces of `DISK_PIECE_BYTES`, by up to `DISK_THREADS` threads for each disk, into pages of this
transport's own. Whoever has the next piece goes on with the checksum, while it is still in the
processor's cache. What has the checksum of its entry, and is in the table still, is copied into the
caller's memory, by the caller's thread: nothing that was not compared gets there, and nothing that
the kernel may yet write to.

A call to a disk that hangs cannot be taken back. So a read whose deadline passes, that is
interrupted, or whose transport is closed, starts nothing more and leaves the pages of its calls in
quarantine until they return. While those are all that there are, whoever comes fails at once.

A part of a disk that cannot be read is left alone until it is written anew; a disk that hangs, is
not the announced one, or fails in several parts in a row, for a while.
"""

from __future__ import annotations

import errno
import logging
import mmap
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import xxhash

from kvstore.circuit_breaker import Breaker, BreakerState
from kvstore.core.disk.base import DISK_PAGE
from kvstore.errors import PeerError
from kvstore.limits import DISK_PIECE_BYTES, DISK_STAGING_BYTES, DISK_THREADS
from kvstore.nodedir import Announcement
from kvstore.record import disk_location
from kvstore.system.fork import in_each_child
from kvstore.system.threads import DaemonThreads
from kvstore.transport.base import Outcome, Read, Transport, Wanted, check_wanted
from kvstore.transport.stream.transport import CHECKSUM_REASON
from kvstore.types import DiskBlock, Key

log = logging.getLogger("kvstore.client")

HUNG_S = 1.0
"""A read that had so long, and is not there at its deadline, hangs: the next ones are not tried."""
FAILURES_MAX = 3
RETRY_AFTER_S = 0.5
RETRY_AFTER_MAX_S = 60.0
UNREADABLE_REASON = "its part of the disk cannot be read"
SUSPECT_REASONS = (CHECKSUM_REASON, UNREADABLE_REASON)
"""What the node must look at itself."""
_BAD_PLACES = (errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO)
"""What is said of a part of a disk, and not of all of it."""
_GONE = Outcome(Read.MISS, "the node does not have it on disk (any more)")


class Decryption(Protocol):
    """Decrypts a block where it lies, in the order of its bytes; then says once whether all of it
    is what its node encrypted."""

    def update(self, piece: memoryview) -> object: ...

    def is_right(self) -> bool: ...


class File(Protocol):
    """A disk. Thread-safe."""

    path: str
    left_alone_until: float
    """In seconds of `time.monotonic`: look-ups leave it out before, since it could not be read."""

    def region_of(self, page: int) -> int:
        """Return a number that all pages of a part as large as a region have; below 0 while it
        is not known."""
        ...

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into`, whole pages, from there on. Raises `OSError`; may take for ever."""
        ...

    def opening(self, block: DiskBlock) -> Decryption | None:
        """Return what decrypts a block with a tag; None where nothing does. As `read`."""
        ...


class Disks(Protocol):
    """What one start of a node has on disk. Thread-safe."""

    @property
    def files(self) -> Mapping[int, File]:
        """Return the disks, by their numbers."""
        ...

    def find(self, key: Key) -> DiskBlock | None:
        """Return where the block lies now."""
        ...


class DiskStaging:
    """Lends pages, by the piece, to reads that they arrive in. Thread-safe."""

    def __init__(self, pieces_max: int) -> None:
        self._max = pieces_max
        self._lock = threading.Lock()
        self._free: list[memoryview] = []
        self._lent = self._hung = 0
        """Pieces that were taken and did not come back, and those among them in quarantine."""
        self._turns: deque[threading.Event] = deque()
        """Of those that wait, in the order of their coming: a large block is not overtaken for
        ever."""
        self._closed = False

    def take(self, count: int, deadline: float, *, wait: bool) -> list[memoryview] | None:
        """Return so many pieces, where they can be had by then; a block that is larger than all of
        them has them alone. Without `wait`, or where calls that hang have too many, at once."""
        turn = threading.Event()
        try:
            while True:
                with self._lock:
                    first = not self._turns or self._turns[0] is turn
                    if self._closed:
                        return None
                    if first and (self._lent + count <= self._max or not self._lent):
                        return self._taken(count)
                    none_left = self._hung and count > self._max - self._hung
                    left_s = deadline - time.monotonic()
                    if not wait or none_left or left_s <= 0:
                        return None
                    if turn not in self._turns:
                        self._turns.append(turn)
                    turn.clear()
                turn.wait(left_s)
        finally:
            with self._lock:
                if turn in self._turns:
                    self._turns.remove(turn)
                    self._wake_first()

    def _taken(self, count: int) -> list[memoryview] | None:
        try:
            pieces = [self._free.pop() if self._free else _pages() for _ in range(count)]
        except OSError:  # no memory
            return None
        self._lent += count
        return pieces

    def _wake_first(self) -> None:
        if self._turns:
            self._turns[0].set()

    def _wake_all(self) -> None:
        for turn in self._turns:
            turn.set()

    def quarantine(self, count: int) -> None:
        """So many pieces were given up, and may still be written to."""
        with self._lock:
            self._hung += count
            self._wake_all()

    def give_back(self, pieces: list[memoryview], *, hung: bool) -> None:
        """Nothing is written to them any more."""
        with self._lock:
            self._lent -= len(pieces)
            self._hung -= len(pieces) if hung else 0
            self._free += pieces[: self._max - len(self._free)]
            self._wake_first()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._free.clear()
            self._wake_all()


def _pages() -> memoryview:
    """Return pages of this process alone. Raises `OSError`."""
    return memoryview(mmap.mmap(-1, DISK_PIECE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class _Disk:
    """What this transport knows of one disk. Thread-safe."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.threads = DaemonThreads(DISK_THREADS, "kvstore-disk")
        self._lock = threading.RLock()
        self._breaker = Breaker(
            failures_max=FAILURES_MAX,
            retry_after_s=RETRY_AFTER_S,
            retry_after_max_s=RETRY_AFTER_MAX_S,
        )
        self._bad: dict[int, int] = {}
        """By the number of a region that could not be read, the lap that it had."""
        self._why = ""
        """Why it is left alone, as the log says; empty when it is not."""

    def why_not(self) -> str:
        """Return why it is not to be read now; empty when it is. What becomes of that must be
        told."""
        with self._lock:
            return "" if self._breaker.allows(time.monotonic()) else f"{self.path}: {self._why}"

    @property
    def left_alone_until(self) -> float:
        """Return when it is tried again; a time that is over where nothing keeps it from that."""
        is_open = self._breaker.state is BreakerState.OPEN
        return self._breaker.probe_at if is_open else float("-inf")

    def is_bad(self, region: int, lap: int) -> bool:
        return self._bad.get(region) == lap

    def succeeded(self) -> None:
        if not self._breaker.failures and self._breaker.state is BreakerState.CLOSED:
            return
        with self._lock:
            self._breaker.succeeded()
            if self._why and self._breaker.state is BreakerState.CLOSED:
                log.warning("disk %s can be read again", self.path)
                self._why = ""

    def failed(self, error: OSError, region: int, lap: int) -> None:
        """It could not be read there."""
        reason = error.strerror or str(error)
        if error.errno not in _BAD_PLACES or region < 0:
            self._left_alone(reason, hung=True)
            return
        with self._lock:
            if not self._bad:
                log.warning(
                    "a part of disk %s cannot be read (%s): its blocks are misses until it is "
                    "written anew; further parts are not told of",
                    self.path,
                    reason,
                )
            self._bad[region] = lap
        self._left_alone(reason, hung=False)

    def late(self, waited_s: float) -> None:
        """A read was not there at its deadline."""
        self._left_alone(f"no answer in {waited_s:.1f} s", hung=waited_s >= HUNG_S)

    def _left_alone(self, reason: str, *, hung: bool) -> None:
        with self._lock:
            self._breaker.failed(time.monotonic(), hung=hung)
            if self._breaker.state is BreakerState.OPEN and not self._why:
                self._why = reason
                log.warning(
                    "disk %s cannot be read for now: %s; its blocks are misses", self.path, reason
                )


class _Job:
    """One block on its way from the disk: each piece by a thread, compared in their order."""

    def __init__(
        self, number: int, block: DiskBlock, file: File, disk: _Disk, staging: DiskStaging
    ) -> None:
        self.number = number
        self.block = block
        self.file = file
        self.disk = disk
        self.began = 0.0
        self.error: OSError | None = None
        self._staging = staging
        self._done: queue.SimpleQueue[_Job | None] | None = None
        self._lock = threading.Lock()
        self.pieces: list[memoryview] = []
        self._users = 0
        """Threads that have to do with its pieces, the caller's among them."""
        self._given_up = self._hung = False
        self._digest = xxhash.xxh3_64()
        self._opening: Decryption | None = None
        """In place of the digest, where the block is encrypted."""
        self._arrived: set[int] = set()
        self._next = 0
        """The piece with which the checksum goes on."""
        self._digesting = False

    @property
    def pieces_wanted(self) -> int:
        return -(-self.block.length // DISK_PIECE_BYTES)

    def start(self, pieces: list[memoryview], done: queue.SimpleQueue[_Job | None]) -> None:
        """Read into `pieces`; puts itself into `done` once all is there, or some of it cannot
        be."""
        self.pieces, self._users, self._done = pieces, len(pieces) + 1, done
        self.began = time.monotonic()
        for number in range(len(pieces)):
            try:
                self.disk.threads.submit(partial(self._read, number))
            except PeerError as e:
                self._fail(OSError(errno.EAGAIN, str(e)))
                self._leave()

    def _read(self, number: int) -> None:
        try:
            if self._given_up:
                return
            at = number * DISK_PIECE_BYTES
            size_bytes = min(self.block.length - at, DISK_PIECE_BYTES)
            piece = self.pieces[number]
            page = self.block.place.page
            self.file.read(page * DISK_PAGE + at, piece[: -(-size_bytes // DISK_PAGE) * DISK_PAGE])
            self._went_on(number)
        except OSError as e:
            self._fail(e)
        finally:
            self._leave()

    def _went_on(self, number: int) -> None:
        """A piece is there: go on with the checksum, unless another thread does."""
        with self._lock:
            self._arrived.add(number)
            if self._digesting or number != self._next:
                return
            self._digesting = True
        if self.block.tag and self._opening is None:
            self._opening = self.file.opening(self.block)
        while True:
            left = self.block.length - self._next * DISK_PIECE_BYTES
            (self._opening or self._digest).update(self.pieces[self._next][:left])
            with self._lock:
                self._next += 1
                if self._next == len(self.pieces):
                    break
                if self._next not in self._arrived:
                    self._digesting = False
                    return
        assert self._done is not None
        self._done.put(self)

    def _fail(self, error: OSError) -> None:
        with self._lock:
            first, self.error = self.error is None, self.error or error
            self._given_up = True  # by the threads that come to its other pieces
        if first:
            assert self._done is not None
            self._done.put(self)

    @property
    def is_there(self) -> bool:
        return self._next == len(self.pieces)

    def is_right(self) -> bool:
        """Return whether all of it has the checksum of its entry, or its tag. To be asked once."""
        if self.block.tag:
            return self._opening is not None and self._opening.is_right()
        return self._digest.intdigest() == self.block.checksum

    def copy_to(
        self, into: Sequence[memoryview], copy: Callable[[memoryview, memoryview], None]
    ) -> None:
        at = 0
        for target in into:
            done = 0
            while done < target.nbytes:
                start = at % DISK_PIECE_BYTES
                size_bytes = min(DISK_PIECE_BYTES - start, target.nbytes - done)
                source = self.pieces[at // DISK_PIECE_BYTES][start : start + size_bytes]
                copy(target[done : done + size_bytes], source)
                done, at = done + size_bytes, at + size_bytes

    def give_up(self) -> None:
        """The caller looks at it no more; its pages go back when no thread has to do with them."""
        with self._lock:
            self._given_up = True
            self._hung = self._users > 1 and not self.is_there
        if self._hung:
            self._staging.quarantine(len(self.pieces))
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
        self._staging.give_back(self.pieces, hung=self._hung)


class DiskTransport(Transport):
    """Implements `Transport` for the nodes of this host whose disks `attach` finds."""

    name = "disk"

    def __init__(
        self,
        attach: Callable[[Announcement], Disks | None],
        copy: Callable[[memoryview, memoryview], None],
        staging_bytes: int = DISK_STAGING_BYTES,
    ) -> None:
        """Make the transport. `copy` copies the second of two equally long buffers over the
        first."""
        self._attach = attach
        self._copy = copy
        self._pieces_max = max(staging_bytes // DISK_PIECE_BYTES, 1)
        self._closed = False
        self.after_fork_in_child()
        in_each_child(self)

    def after_fork_in_child(self) -> None:
        """Begin anew: the parent's threads read into its pages."""
        self._lock = threading.RLock()
        self._staging = DiskStaging(self._pieces_max)
        self._disks: weakref.WeakKeyDictionary[File, _Disk] = weakref.WeakKeyDictionary()
        self._reads: set[queue.SimpleQueue[_Job | None]] = set()
        """Of reads under way."""

    def usable(self, node: Announcement) -> bool:
        """See `Transport`."""
        return bool(node.disks)

    def read(
        self, node: Announcement, wanted: Sequence[Wanted], deadline: float
    ) -> Sequence[Outcome]:
        """See `Transport.read`. Blocks that are damaged have one of `SUSPECT_REASONS`."""
        check_wanted(wanted)
        outcomes = [Outcome(Read.FAILED, "it was not read in time")] * len(wanted)
        disks = self._attach(node)
        if disks is None or self._closed:
            why = "its node's disks cannot be read from here (any more)"
            return [Outcome(Read.FAILED, why)] * len(wanted)
        waiting = self._jobs(disks, node, wanted, outcomes)
        done: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        under_way: dict[int, _Job] = {}
        with self._lock:
            self._reads.add(done)
        try:
            while waiting or under_way:
                while waiting and self._starts(waiting[0], under_way, done, deadline):
                    waiting.popleft()
                if not under_way:
                    break
                try:
                    job = done.get(timeout=max(deadline - time.monotonic(), 0.0))
                except queue.Empty:
                    break
                if job is None or time.monotonic() > deadline:
                    break
                outcomes[job.number] = self._outcome(job, disks, wanted[job.number])
                del under_way[job.number]
                job.give_up()
            else:
                return outcomes
            if not under_way and time.monotonic() < deadline:
                full = Outcome(Read.FAILED, "reads that hang have all memory for what is read")
                for job in waiting:
                    outcomes[job.number] = full
        finally:
            with self._lock:
                self._reads.discard(done)
            self._leave(list(under_way.values()), deadline)
        return outcomes

    def _jobs(
        self,
        disks: Disks,
        node: Announcement,
        wanted: Sequence[Wanted],
        outcomes: list[Outcome],
    ) -> deque[_Job]:
        """Return what is to be read of `wanted`; fills in the outcomes of the rest."""
        jobs: deque[_Job] = deque()
        asked: dict[int, str] = {}
        """By the number of a disk why it is not to be read."""
        for i, one in enumerate(wanted):
            block = disks.find(one.key)
            if block is None or disk_location(node.node_id, node.epoch, block) != one.location:
                outcomes[i] = _GONE
                continue
            number, page, lap = block.place
            file = disks.files.get(number)
            if file is None:
                outcomes[i] = Outcome(Read.FAILED, f"disk {number} was not announced")
                continue
            disk = self._disk(file)
            if number not in asked:
                asked[number] = disk.why_not()
            if asked[number]:
                outcomes[i] = Outcome(Read.FAILED, asked[number])
            elif disk.is_bad(file.region_of(page), lap):
                outcomes[i] = Outcome(Read.FAILED, "it lies where the disk could not be read")
            else:
                jobs.append(_Job(i, block, file, disk, self._staging))
        return jobs

    def _disk(self, file: File) -> _Disk:
        with self._lock:
            found = self._disks.get(file)
            if found is None:
                found = self._disks[file] = _Disk(file.path)
            return found

    def _starts(
        self,
        job: _Job,
        under_way: dict[int, _Job],
        done: queue.SimpleQueue[_Job | None],
        deadline: float,
    ) -> bool:
        """Return whether there was memory for the block, which is then read. Waits for some only
        where no other block will make room."""
        if time.monotonic() >= deadline:
            return False
        pieces = self._staging.take(job.pieces_wanted, deadline, wait=not under_way)
        if pieces is None:
            return False
        under_way[job.number] = job
        job.start(pieces, done)
        return True

    def _outcome(self, job: _Job, disks: Disks, one: Wanted) -> Outcome:
        """Copy the block, if it is the right one."""
        block = job.block
        if job.error is not None:
            job.disk.failed(job.error, job.file.region_of(block.place.page), block.place.lap)
            job.file.left_alone_until = job.disk.left_alone_until
            bad = job.error.errno in _BAD_PLACES
            return Outcome(Read.FAILED, UNREADABLE_REASON if bad else str(job.error))
        job.disk.succeeded()
        # What left the table meanwhile may have been written over, or be forbidden.
        still = disks.find(one.key)
        if still is None or still.checksum != block.checksum:
            return _GONE
        if not job.is_right():
            return Outcome(Read.MISS, CHECKSUM_REASON) if still.place == block.place else _GONE
        job.copy_to(one.into, self._copy)
        return Outcome(Read.HIT, kind=block.kind, meta_length=block.meta_length)

    def _leave(self, jobs: Sequence[_Job], deadline: float) -> None:
        """Give up what is not there; a disk is told once that it was waited for, and how long."""
        now = time.monotonic()
        waited: dict[_Disk, float] = {}
        for job in jobs:
            job.give_up()
            if not job.is_there:
                waited[job.disk] = max(waited.get(job.disk, 0.0), now - job.began)
        if now < deadline:
            return  # it was interrupted, or this transport was closed
        for disk, waited_s in waited.items():
            disk.late(waited_s)
        for job in jobs:
            job.file.left_alone_until = job.disk.left_alone_until

    def close(self) -> None:
        """See `Transport.close`."""
        self._closed = True
        self._staging.close()
        with self._lock:
            for done in self._reads:
                done.put(None)
