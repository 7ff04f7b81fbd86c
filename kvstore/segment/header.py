"""Slot headers in shared memory: 64 bytes, one cache line, written by the node alone.

    0   u64  word: generation << 16 | state; see below for RESERVED
    8   32s  key
    40  u32  length
    44  u8   granule: with which KiB of its page the slot begins, 0 to 3
    45  u8   kind
    46  u16  meta length (bytes at the end of the payload that describe it)
    48  u64  payload checksum (xxh3-64, 0: none)
    56  u32  namespace id
    60  u32  CRC-32 of bytes 0..60, with the word as it is when SEALED

A header says one of three states, of those that core/memory/slots.py knows:

    FREE      readers miss; the body may still describe the block that was here last
    RESERVED  readers miss; one writer may write the payload (rule 5)
    SEALED    the body describes the block, and its payload is in place

The way is FREE, RESERVED, SEALED, FREE, or from RESERVED back to FREE. The node's event loop
alone writes headers, as the core says (segment/shm.py); everybody else maps them read-only, looks
at all 64 bytes, copies the payload, and looks again (rule 4).

The word is one aligned 8-byte store, so a reader sees either the old or the
new state. The body is written while the word says RESERVED, the SEALED word
last; a crash in between leaves a header that nobody trusts, and the CRC covers
what a torn write could leave. A RESERVED word says where the slot is, as the body
still describes the block before: a restarted node must keep off it (rule 5). It is
the last 24 bits of the generation << 40 | granules << 16 | granule << 8 | state.

Must never happen: a word that says SEALED before body and payload are written; a generation that
was used before, over restarts too; a slot that begins within another one.

Each page of the segment has a header, which is that of the slot that begins in the page, if
one does.

On the first page, beside the two copies of the superblock, two words say what a
restart would else have to look for: a generation that is above all there are, and
from which page to which (u32 each) none was ever used. Beside them is the node's last sign of
life (host_clock.py), for whoever finds the segment when it is dead; segments of before have none.

After the headers comes the table of hints, u32 slot ids for readers on this host: where a
key may be. A key has two places in it, side by side; a third key with the same places
takes one over, and nothing is ever taken out: the header says whether a hint is true.

Then come 8 bytes a page: until which second of the node's clock the block of the slot that begins
there is retained, u32, and for which tenant, u32; 0: it is not. For tenant 2**32 - 1 it is when the
life of the block ends (core/bounded.py). Only a SEALED header's counts.

Last comes one byte a page: 1 while a client has the slot that begins there pinned, and so may
look at its payload without checking.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from kvstore.limits import SLOT_BYTES_MIN
from kvstore.system.host_clock import MOMENT_BYTES, Moment
from kvstore.types import Key

SHM_DIR = Path("/dev/shm")
"""Where segments lie."""

HEADER_BYTES = 64
HINT_BYTES = 4
TERM_BYTES = 8
HELD_BYTES = 1
HINTS_PER_SLOT = 4
KEY_PART = slice(8, 40)
FREE, RESERVED, SEALED = 0, 1, 2
_HEADER = struct.Struct("<Q32sIBBHQII")
_BODY = struct.Struct("<Q32sIBBHQI")
assert _HEADER.size == HEADER_BYTES
_WHOLE = 0x2144DF1C
"""The CRC-32 of any bytes followed by their own CRC-32, as in a whole SEALED header."""


class Header(NamedTuple):
    """What a SEALED header says; sizes in bytes, `granule` as in the table above."""

    generation: int
    key: Key
    length: int
    granule: int
    kind: int
    meta_length: int
    checksum: int
    namespace_id: int


Fields = tuple[int, Key, int, int, int, int, int, int]
"""The parts of a `Header`, in its order."""


GENERATION_MAX = (1 << 48) - 1


_SIZE_BITS = 24
_LOW_GENERATION = (1 << 24) - 1


def word(state: int, generation: int, granule: int = 0, size: int = 0) -> int:
    """Return the first 8 bytes of a header. Only those of a RESERVED slot contain `granule` and
    `size` (in granules)."""
    if state != RESERVED:
        return generation << 16 | state
    return (generation & _LOW_GENERATION) << 40 | size << 16 | granule << 8 | state


def of_reserved(w: int, last_generation: int) -> tuple[int, int, int]:
    """Return (generation, granule, size in granules) of a word that says RESERVED. The word has the
    lower bits of the generation; the result is the highest that they can mean up to
    `last_generation`, so no lower than it was."""
    low = w >> 40
    generation = last_generation - ((last_generation - low) & _LOW_GENERATION)
    return max(generation, low), w >> 8 & 0xFF, w >> 16 & (1 << _SIZE_BITS) - 1


def pack(header: Fields) -> bytes:
    """Return the 64 bytes of a sealed slot."""
    return pack_parts(*header)


def pack_parts(
    generation: int,
    key: Key,
    length: int,
    granule: int,
    kind: int,
    meta_length: int,
    checksum: int,
    namespace_id: int,
) -> bytes:
    """Do as `pack`, from the parts of a header."""
    w = generation << 16 | SEALED
    raw = _BODY.pack(w, key, length, granule, kind, meta_length, checksum, namespace_id)
    return raw + crc32(raw).to_bytes(4, "little")


def unpack(raw: bytes) -> Header | None:
    """Return the header in `raw`, None unless it is SEALED and whole."""
    seen = fields(raw)
    return Header(*seen) if seen is not None else None


def fields(raw: bytes) -> Fields | None:
    """Return what `unpack` returns as a plain tuple, because readers make one for every block they
    look at."""
    w, key, length, granule, kind, meta_length, checksum, namespace_id, _ = _HEADER.unpack(raw)
    if w & 0xFF != SEALED or crc32(raw) != _WHOLE:
        return None
    return w >> 16, key, length, granule, kind, meta_length, checksum, namespace_id


def body_of(raw: bytes, generation: int) -> Fields | None:
    """Return what was sealed in a slot in that generation, if its body still says so."""
    return fields(word(SEALED, generation).to_bytes(8, "little") + raw[8:])


def term(until_s: int, tenant: int) -> int:
    """Return what says that a block is retained; 0: that it is not."""
    return tenant << 32 | until_s if until_s else 0


def of_term(word: int) -> tuple[int, int]:
    """Return (second, tenant) of a `term`."""
    return word & 0xFFFFFFFF, word >> 32


def hints_of(slots: int) -> int:
    """Return the entries of the table of hints, a power of two: `HINTS_PER_SLOT` a slot, or
    more."""
    return HINTS_PER_SLOT << (slots - 1).bit_length()


def header_file_bytes(size_bytes: int) -> int:
    """Return the size of the header file of a segment of `size_bytes`."""
    slots = size_bytes // SLOT_BYTES_MIN
    each = HEADER_BYTES + TERM_BYTES + HELD_BYTES
    return SUPERBLOCK_BYTES + slots * each + hints_of(slots) * HINT_BYTES


def hints_in(head: mmap.mmap, superblock: Superblock) -> memoryview:
    """Return the table of hints in a mapped header file."""
    slots = superblock.size_bytes // SLOT_BYTES_MIN
    start = SUPERBLOCK_BYTES + slots * HEADER_BYTES
    return memoryview(head)[start : start + hints_of(slots) * HINT_BYTES].cast("I")


def hint_of(key: Key, hints: int) -> int:
    """Return the first place of `key` in a table of `hints` entries; its second is that one ^ 1."""
    return int.from_bytes(key[8:12], "little") & hints - 1


SUPERBLOCK_BYTES = 4096
SUPERBLOCK_COPY = 2048
"""Where the second copy stands: a new start of the node writes the older of the two, so that
one of them is whole whenever it is killed."""
HOME_PLACE = 1024
"""Where the node's directory stands, between the copies: u16 length, then the path."""
_SUPERBLOCK = struct.Struct("<8sIIQQI")
BOUNDS_PLACE = 3072
"""Where the two words of `Bounds` are, behind the copies."""
LIFE_PLACE = 3200
"""Where the last sign of life is, behind the bounds."""
_MAGIC = b"kvstore1"
LAYOUT_VERSION = 6


