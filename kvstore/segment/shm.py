"""Makes a node's segment in POSIX shared memory: a file of payload, one of headers, in /dev/shm.

All pages are allocated at creation, so that a full /dev/shm is a clear error
at the start and never a SIGBUS in the middle of a write.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import xxhash

from kvstore.compiled import part
from kvstore.compiled.fence import FENCE
from kvstore.core.events import Bounds, Copy, Fill, Hold, Keep, Mark, Seal, Write
from kvstore.errors import NoSpaceError
from kvstore.limits import (
    SHM_RESERVE_BYTES,
    SLOT_BYTES_MIN,
)
from kvstore.machine import REAL, Machine
from kvstore.segment.header import (
    BOUNDS_PLACE,
    HEADER_BYTES,
    HELD_BYTES,
    HOME_PLACE,
    LIFE_PLACE,
    SEALED,
    SUPERBLOCK_BYTES,
    TERM_BYTES,
    Superblock,
    header_file_bytes,
    hint_of,
    hints_in,
    newest_superblock,
    of_term,
    pack_home,
    pack_parts,
    pack_superblock,
    superblock_place,
    term,
    word,
)
from kvstore.system.on_failure import on_failure
from kvstore.types import Key

if TYPE_CHECKING:
    from kvstore.core.recovery import Seen


def header_writer(
    wanted: str | None, module: str = part.BLOCK_WRITES
) -> Callable[..., None] | None:
    """Return what writes headers compiled; None where that in Python is to be used. Raises
    `ImportError` when `wanted` is `yes` and there is none that fits."""
    compiled = part.load(wanted, module, part.BLOCK_WRITES_SOURCE)
    return None if compiled is None else cast("Callable[..., None]", compiled.write_headers)


WRITE_HEADERS = header_writer(part.wanted())
"""The header writer of this process."""


def _terms(head: mmap.mmap, superblock: Superblock) -> memoryview:
    slots = superblock.size_bytes // SLOT_BYTES_MIN
    end = len(head) - slots * HELD_BYTES
    return memoryview(head)[end - slots * TERM_BYTES : end].cast("Q")


def _held(head: mmap.mmap, superblock: Superblock) -> memoryview:
    slots = superblock.size_bytes // SLOT_BYTES_MIN
    return memoryview(head)[len(head) - slots :]


def check_room(where: Path, size_bytes: int, machine: Machine = REAL) -> None:
    """Raise `NoSpaceError` when a segment of that size does not fit into the folder `where`."""
    # fallocate on tmpfs takes page after page until memory is gone; asking
    # first keeps a mistyped size from starving the whole machine.
    check_free(where, files_bytes(size_bytes), machine)


def check_free(where: Path, need_bytes: int, machine: Machine = REAL) -> None:
    """Raise `NoSpaceError` unless `where` has as much room, and `SHM_RESERVE_BYTES` for others."""
    free = free_bytes(where, machine)
    if need_bytes > free:
        raise NoSpaceError(
            f"{where}: {need_bytes} bytes asked for, {free + SHM_RESERVE_BYTES} free, "
            f"{SHM_RESERVE_BYTES} kept for others; use a smaller --size or enlarge it"
        )


def free_bytes(where: Path, machine: Machine = REAL) -> int:
    """Return the room for segments in `where`, without the `SHM_RESERVE_BYTES` left for everyone
    else."""
    return machine.room(where).free_bytes - SHM_RESERVE_BYTES


def never_fits(where: Path, size_bytes: int, machine: Machine = REAL) -> bool:
    """Return whether a segment of that size is larger than all there is."""
    return files_bytes(size_bytes) + SHM_RESERVE_BYTES > machine.room(where).total_bytes


def files_bytes(size_bytes: int) -> int:
    """Return the size of both files of a segment of that size together."""
    return size_bytes + header_file_bytes(size_bytes)


class OwnedHeads:
    """The header file of a node's own segment. Only the node's event loop uses it."""

    def __init__(
        self,
        base_path: Path,
        superblock: Superblock,
        *,
        home: str = "",
        reopen: bool = False,
        machine: Machine = REAL,
    ) -> None:
        """Create it; with `reopen`, take over what a former start of the node left at that path.

        `home` is the node's directory, for whoever finds the segment without it. Taking over
        raises `OSError` when it is not there and `ValueError` when it is not this node's or
        has another shape. It changes nothing before `adopt`.
        """
        self.superblock = superblock
        self._machine = machine
        self.head_path = base_path.with_suffix(".head")
        head_bytes = header_file_bytes(superblock.size_bytes)
        with contextlib.ExitStack() as undo:
            if not reopen:
                self._head = machine.create_memory(self.head_path, head_bytes)
                undo.callback(machine.remove_memory, self.head_path)
            self._lock = machine.own_memory(self.head_path)
            undo.callback(self._lock.release)
            if reopen:
                self._head = machine.reopen_memory(self.head_path, head_bytes)
            # A byte a page is at its end: that need not be whole words.
            self._words = memoryview(self._head)[: head_bytes & ~7].cast("Q")
            self._hints = hints_in(self._head, superblock)
            self._terms = _terms(self._head, superblock)
            self._held = _held(self._head, superblock)
            undo.pop_all()
        self._apply: dict[type, Callable[..., None]] = {
            Mark: self._mark,
            Seal: self._seal,
            Hold: self._hold,
            Keep: self._keep,
            Bounds: self._bounds,
        }
        self._closed = False
        if not reopen:
            raw, where = pack_superblock(superblock), pack_home(home)
            self._head[: len(raw)] = raw
            self._head[HOME_PLACE : HOME_PLACE + len(where)] = where
            self.sign_of_life()
            self._bounds(Bounds(0, 0, superblock.size_bytes // SLOT_BYTES_MIN))

    def seen(self) -> tuple[int, Seen]:
        """Return (last epoch, what the headers say) of a segment that was left behind.

        Raises `ValueError` when it is another node's, of another shape, or damaged.
        """
        found = newest_superblock(self._head[:SUPERBLOCK_BYTES])
        if found is None:
            raise ValueError("its superblock is damaged, or of another version")
        wanted = self.superblock
        if found._replace(epoch=wanted.epoch) != wanted or found.epoch >= wanted.epoch:
            raise ValueError(f"it is of {found}, not of one before {wanted}")
        generation, used = self._words[BOUNDS_PLACE >> 3], self._words[(BOUNDS_PLACE >> 3) + 1]
        bounds = Bounds(generation, used & 0xFFFFFFFF, used >> 32)
        with memoryview(self._head)[SUPERBLOCK_BYTES:] as rest:
            # By a node at its start alone: clients know nothing of its decisions.
            from kvstore.segment.scan import scan

            headers = rest[: len(self._held) * HEADER_BYTES]
            seen = scan(found.size_bytes, bounds, headers, self._held)
        terms = ((block.slot_id, self._terms[block.slot_id]) for block in seen.sealed)
        retained = [Keep(slot_id, *of_term(word)) for slot_id, word in terms if word]
        return found.epoch, seen._replace(retained=retained)

    def adopt(self) -> None:
        """Make the segment this start's: who maps it from here on finds this start's epoch."""
        place = superblock_place(self._head[:SUPERBLOCK_BYTES])
        raw = pack_superblock(self.superblock)
        self._head[place : place + len(raw)] = raw
        self.sign_of_life()

    def sign_of_life(self) -> None:
        """Note that the node lives, for who finds the segment when it is dead (abandoned.py)."""
        moment = self._machine.moment()
        # The boot goes last: until all of it is there, nobody believes the rest.
        self._words[(LIFE_PLACE >> 3) + 2] = moment.ran_ms
        self._words[(LIFE_PLACE >> 3) + 3] = moment.passed_ms
        self._head[LIFE_PLACE : LIFE_PLACE + len(moment.boot)] = moment.boot

    def apply(self, write: Write) -> None:
        self._apply[type(write)](write)

    def apply_all(self, writes: list[Write]) -> None:
        """Carry them out in their order: compiled where that is there (block_writes.c)."""
        if WRITE_HEADERS is None:
            for write in writes:
                self._apply[type(write)](write)
            return
        pages, hints = len(self._held), len(self._hints)
        WRITE_HEADERS(self._head, pages, hints, writes, Mark, Seal, self._apply_other)

    def _apply_other(self, write: Write) -> None:
        self._apply[type(write)](write)

    def _mark(self, write: Mark) -> None:
        self._words[(SUPERBLOCK_BYTES + write.slot_id * HEADER_BYTES) >> 3] = word(
            write.state, write.generation, write.granule, write.size
        )

    def _bounds(self, write: Bounds) -> None:
        self._words[BOUNDS_PLACE >> 3] = write.generation
        self._words[(BOUNDS_PLACE >> 3) + 1] = write.used_from << 32 | write.used_below

    def _seal(self, write: Seal) -> None:
        start = SUPERBLOCK_BYTES + write.slot_id * HEADER_BYTES
        self._head[start + 8 : start + HEADER_BYTES] = pack_parts(*write[1:])[8:]
        if FENCE is not None:  # payload and body are there before the word says so
            FENCE()
        self._words[start >> 3] = word(SEALED, write.generation)
        self._hint(write.key, write.slot_id)

    def _hint(self, key: Key, slot_id: int) -> None:
        """Write the hint that `key` is in this slot, at its second place if a block whose hint is
        there too has the first."""
        hints = self._hints
        place = hint_of(key, len(hints))
        before = hints[place]
        start = SUPERBLOCK_BYTES + before * HEADER_BYTES
        if before < len(self._held) and self._words[start >> 3] & 0xFF == SEALED:
            there = self._head[start + 8 : start + 40]
            if there != key and hint_of(there, len(hints)) | 1 == place | 1:
                place ^= 1
        hints[place] = slot_id

    def _hold(self, write: Hold) -> None:
        self._held[write.slot_id] = write.held

    def _keep(self, write: Keep) -> None:
        self._terms[write.slot_id] = term(write.until_s, write.tenant)

    def header(self, slot_id: int) -> bytes:
        start = SUPERBLOCK_BYTES + slot_id * HEADER_BYTES
        return self._head[start : start + HEADER_BYTES]

    def close(self, *, keep: bool = False) -> None:
        """Unmap and remove the file, once; with `keep`, leave it for the node's next start."""
        self._closed = True
        if not keep:
            self._machine.remove_memory(self.head_path)
        self._lock.release()
        self._words.release()
        self._hints.release()
        self._terms.release()
        self._held.release()
        # A failed look at the headers is still in the hands of whoever handles it.
        with contextlib.suppress(BufferError):
            self._head.close()


