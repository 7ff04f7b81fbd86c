"""Opens the disks of one start of a node, and makes durable what must not come back from them.

What the core forbids is in the devices' logs, in memory, before anything else is carried out; a
thread makes it durable, all that has come meanwhile with one sync a device, and only then its
answers leave. Where that fails they say that it is not confirmed: the device is closed for good,
which the others' logs note, and nothing of it is believed at a later start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvstore.core.disk.tier import DiskTier
from kvstore.core.events import Reply
from kvstore.core.resets import Resets
from kvstore.errors import PeerError
from kvstore.node.config import DiskConfig, NodeConfig
from kvstore.node.control.local_session import LocalSession
from kvstore.node.control.turns import Turns
from kvstore.node.disk.closed import closed_disks, note_closed
from kvstore.node.disk.writer import DiskWriter
from kvstore.nodedir import TABLE
from kvstore.segment.attached import AttachedShm
from kvstore.segment.disk.adopt import settle
from kvstore.segment.disk.attached import announced
from kvstore.segment.disk.device import DiskDevice
from kvstore.segment.disk.file import open_file
from kvstore.segment.disk.format import LOG_BYTES, REGION_BYTES
from kvstore.segment.disk.table import DiskTable
from kvstore.system.on_failure import on_failure
from kvstore.types import DiskKeys

log = logging.getLogger("kvstore.node")

REGIONS_WANTED = 16
"""Regions that a small device is cut into: then its oldest part is not half of it."""
REGION_BYTES_MIN = 1 << 20
LOG_BYTES_MIN = 256 << 10
SWEPT_AT_ONCE = 1 << 13
"""Places of the table that one turn of the node's loop clears."""
LOG_TIMEOUT_S = 5.0
"""Time that an answer waits for the logs; then it says that it is not confirmed."""
STOP_TIMEOUT_S = 5.0
EVERYTHING_ORDER = (1 << 64) - 1


