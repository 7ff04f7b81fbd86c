"""Makes an object of a region of a disk device, for other hosts, and reads its head.

    head       magic, version, length; whose region it is, how that device is divided, the resets
               that it had carried out, and the entries of the blocks that follow
    tag        HMAC (SHA-256) of the head
    payloads   in the order of the entries, in whole pages, as they lie on the device
    tag        HMAC of head and payloads

The first tag says whether the rest is worth reading and its resets may be believed; no block counts
before the second one was compared. The head has the object's name, so none passes for another.

A region is read past its node, which may write to it: either its header has the same lap
afterwards, or all of it is given up. In it are blocks of engines that the log did not forbid, and
no others: a value's key names no content. Payloads are compared with their checksums when they are
read from a disk, as ever.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable, Iterator, Sequence

import msgpack

from kvstore.core.disk.base import DISK_PAGE, RegionState
from kvstore.core.resets import Resets
from kvstore.errors import PeerError, UsageError
from kvstore.segment.disk.base import BlockFile, aligned
from kvstore.segment.disk.device import DiskDevice, superblock_of
from kvstore.segment.disk.format import (
    Geometry,
    lap_in,
    pack_entry,
    pages_of,
    sealing_in,
    seed_of,
    unpack_entries,
)
from kvstore.segment.disk.seal import RegionSeal
from kvstore.types import DiskBlock, DiskKeys, Kind

SUFFIX = ".region"
PIECE_BYTES = 8 << 20
"""Bytes that are read from a disk, sent or received at a time."""
HEAD_BYTES_MAX = 4 << 20
"""A region has at most 16,384 entries, 2 MiB, and the resets that a node remembers take 9 KiB."""
TAG_BYTES = 32
_START = struct.Struct("<8sII")
_MAGIC, _VERSION = b"kvobject", 1
Read = Callable[[int], bytes]
"""Returns the next so many bytes of an object; fewer at its end alone."""


class RegionObjectError(PeerError):
    """A region cannot be an object now, or an object is refused. Others may do."""


def object_name(uuid: bytes, region: int, lap: int) -> str:
    """Return the name of an object: what is behind the last dash says which is newer."""
    return f"{uuid.hex()}-{region}-{lap:010}{SUFFIX}"


def opened(file: BlockFile) -> DiskDevice:
    """Return a device to read alone, with what its log says by now; a node may use it. Raises as
    `DiskDevice.open`, and `RegionObjectError`."""
    superblock = superblock_of(file)
    if superblock is None:
        raise UsageError("disk", file.name, "must be the disk of a node that has used it")
    device = DiskDevice(file, 0, superblock, {})
    if not device.log.read():
        raise RegionObjectError(f"{file.name}: its log is damaged, or was being written: repeat it")
    return device


class RegionObject:
    """A region, as an object that can be sent once."""

    def __init__(self, file: BlockFile, state: RegionState) -> None:
        """Read its entries; `blocks` is empty where nothing may leave. Raises as `opened`."""
        self._device, self._state = opened(file), state
        self.name = object_name(self._device.uuid, *state)
        page = self._device.header(state.region)
        self._sealing = sealing_in(page) if lap_in(page, self._device.uuid, state.region) else None
        forbids = self._device.log.forbids
        found = reversed(self._device.blocks(state, tags=self._sealing is not None))
        self.blocks = [one for one in found if one.kind == Kind.BLOCK and not forbids(one)]

    def pieces(self, secret: bytes) -> Iterator[bytes]:
        """Yield it, in pieces of at most `PIECE_BYTES`. Raises `RegionObjectError`: then what was
        yielded is no object."""
        device, (region, lap), shape = self._device, self._state, self._device.geometry
        resets = device.log.said.resets.pack()
        entries = b"".join(pack_entry(b, at, device.seed) for at, b in enumerate(self.blocks))
        body = msgpack.packb([device.uuid, region, lap, [*shape], resets, entries, self._sealing])
        head = _START.pack(_MAGIC, _VERSION, len(body)) + body
        yield head + (tag := _tag(secret, head)).digest()
        room = aligned(PIECE_BYTES)
        where = f"region {region} of {device.file.name}"
        try:
            for block in self.blocks:
                end = block.place.page + pages_of(block.length)
                for page in range(block.place.page, end, PIECE_BYTES // DISK_PAGE):
                    view = room[: (end - page) * DISK_PAGE]
                    device.file.read(page * DISK_PAGE, view)
                    tag.update(view)
                    yield bytes(view)
            device.file.read(shape.start(region) * DISK_PAGE, room[:DISK_PAGE])
        except OSError as error:
            raise RegionObjectError(f"{where} cannot be read: {error}") from error
        if lap_in(room, device.uuid, region) != lap:
            raise RegionObjectError(f"{where} was written over meanwhile")
        yield tag.digest()


def read_head(
    name: str, read: Read, secrets: Sequence[bytes], keys: DiskKeys
) -> tuple[hmac.HMAC, Resets, list[DiskBlock], RegionSeal | None]:
    """Read an object up to its payloads, and compare tag and name; return the HMAC so far, what it
    says, and what opens its payloads if they are encrypted. Raises `RegionObjectError`."""
    start = read(_START.size).ljust(_START.size)
    magic, version, length = _START.unpack(start)
    if (magic, version) != (_MAGIC, _VERSION) or length > HEAD_BYTES_MAX:
        raise RegionObjectError(f"{name} is no region that a node of this version exported")
    body, told = read(length), read(TAG_BYTES)
    tags = [_tag(secret, start + body) for secret in secrets]
    tag = next((one for one in tags if hmac.compare_digest(one.digest(), told)), None)
    if tag is None:
        raise RegionObjectError(f"{name} is not signed with this secret, or was changed")
    uuid, region, lap, shape, resets, entries, sealing = msgpack.unpackb(body)
    if name != object_name(uuid, region, lap):
        raise RegionObjectError(f"{name} is {object_name(uuid, region, lap)} under another name")
    state = RegionState(region, lap)
    sealed = sealing is not None
    found = unpack_entries(entries, 0, state, Geometry(*shape), seed_of(uuid), sealed=sealed)
    blocks = list(reversed(found or ()))
    seal = None
    if sealed:
        key_id, salt = sealing
        if key_id not in keys:
            raise RegionObjectError(f"{name} is encrypted with another key, {key_id.hex()}")
        seal = RegionSeal(keys[key_id], salt, uuid, region, lap)
        blocks = [seal.masked(block) for block in blocks]
    return tag, Resets.unpack(resets), blocks, seal


def _tag(secret: bytes, raw: bytes) -> hmac.HMAC:
    """Return the HMAC of some bytes, under a key for objects alone."""
    return hmac.new(hmac.digest(secret, b"kvstore objects", "sha256"), raw, "sha256")
