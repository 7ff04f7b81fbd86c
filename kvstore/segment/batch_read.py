"""Reads many blocks out of one mapped segment at once: finds them by the table of hints, checks
their headers, copies, and looks at the headers again (rule 4).

There are two readers of one contract, `BatchReader`: one in Python, and one in C
(batch_read.c, built into the wheel where there is a compiler), which spends a fifth of the time
on what is not copying. `READER` is the one of this process, chosen at import: the compiled one
where it is there and fits, unless `KVSTORE_COMPILED` is `no`.

Both also say where blocks are without reading them: by the records that their node publishes
(`records`); the one in Python leaves that to the caller, who keeps what he has made.

Neither says that a block is missing. What is not plainly a hit (another block in its place, a
slot that is just being given out, a description to be read, an `out` that does not fit) is left to
the caller, who looks for it one by one.

Must never happen: a byte read outside of the segment, or written outside of the `out`, whatever a
header or a hint says; bytes of another block, or half of one, given for a key.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from kvstore.compiled import part
from kvstore.compiled.fence import FENCE
from kvstore.segment.copying import copy
from kvstore.segment.header import HEADER_BYTES, KEY_PART, SUPERBLOCK_BYTES, fields
from kvstore.segment.locate import offset_of
from kvstore.types import Key, Value

SOURCE = Path(__file__).with_suffix(".c")

Found = Callable[[int, int], object]
"""Called with (offset, bytes) of each block before it is copied. If it returns False, the block is
left to the caller, because its pages are lost."""
Copied = Callable[[], object]
"""Called after each copy, before the header is compared again."""
Values = tuple[list[Value], int]
"""A value for each key, or None, and how many bytes they have together."""


class MappedSegment(NamedTuple):
    """A segment as this process has it mapped."""

    head: mmap.mmap
    data: mmap.mmap
    hints: memoryview
    payload: memoryview


class BatchReader(Protocol):
    """Reads blocks of one segment."""

    name: str
    suits_one: bool
    """Whether a batch of one is read faster this way than by remembering where the block was."""

    def read(
        self,
        segment: MappedSegment,
        keys: list[Key],
        outs: list[Value],
        kinds: int,
        found: Found | None = None,
        copied: Copied | None = None,
    ) -> Values:
        """Return the value of each of `keys` that is here, None for the others, whose `out` may
        have been written to.

        An `out` is None, for a value of its own: `bytes`, of a block whose kind is a bit of
        `kinds`; or a writable, contiguous memoryview of plain bytes that has room: then the part of
        it that was written; or a tuple of such a view and descriptions, for a value of just its
        bytes that is described by one of them (b"": has no description), and is the only one of
        their lengths. For any other `out` the answer is None. Both lists are of one length, and are
        the reader's until it returns. Raises what `found` and `copied` raise, and `ValueError` for
        a segment that is closed or whose files do not belong together.
        """
        ...

    def copy_each(self, targets: list[memoryview], sources: list[memoryview]) -> None:
        """Copy each of `sources` over the target of the same place, all of format 'B' and
        contiguous. Targets that overlap a source have no defined content.

        Raises `ValueError` unless there are as many, and each pair is equally long, and
        `TypeError` or `BufferError` for a target that is read-only; some may be copied then.
        """
        ...

    def records(
        self, segment: MappedSegment, keys: list[Key], start: bytes
    ) -> list[bytes | None] | None:
        """Return the record (record.py) that the node would publish for each of `keys` that is
        here, unsigned; None for a key that is not plainly here. None for all where making them
        costs more than looking up what was made before.

        `start` is epoch and node id, as records have them (`node_start`). Raises as `read` does.
        """
        ...


class PythonReader:
    """Implements `BatchReader` where there is no compiled part."""

    name = "Python"
    suits_one = False

    def read(
        self,
        segment: MappedSegment,
        keys: list[Key],
        outs: list[Value],
        kinds: int,
        found: Found | None = None,
        copied: Copied | None = None,
    ) -> Values:
        """See `BatchReader`."""
        head, _, hints, payload = segment
        values: list[Value] = [None] * len(keys)
        mask, segment_bytes = len(hints) - 1, len(payload)
        blocks: list[tuple[int, int, bytes, int, int, Value, bytes]] = []
        for i, (key, out) in enumerate(zip(keys, outs, strict=True)):
            place = int.from_bytes(key[8:12], "little") & mask
            slot_id = hints[place]
            start = SUPERBLOCK_BYTES + slot_id * HEADER_BYTES
            image = head[start : start + HEADER_BYTES]
            if image[KEY_PART] != key:
                slot_id = hints[place ^ 1]
                start = SUPERBLOCK_BYTES + slot_id * HEADER_BYTES
                image = head[start : start + HEADER_BYTES]
                if image[KEY_PART] != key:
                    continue
            header = fields(image)
            offset = None if header is None else offset_of(segment_bytes, slot_id, header)
            if header is None or offset is None:
                continue
            size_bytes, described = header[2] - header[5], b""
            if type(out) is tuple:
                out, described = _as_described(out, size_bytes, header[5])
            takes = kinds >> header[4] & 1 if out is None else _takes(out, size_bytes)
            if takes and size_bytes:
                blocks.append((i, start, image, offset, size_bytes, out, described))
        if found is not None:
            blocks = [b for b in blocks if found(b[3], b[4] + len(b[6])) is not False]
        if FENCE is not None:
            FENCE()
        total = 0
        for i, start, image, offset, size_bytes, out, described in blocks:
            end = offset + size_bytes
            if described and payload[end : end + len(described)] != described:
                continue
            source = payload[offset:end]
            if out is None:
                value: Value = source.tobytes()
            else:
                value = out[:size_bytes]
                copy(value, source)
            if copied is not None:
                copied()
            if unchanged(head, start, image):
                values[i] = value
                total += size_bytes
        return values, total

    def copy_each(self, targets: list[memoryview], sources: list[memoryview]) -> None:
        """See `BatchReader`."""
        for target, source in zip(targets, sources, strict=True):
            copy(target, source)

    def records(
        self, segment: MappedSegment, keys: list[Key], start: bytes
    ) -> list[bytes | None] | None:
        """See `BatchReader`."""
        return None


def unchanged(head: mmap.mmap, start: int, image: bytes) -> bool:
    """Return whether the header at `start` is still what it was when the block was found (rule
    4)."""
    if FENCE is not None:
        FENCE()
    return head[start : start + HEADER_BYTES] == image


def _as_described(out: tuple[Any, ...], size_bytes: int, meta_length: int) -> tuple[object, bytes]:
    """Return the room in `out`, and which description the value must have; 7, which is no room,
    where it cannot be one of those in `out`."""
    room, *descriptions = out or (7,)
    if not all(type(one) is bytes for one in descriptions):
        return 7, b""
    described = next((one for one in descriptions if len(one) == meta_length), None)
    if described is None or type(room) is not memoryview or not _takes(room, size_bytes):
        return 7, b""
    return (room, described) if room.nbytes == size_bytes else (7, b"")


def _takes(out: object, size_bytes: int) -> bool:
    if type(out) is not memoryview:
        return False
    try:
        plain = out.format == "B" and out.ndim == 1 and out.c_contiguous and not out.readonly
        return plain and out.nbytes >= size_bytes
    except ValueError:  # released
        return False


class CompiledReader:
    """Implements `BatchReader` by the compiled part."""

    name = "compiled"
    suits_one = True

    def __init__(self, module: ModuleType) -> None:
        self._read = module.read
        self._copy_each = module.copy_each
        self._records = module.records

    def read(
        self,
        segment: MappedSegment,
        keys: list[Key],
        outs: list[Value],
        kinds: int,
        found: Found | None = None,
        copied: Copied | None = None,
    ) -> Values:
        """See `BatchReader`."""
        values: Values = self._read(segment.head, segment.data, keys, outs, kinds, found, copied)
        return values

    def copy_each(self, targets: list[memoryview], sources: list[memoryview]) -> None:
        """See `BatchReader`."""
        self._copy_each(targets, sources)

    def records(
        self, segment: MappedSegment, keys: list[Key], start: bytes
    ) -> list[bytes | None] | None:
        """See `BatchReader`."""
        records: list[bytes | None] = self._records(segment.head, segment.data, keys, start)
        return records


def choose(wanted: str | None, module: str = "kvstore.segment._batch_read") -> BatchReader:
    """Return the reader of this process, with `wanted` in `KVSTORE_COMPILED`. Raises `ImportError`
    when that is `yes` and there is no compiled part that fits."""
    compiled = part.load(wanted, module, SOURCE)
    return PythonReader() if compiled is None else CompiledReader(compiled)


READER = choose(part.wanted())