class NodeDisks:
    """The disks of one start of a node. Only the thread of its event loop uses it."""

    def __init__(self, config: NodeConfig, node_id: int, known: Resets, epoch: int) -> None:
        """Open them, or make them; `known` are the resets of which the node knows. One that fails
        is left out, and said so. Raises `UsageError` and `NoSpaceError` for those that are no place
        for blocks."""
        self._node = config.name
        devices: list[DiskDevice] = []
        with contextlib.ExitStack() as undo:
            for number, disk in enumerate(config.disks):
                try:
                    device = open_disk(
                        disk, number, node_id, forced=config.disk_forced, keys=config.disk_keys
                    )
                except OSError as e:
                    log.error("node %s: disk %s is left out: %s", config.name, disk.directory, e)
                    continue
                undo.callback(device.close)
                devices.append(device)
                for key_id, regions in device.locked().items():
                    key = f"of key {key_id.hex()}, which is missing" if key_id else "not encrypted"
                    text = "node %s: the blocks in %d regions of %s are dropped: they are %s"
                    log.warning(text, config.name, regions, device.file.name, key)
            self._run_dir = config.run_dir
            usable = settle(devices, known, epoch, closed_disks(config.run_dir, config.name))
            undo.pop_all()
        for device in devices:
            if device not in usable:
                why = device.trouble()
                log.error("node %s: %s is left out: %s", config.name, device.file.name, why)
                device.close()
        self._opened = usable
        self.table: DiskTable | None = None
        self._writers: list[DiskWriter] = []
        self._committer: threading.Thread | None = None
        self._commits = threading.Event()
        self._ending = self._hangs = False
        self.devices = {device.number: device for device in usable}
        self.announced = announced({n: (d.uuid, d.file.name) for n, d in self.devices.items()})
        """What the node announces of them."""

    def resets(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return the resets that the devices know."""
        known = (Resets().news(device.log.said.resets) for device in self.devices.values())
        return sorted({number: ids for one in known for number, ids in one}.items())

    def start(
        self,
        config: NodeConfig,
        data_path: Path,
        start: tuple[int, int],
        loop: asyncio.AbstractEventLoop,
        turns: Turns,
    ) -> DiskTier:
        """Make the table beside the segment; returns what the core is to use. Raises `OSError`
        and `NoSpaceError`."""
        self._loop, self._turns = loop, turns
        blocks = config.disk_blocks
        self.table = DiskTable(data_path.with_suffix(TABLE), *start, blocks, [*config.disk_keys])
        size_bytes = sum(disk.size_bytes for disk in config.disks)
        per_day = int(size_bytes * config.disk_writes_per_day)
        self.tier = DiskTier(
            self.table,
            self.devices,
            write=config.disk_write,
            bytes_per_day=per_day,
            closed=len(config.disks) - len(self.devices),
        )
        self._evicted = 0
        self._sweeping = False
        self._waiting: list[int] = []
        """Serial numbers of what is not durable yet."""
        self._held: list[tuple[int, Reply, Callable[[Reply], None]]] = []
        self._committer = threading.Thread(
            target=self._commit_all, name="kvstore-disk-log", daemon=True
        )
        self._committer.start()
        return self.tier

    def serve(self, opened: Callable[[], tuple[LocalSession, AttachedShm]]) -> None:
        """Adopt, write and read back from here on. `opened` gives a thread its own session, and its
        own mapping of the segment."""
        assert self.table is not None
        for number, device in self.devices.items():
            one = DiskWriter(self._node, {number: device}, *opened(), self.table)
            self._writers.append(one)
            one.start()

    # --- after each event ------------------------------------------------------------

    def carried_out(self, evicted: int) -> None:
        """Take on what an event has forbidden; `evicted` is how many blocks ever were."""
        if self.tier.waits:
            self._take_on()
        if evicted != self._evicted and self._writers:
            self._evicted = evicted
            for writer in self._writers:
                writer.wake()

    def _take_on(self) -> None:
        for forbid in self.tier.outgoing():
            for number, device in self.devices.items():
                up_to = forbid.up_to.get(number, EVERYTHING_ORDER)
                device.log.append(forbid.keys, forbid.namespace_ids, forbid.reset_number, up_to)
            self._waiting.append(forbid.serial)
            self._commits.set()
        if self.tier.sweeping and not self._sweeping and not self._ending:
            self._sweeping = True
            self._turns.enter(self._sweep)

    def _sweep(self) -> bool:
        more = self._sweeping = not self._ending and self.tier.sweep(SWEPT_AT_ONCE)
        self._take_on()  # also while there are more: one of them may be over
        return more

    def hold(self, reply: Reply, send: Callable[[Reply], None]) -> None:
        """Send an answer once all that was forbidden up to now is durable."""
        if not self._waiting and not self.tier.sweeping:
            send(reply)
            return
        self._held.append((self.tier.forbidden, reply, send))
        self._loop.call_later(LOG_TIMEOUT_S, self._too_late, self.tier.forbidden)

    def _release(self) -> None:
        first = min([*self._waiting, *self.tier.sweeping], default=EVERYTHING_ORDER)
        held, self._held = self._held, []
        for one in held:
            if one[0] < first:
                one[2](one[1])
            else:
                self._held.append(one)

    def _too_late(self, serial: int) -> None:
        self._refuse(serial, f"its disks did not answer in {LOG_TIMEOUT_S:.0f} s")

    def _refuse(self, serial: int, why: str) -> None:
        """Tell those who wait for that one that it is not confirmed."""
        held, self._held = self._held, []
        for number, reply, send in held:
            if number <= serial:
                text = f"node {self._node}: not confirmed, it may be back after a restart: {why}"
                send(reply._replace(body=PeerError(text)))
            else:
                self._held.append((number, reply, send))

    # --- the thread of the logs ----------------------------------------------------------

    def _commit_all(self) -> None:
        while True:
            self._commits.wait()
            self._commits.clear()
            if self._ending:
                return
            self._commit_each()

    def _commit_each(self) -> None:
        serials = list(self._waiting)
        failed = {n: why for n, d in list(self.devices.items()) if (why := self._commit(d))}
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._committed, serials, failed)

    def _commit(self, device: DiskDevice) -> str:
        """Make durable what one device was told; returns what kept it from that."""
        try:
            device.log.commit()
        except OSError as e:
            log.error("node %s: %s is closed for good: %s", self._node, device.file.name, e)
            try:
                note_closed(self._run_dir, self._node, device.uuid)
            except OSError as error:
                log.error("node %s: %s cannot be noted: %s", self._node, device.file.name, error)
            for other in list(self.devices.values()):
                if other is not device:
                    other.log.note_closed(device.uuid)
                    with contextlib.suppress(OSError):
                        other.log.commit()
            return str(e)
        return ""

    def _committed(self, serials: Sequence[int], failed: Mapping[int, str]) -> None:
        for number in failed:
            self.devices.pop(number, None)  # the writer notices in its next step
        self._waiting = [one for one in self._waiting if one not in serials]
        if serials and (failed or not self.devices):
            self._refuse(max(serials), "; ".join(failed.values()) or "no disk of it works")
        self._release()

    # --- the end -----------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop the threads. Not in that of the event loop, which they may be waiting for."""
        self._ending = True
        self._commits.set()
        until = time.monotonic() + STOP_TIMEOUT_S
        for writer in self._writers:
            writer.end()
        ended = [writer.join(max(until - time.monotonic(), 0.0)) for writer in self._writers]
        if self._committer is not None:
            self._committer.join(STOP_TIMEOUT_S)
            ended.append(not self._committer.is_alive())
        self._hangs = not all(ended)

    def close(self) -> None:
        """Let go of the table, and of the devices unless a call to one of them hangs."""
        if not self._ending:
            self.stop()
        if self.table is not None:
            self.table.close()
        for device in [] if self._hangs else self._opened:
            device.close()


def open_disk(
    disk: DiskConfig, number: int, node_id: int | None, *, forced: bool, keys: DiskKeys
) -> DiskDevice:
    """Open or make a disk for the node of that id (None: the one that it is of), divided as its
    size asks for. Raises as `open_file` and `DiskDevice.open`."""
    file = open_file(disk.directory, disk.size_bytes, forced=forced)
    part_bytes = 1 << (disk.size_bytes // REGIONS_WANTED).bit_length() - 1
    region_bytes = min(max(part_bytes, REGION_BYTES_MIN), REGION_BYTES)
    log_bytes = min(max(part_bytes // 8, LOG_BYTES_MIN), LOG_BYTES)
    with on_failure(file.close):
        sizes = {"region_bytes": region_bytes, "log_bytes": log_bytes}
        return DiskDevice.open(file, number, node_id, **sizes, keys=keys)
