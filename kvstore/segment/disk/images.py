"""Encodes blocks as a node's table has them, and keeps many as they are read from a disk.

    0   32s  key
    32  u64  checksum of the payload (xxh3-64, never 0)
    40  u32  first disk page
    44  u32  length; 0: the entry is free
    48  u32  lap
    52  u32  namespace id
    56  u16  meta length
    58  u8   kind << 4 | device
    59  u8   1: the block was used since it was put
    60  u32  CRC-32 of bytes 0..59

A start of a node enters millions of them: `COMPILED` (images.c), where it is there, makes and
enters images without an object for each block. Without it there are plain lists of blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Sequence
from itertools import compress, count
from operator import itemgetter
from pathlib import Path
from typing import overload
from zlib import crc32

from kvstore.compiled import part
from kvstore.types import DiskBlock, DiskPlace, Key, Kind

_IMAGE = struct.Struct("<32sQIIIIHBBI")
_BODY = struct.Struct("<32sQIIIIHB")
_KEY = struct.Struct("<32s32x")
_IS_VALUE = bytes(mixed >> 4 != Kind.BLOCK for mixed in range(256))
"""Whether a block is none of an engine's, by its kind and device."""
IMAGE_BYTES = _IMAGE.size
assert IMAGE_BYTES == 64
IMAGE_WORDS = IMAGE_BYTES // 4
LENGTH, LAP, NAMESPACE = 11, 12, 13
"""Which words of an image these are."""
KIND, USED = 58, 59
MODULE = "kvstore.segment.disk._images"
SOURCE = Path(__file__).with_suffix(".c")
COMPILED = part.load(part.wanted(), MODULE, SOURCE)


def pack(block: DiskBlock) -> bytes:
    """Return the image of a block that was not used yet."""
    key, (device, page, lap), length, kind, meta_length, checksum, namespace_id, _ = block
    what = (page, length, lap, namespace_id, meta_length, kind << 4 | device)
    body = _BODY.pack(key, checksum, *what)
    return body + b"\0" + crc32(body).to_bytes(4, "little")


def unpack(image: bytes) -> DiskBlock | None:
    """Return what the image says; None when it is free or torn."""
    key, checksum, page, length, lap, namespace_id, meta_length, mixed, _, crc = _IMAGE.unpack(
        image
    )
    if crc != crc32(image[:USED]) or not length:
        return None
    place = DiskPlace(mixed & 15, page, lap)
    return DiskBlock(key, place, length, mixed >> 4, meta_length, checksum, namespace_id)


class Images(Sequence[DiskBlock]):
    """Holds blocks as images. An object is made of each that is looked at."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def __len__(self) -> int:
        return len(self.raw) // IMAGE_BYTES

    @overload
    def __getitem__(self, at: int) -> DiskBlock: ...
    @overload
    def __getitem__(self, at: slice) -> Images: ...
    def __getitem__(self, at: int | slice) -> DiskBlock | Images:
        if isinstance(at, slice):
            start, stop, _ = at.indices(len(self))
            return Images(self.raw[start * IMAGE_BYTES : stop * IMAGE_BYTES])
        start = range(len(self))[at] * IMAGE_BYTES
        block = unpack(self.raw[start : start + IMAGE_BYTES])
        assert block is not None
        return block

    def named(
        self, keys: Container[Key], namespace_ids: Container[int], *, values: bool = False
    ) -> set[int]:
        """Return which have one of these keys or namespaces, and with `values` which are not blocks
        of engines."""
        found: set[int] = set()
        # No line of Python for each block: a start looks at millions.
        if keys:
            its_keys = map(itemgetter(0), _KEY.iter_unpack(self.raw))
            found.update(compress(count(), map(keys.__contains__, its_keys)))
        if namespace_ids:
            words = memoryview(self.raw).cast("I")[NAMESPACE::IMAGE_WORDS].tolist()
            found.update(compress(count(), map(namespace_ids.__contains__, words)))
        if values:
            found.update(compress(count(), self.raw[KIND::IMAGE_BYTES].translate(_IS_VALUE)))
        return found

    def without(self, which: set[int]) -> Images:
        """Return all but those with these numbers."""
        parts, start = [], 0
        for at in sorted(which):
            parts.append(self.raw[start : at * IMAGE_BYTES])
            start = (at + 1) * IMAGE_BYTES
        return Images(b"".join([*parts, self.raw[start:]])) if which else self


def joined(parts: Sequence[Sequence[DiskBlock]]) -> Sequence[DiskBlock]:
    """Return the blocks of all parts, which are images or none is."""
    images = [part.raw for part in parts if isinstance(part, Images)]
    return Images(b"".join(images)) if images else [block for part in parts for block in part]