class OwnedShm(OwnedHeads):
    """A node's own segment in shared memory. Only the node's event loop uses it."""

    def __init__(
        self,
        base_path: Path,
        superblock: Superblock,
        *,
        home: str = "",
        reopen: bool = False,
        machine: Machine = REAL,
    ) -> None:
        """See `OwnedHeads`. Raises `NoSpaceError` when a new segment does not fit."""
        self.data_path = base_path.with_suffix(".data")
        if not reopen:
            check_room(base_path.parent, superblock.size_bytes, machine)
        # First the headers, whose lock says to whom both files belong.
        super().__init__(base_path, superblock, home=home, reopen=reopen, machine=machine)
        make = machine.reopen_memory if reopen else machine.create_memory
        with on_failure(super().close, keep=reopen):
            self._data = make(self.data_path, superblock.size_bytes)
        self._apply[Fill] = self._fill
        self._apply[Copy] = self._copy

    def _fill(self, write: Fill) -> None:
        if FENCE is not None:  # no header says SEALED of what was here any more
            FENCE()
        self._data[write.offset : write.offset + len(write.value)] = write.value

    def _copy(self, write: Copy) -> None:
        if FENCE is not None:  # as in `_fill`
            FENCE()
        self._data.move(write.destination, write.source, write.length)

    def checksum(self, offset: int, length: int) -> int:
        with memoryview(self._data) as data, data[offset : offset + length] as payload:
            return xxhash.xxh3_64_intdigest(payload)

    def checksum_steps(self, offset: int, length: int, step_bytes: int) -> Iterator[int | None]:
        """Yield None after each step of so many bytes, and at last the checksum. It is right if
        nothing was written there meanwhile."""
        state, end = xxhash.xxh3_64(), offset + length
        while end - offset > step_bytes:
            with memoryview(self._data) as data, data[offset : offset + step_bytes] as part:
                state.update(part)
            offset += step_bytes
            yield None
        with memoryview(self._data) as data, data[offset:end] as part:
            state.update(part)
        yield state.intdigest()

    def close(self, *, keep: bool = False) -> None:
        if self._closed:
            return
        if not keep:
            self._machine.remove_memory(self.data_path)
        super().close(keep=keep)
        self._data.close()