class Superblock(NamedTuple):
    """The first page of a header file: whose segment this is, and how large."""

    node_id: int
    epoch: int
    segment: int
    size_bytes: int


def pack_superblock(block: Superblock) -> bytes:
    raw = _SUPERBLOCK.pack(
        _MAGIC,
        LAYOUT_VERSION,
        block.segment,
        block.node_id,
        block.size_bytes,
        block.epoch,
    )
    return raw + crc32(raw).to_bytes(4, "little")


def unpack_superblock(raw: bytes) -> Superblock | None:
    """Return the superblock that `raw` starts with; None unless it is whole and of this layout
    version."""
    body = raw[: _SUPERBLOCK.size]
    if crc32(body).to_bytes(4, "little") != raw[_SUPERBLOCK.size : _SUPERBLOCK.size + 4]:
        return None
    magic, version, segment, node_id, size_bytes, epoch = _SUPERBLOCK.unpack(body)
    if magic != _MAGIC or version != LAYOUT_VERSION:
        return None
    return Superblock(node_id, epoch, segment, size_bytes)


def layout_of(page: bytes) -> int | None:
    """Return the layout version that a header file's first page names, ours or another; None when
    it is no such page."""
    if len(page) < _SUPERBLOCK.size:
        return None
    magic, version, *_ = _SUPERBLOCK.unpack(page[: _SUPERBLOCK.size])
    return version if magic == _MAGIC else None


def newest_superblock(page: bytes) -> Superblock | None:
    """Return the superblock of the last start, of the copies on a header file's first page; None
    when neither copy is whole."""
    copies = [unpack_superblock(page), unpack_superblock(page[SUPERBLOCK_COPY:])]
    return max((c for c in copies if c is not None), key=lambda c: c.epoch, default=None)


def superblock_place(page: bytes) -> int:
    """Return the offset on a header file's first page at which the next start writes its
    superblock."""
    return SUPERBLOCK_COPY if unpack_superblock(page) == newest_superblock(page) else 0


def pack_home(home: str) -> bytes:
    """Return what stands at `HOME_PLACE`: the directory of the segment's node, or nothing if it is
    too long."""
    raw = os.fsencode(home)
    if len(raw) > SUPERBLOCK_COPY - HOME_PLACE - 2:
        raw = b""
    return len(raw).to_bytes(2, "little") + raw


def home_of(page: bytes) -> Path | None:
    """Return what `pack_home` wrote on that page, None when it says nothing."""
    length = int.from_bytes(page[HOME_PLACE : HOME_PLACE + 2], "little")
    raw = page[HOME_PLACE + 2 : SUPERBLOCK_COPY][:length]
    whole = 0 < length == len(raw) and b"\0" not in raw
    return Path(os.fsdecode(raw)) if whole else None


def life_of(page: bytes) -> Moment | None:
    """Return the last sign of life of the node whose header file begins with that page; None where
    it left none."""
    return Moment.unpack(page[LIFE_PLACE : LIFE_PLACE + MOMENT_BYTES])
