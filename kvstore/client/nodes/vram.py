"""Finds the nodes of this host whose blocks lie in VRAM, and reads from them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kvstore.batches import in_batches
from kvstore.circuit_breaker import BreakerState
from kvstore.client.nodes.directory import HERE_BELIEVED_S, NodeDirectory
from kvstore.cuda.base import CudaDevice
from kvstore.cuda.checksum import DeviceChecksums
from kvstore.cuda.handover import take_over
from kvstore.errors import DeviceError, UsageError
from kvstore.limits import CUDA_IPC_NODES_MAX, STREAM_BLOCKS_MAX
from kvstore.nodedir import Announcement, NodeDir
from kvstore.segment.cuda import AttachedCuda
from kvstore.segment.locate import locate
from kvstore.system.on_failure import on_failure
from kvstore.transport.base import Outcome, Read, Wanted
from kvstore.transport.cuda_ipc import CudaIpcTransport, WantedAnywhere
from kvstore.transport.cuda_memory import NAME, DeviceAddress, DeviceBlock, DevicePlace
from kvstore.transport.stream.transport import CHECKSUM_REASON
from kvstore.types import Key, Location

log = logging.getLogger("kvstore.client")

_COUNTED = {
    Read.HIT: "cuda_ipc_hits",
    Read.MISS: "cuda_ipc_misses",
    Read.FAILED: "cuda_ipc_failed",
}


class CudaHeads:
    """Implements `kvstore.transport.cuda_memory.Heads` over a mapped header file."""

    def __init__(self, segment: AttachedCuda, socket: Path, owner: int) -> None:
        """`owner` is the user whose node listens at `socket`."""
        self._segment = segment
        self.memory = partial(take_over, socket, owner)
        self.alive = segment.alive
        self.close = segment.close

    def locate(self, key: Key, location: Location) -> DevicePlace | None:
        spot = locate(self._segment, key, location)
        if spot is None:
            return None
        _, _, _, _, kind, meta_length, checksum, _ = spot.header
        return DevicePlace(spot.offset, kind, meta_length, (spot.slot_id, spot.image), checksum)

    def same(self, place: DevicePlace) -> bool:
        assert place.token is not None
        slot_id, image = place.token
        return self._segment.header(slot_id) == image


def attach(run_dir: Path, announcement: Announcement) -> CudaHeads | None:
    """Return the headers of a node of this user in VRAM; None when it is not on this host (any
    more)."""
    try:
        directory = NodeDir(run_dir, announcement.name)
        owner = directory.owner()
        if owner != os.geteuid():
            return None
        segment = AttachedCuda(Path(announcement.head_path), owner=owner)
    except (OSError, ValueError, UsageError):
        return None
    block = segment.superblock
    if (block.node_id, block.epoch) != (announcement.node_id, announcement.epoch):
        segment.close()
        return None
    return CudaHeads(segment, directory.vram_socket, owner)


class VramNodes:
    """Finds this user's nodes in VRAM on this host and opens their memory. Thread-safe. Believes
    what nodes say in this user's run directory, not the index.

    Without a device nothing can be read here: for a process that looks blocks up for others
    which have one, `seen` says of a node's id and epoch whether they can.
    """

    def __init__(
        self,
        nodes: NodeDirectory,
        device: CudaDevice | None,
        seen: Callable[[int, int], bool] | None = None,
        *,
        verifies: bool = False,
        report: Callable[[NodeDir, Announcement, Key], None] | None = None,
    ) -> None:
        """With `verifies`, only blocks with the right checksum are read; `report` tells a node of
        one that has another."""
        self._nodes = nodes
        self._device = device
        self._seen = seen
        self._report = report
        self.watched = False
        """Whether `look` is to open what there is."""
        self.transport = (
            None
            if device is None
            else CudaIpcTransport(device, partial(attach, nodes.run_dir), verifies=verifies)
        )
        self._lock = threading.RLock()
        counted = ("cuda_ipc_bytes", "cuda_ipc_checksum", *_COUNTED.values())
        self.counts = dict.fromkeys(counted, 0)
        self._any_failed = False
        """Some may not be read until `look` has opened them."""

    def node(self, node_id: int, epoch: int, now: float) -> Announcement | None:
        """That start of that node when its blocks can be read from here now."""
        # A directory says who is there, not whose memory opens: not without peer access, not
        # between MIG instances. Only who has opened it knows.
        if self._device is None and (self._seen is None or not self._seen(node_id, epoch)):
            return None
        known = self._nodes.entry(node_id, epoch)
        if known.vram_breaker.state is not BreakerState.CLOSED:
            return None
        if now < known.in_vram_until:
            return known.in_vram
        with self._lock:
            was = known.in_vram
            if now < known.in_vram_until:
                return was
            found = next(self._nodes.here((node_id, epoch)), None)
            known.in_vram = found[0] if found is not None and self._readable(*found) else None
            known.in_vram_until = now + HERE_BELIEVED_S
        if was is not None and known.in_vram is None:
            self.sweep()
        return known.in_vram

    def why_not(self, node_id: int, epoch: int) -> str:
        """Return why that start of that node failed; empty when it did not, or was opened since."""
        return self._nodes.entry(node_id, epoch).vram_failure

    def _readable(self, announcement: Announcement, directory: NodeDir) -> bool:
        address = DeviceAddress.parse(announcement.transports.get(NAME, ""))
        if address is None or not directory.alive() or not directory.is_ours():
            return False
        try:
            return self._device is None or self._device.reaches(address.uuid)
        except DeviceError:
            return False

    def look(self) -> None:
        """Open the memory of the nodes that there are, if that is wanted, else that of those that
        failed; close that of ended ones. `opened` tells others what can be read here."""
        if self.transport is None or not (self.watched or self._any_failed):
            return
        self._any_failed = False
        memory = self.transport.memory
        self.sweep()
        for announcement, directory in self._nodes.here():
            start, there = (announcement.node_id, announcement.epoch), memory.starts()
            known = self._nodes.entry(*start)
            failed = known.vram_breaker.state is not BreakerState.CLOSED
            self._any_failed = self._any_failed or failed
            if not (self.watched or failed) or not self._readable(announcement, directory):
                continue
            full = start not in there and len(there) >= CUDA_IPC_NODES_MAX
            if full or not known.vram_breaker.allows(time.monotonic()):
                continue
            try:
                opened = memory.use(announcement)
            except DeviceError as e:
                self._failed(announcement, str(e))
                continue
            if opened is not None:
                memory.done_with(opened)
                with self._lock:
                    known.vram_breaker.succeeded()
                    known.vram_failure = ""

    def opened(self) -> frozenset[tuple[int, int]]:
        """Id and epoch of the nodes whose memory this process has open and can read."""
        if self.transport is None:
            return frozenset()
        there = self.transport.memory.starts()
        return frozenset(start for start in there if not self.why_not(*start))

    # --- reading ----------------------------------------------------------------

    def there(
        self, announcement: Announcement, blocks: Sequence[tuple[Key, Location]]
    ) -> list[bool]:
        """Return whether each of `blocks` is there and as long as its location says."""
        heads = attach(self._nodes.run_dir, announcement)
        if heads is None:
            return [False] * len(blocks)
        try:
            return [heads.locate(key, location) is not None for key, location in blocks]
        finally:
            heads.close()

    def read(
        self, announcement: Announcement, wanted: Sequence[Wanted | WantedAnywhere], deadline: float
    ) -> list[Outcome]:
        """Return one outcome for each block, into memory of the host or of a device."""
        outcomes: list[Outcome] = []
        for batch in in_batches(wanted, STREAM_BLOCKS_MAX):
            if self.transport is None:
                outcomes += [Outcome(Read.FAILED, "no CUDA device in this process")] * len(batch)
            else:
                outcomes += self.transport.read(announcement, batch, deadline)
        self._count(outcomes, wanted)
        failed = next((o.reason for o in outcomes if o.read is Read.FAILED), None)
        if failed is not None:
            self._failed(announcement, failed)
        for one, outcome in zip(wanted, outcomes, strict=True):
            if outcome.reason == CHECKSUM_REASON:
                self._damaged(announcement, one.key)
        return outcomes

    def _damaged(self, announcement: Announcement, key: Key) -> None:
        """Let the node look for itself (rule 2)."""
        log.warning("a block in VRAM of node %s is damaged: a miss", announcement.name)
        self.counts["cuda_ipc_checksum"] += 1
        if self._report is not None:
            self._report(NodeDir(self._nodes.run_dir, announcement.name), announcement, key)

    def view(self, announcement: Announcement, key: Key, location: Location) -> DeviceBlock | None:
        """Return the block in place; None when it is not there (any more), is damaged where all is
        to be verified, or out of reach."""
        if self.transport is None:
            return None
        try:
            block = self.transport.memory.view(announcement, key, location)
            if block is None or self.transport.checksums is None:
                return block
            if self._right(block, location, self.transport.checksums):
                return block
        except DeviceError as e:
            self._failed(announcement, str(e))
            return None
        if block.checksum and block.valid():
            self._damaged(announcement, key)
        block.close()
        return None

    @staticmethod
    def _right(block: DeviceBlock, location: Location, checksums: DeviceChecksums) -> bool:
        """Return whether the bytes in place have the checksum that header and location name. Raises
        `DeviceError`."""
        known = {block.checksum, location.checksum} - {0}
        if not known:
            return False
        with on_failure(block.close):
            (seen,) = checksums.of([[(block.memory.address, block.memory.size_bytes)]])
        return known == {seen}

    def _count(
        self, outcomes: Sequence[Outcome], wanted: Sequence[Wanted | WantedAnywhere]
    ) -> None:
        with self._lock:
            for one, outcome in zip(wanted, outcomes, strict=True):
                self.counts[_COUNTED[outcome.read]] += 1
                if outcome.read is Read.HIT:
                    self.counts["cuda_ipc_bytes"] += one.location.length

    def sweep(self) -> None:
        """Let go of the memory of nodes that have ended."""
        if self.transport is not None:
            self.transport.memory.sweep()

    def _failed(self, announcement: Announcement, reason: str) -> None:
        """It is left alone for a while."""
        known = self._nodes.entry(announcement.node_id, announcement.epoch)
        with self._lock:
            # Some failures last, such as a device that is hidden here.
            level = logging.DEBUG if known.vram_failed else logging.WARNING
            known.vram_breaker.failed(time.monotonic(), hung=True)
            known.vram_failure, known.vram_failed, self._any_failed = reason, True, True
            known.in_vram_until, known.in_vram = float("-inf"), None
        log.log(
            level, "node %s cannot be read over CUDA IPC for now: %s", announcement.name, reason
        )

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()
