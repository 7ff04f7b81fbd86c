"""Writes objects of other hosts' regions (exported.py) to a disk device that no node uses.

It is an adoption: at its next start a node finds the blocks as if it had written them. Each gets a
new place, in a region where no block counts, and entries are written once all of their object was
read and its last tag compared: an import that is killed leaves a region without entries. What is
there already is not written again, so an import can be repeated.

What forbids holds here too. No order says what came first, so a block is left out whose key was
deleted, or its namespace cleared, as far as the device's log knows. Of resets an object says which
it took part in, as another device of the node would: others that the device knows leave blocks out,
and those that it does not know it carries out itself.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Sequence

from kvstore.core.disk.base import DISK_PAGE
from kvstore.core.resets import Resets
from kvstore.segment.disk.adopt import adopt
from kvstore.segment.disk.base import aligned
from kvstore.segment.disk.device import DiskDevice
from kvstore.segment.disk.exported import (
    PIECE_BYTES,
    TAG_BYTES,
    Read,
    RegionObjectError,
    read_head,
)
from kvstore.segment.disk.format import pages_of
from kvstore.segment.disk.seal import RegionSeal
from kvstore.types import DiskBlock, DiskPlace, Key, Kind


class Importer:
    """Takes objects in, one after the other."""

    def __init__(self, device: DiskDevice, secrets: Sequence[bytes]) -> None:
        """Look at what is on the device. An object may be signed with any of the secrets."""
        self._device, self._secrets = device, secrets
        self._look()

    def _look(self) -> None:
        found = {state.region: blocks for state, blocks in adopt(self._device)}
        self._there: set[Key] = {block.key for some in found.values() for block in some}
        self.free = [n for n in range(self._device.geometry.regions) if not found.get(n)]
        """Regions without a block that counts."""

    def take(self, name: str, read: Read) -> int:
        """Write the blocks of an object to a free region, of which there must be one; return how
        many: 0 where all are there or forbidden. Raises `RegionObjectError` and `OSError`: then
        none counts."""
        device, log = self._device, self._device.log
        tag, resets, blocks, seal = read_head(name, read, self._secrets, device.keys)
        if news := log.said.resets.news(resets):
            for number, ids in news:
                log.append((), ids, number, device.end)
            log.commit()
            self._look()
        placed = self._placed(resets, blocks)
        wanted = [block for block in placed if block is not None]
        if not wanted:
            return 0
        region, lap, last = self.free[0], device.next_lap, wanted[-1]
        fits = device.geometry.holds(region, last.place.page, last.length)
        if not fits or len(wanted) > device.geometry.entries:
            raise RegionObjectError(f"{name} does not fit into a region of this disk: enlarge it")
        device.begin(region, lap, log.said.resets.newest)
        device.write(region, lap, _payloads(name, read, tag, blocks, placed, seal))
        self._there.update(block.key for block in wanted)
        del self.free[0]
        return len(wanted)

    def _placed(self, resets: Resets, blocks: Sequence[DiskBlock]) -> list[DiskBlock | None]:
        """Return the blocks of an object at their places here, None for those left out."""
        device, said = self._device, self._device.log.said
        unknown = [ids for _, ids in resets.news(said.resets)]
        page = device.geometry.first_page(self.free[0])
        placed: list[DiskBlock | None] = []
        for block in blocks:
            is_reset = any(not ids or block.namespace_id in ids for ids in unknown)
            is_here = block.key in self._there or said.names(block)
            if is_reset or is_here or block.kind != Kind.BLOCK:
                placed.append(None)
                continue
            placed.append(block._replace(place=DiskPlace(0, page, device.next_lap)))
            page += pages_of(block.length)
        return placed


def _payloads(
    name: str,
    read: Read,
    tag: hmac.HMAC,
    blocks: Sequence[DiskBlock],
    placed: Sequence[DiskBlock | None],
    seal: RegionSeal | None,
) -> Iterator[tuple[DiskBlock, memoryview]]:
    """Yield the blocks that have a place with their payloads; compare the last tag at the end."""
    room = aligned(max(pages_of(block.length) for block in blocks) * DISK_PAGE)
    for block, new in zip(blocks, placed, strict=True):
        view = room[: pages_of(block.length) * DISK_PAGE]
        for start in range(0, len(view), PIECE_BYTES):
            part = view[start : start + PIECE_BYTES]
            raw = read(len(part))
            if len(raw) != len(part):
                raise RegionObjectError(f"{name} is cut off")
            part[:] = raw
        tag.update(view)
        payload = view[: block.length]
        # One that has not its tag was damaged where it comes from.
        if new and (seal is None or seal.opening(block).update(payload).is_right()):
            yield new._replace(tag=b""), payload
    if not hmac.compare_digest(tag.digest(), read(TAG_BYTES)) or read(1):
        raise RegionObjectError(f"{name} was changed, or is cut off")
