"""Writes a node's blocks to a disk, and reads back what is used again: one thread a disk, so that
one that hangs keeps no other from its work.

It first tells the core what former starts wrote (`adopt`), while the node serves. Then it asks what
is to be done (`Spill`), does it and tells what became of it (core/disk/tier.py says what all this
means). Nothing waits for it but what is read back.

Blocks are copied out of the segment, and written from there: what is to be written is what is to
be evicted next, and nothing keeps a slot from being given to another block meanwhile. A copy, and
a checksum that is made of it, is of the right block if the slot had its generation still afterwards
(rule 4).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import cast

import xxhash

from kvstore.batches import in_batches
from kvstore.core.answers import Answer, Begin, Grant, SpillBlock, SpillPlan
from kvstore.core.disk.base import DISK_PAGE, RegionState
from kvstore.core.events import (
    NOBODY,
    Abort,
    Begun,
    DiskAdopted,
    DiskClosed,
    DiskDamaged,
    DiskFound,
    Promoted,
    Request,
    Reserve,
    Spill,
    Spilled,
    Suspect,
    Vacate,
)
from kvstore.errors import DeadlineError, NodeUnavailableError
from kvstore.node.control.local_session import LocalSession
from kvstore.node.seldom import Seldom
from kvstore.segment.attached import AttachedShm
from kvstore.segment.copying import copy
from kvstore.segment.disk.adopt import adopt
from kvstore.segment.disk.base import aligned
from kvstore.segment.disk.device import DiskDevice
from kvstore.segment.disk.format import pages_of
from kvstore.segment.disk.images import Images
from kvstore.segment.disk.table import DiskTable
from kvstore.segment.header import fields
from kvstore.types import DiskBlock

log = logging.getLogger("kvstore.node")

SPILL_BYTES = 16 << 20
"""Bytes of blocks that are written in one go."""
LOOK_EVERY_S = 0.05
"""Pause between two looks while nothing was evicted."""
TROUBLE_EVERY_S = 1.0
"""Pause between two looks whether the files of the disks are where they were."""
BATCH_BYTES_MIN = 1 << 20
BATCH_PAUSE_S = 0.02
"""After less than so many bytes the next blocks are waited for: an entry page is written again with
each batch, and each look takes time of the node's loop."""
ANSWER_TIMEOUT_S = 5.0
TOLD_KEYS, TOLD_IMAGES = 256, 2048
"""Blocks in one event of a device's former blocks, and as many as images: some milliseconds of the
node's loop."""
DIGESTED_BYTES = 512 << 10
"""Bytes whose checksum is made at a time: nothing else of the process runs meanwhile."""
FAILURES_MAX = 3
"""Regions that cannot be written, or read, one after the other, until the device is left alone."""


class DiskWriter:
    """The thread that has to do with a disk of one start of a node, or with several."""

    def __init__(
        self,
        node: str,
        devices: Mapping[int, DiskDevice],
        session: LocalSession,
        segment: AttachedShm,
        table: DiskTable,
    ) -> None:
        """Prepare it. `session` and `segment`, the node's own as threads have it mapped, are its
        alone; of `table` it only reads."""
        self._node = node
        self._devices = dict(devices)
        self._session = session
        self._segment = segment
        self._table = table
        self._say = Seldom(log)
        self._wake = threading.Event()
        self._ending = False
        self._pages, self._copied = aligned(SPILL_BYTES), 0
        """Memory for what is copied, and how much of it is taken."""
        self._failed: defaultdict[tuple[int, str], set[int]] = defaultdict(set)
        """By device and call: the regions in which it failed since it succeeded last."""
        self._looked_s = 0.0
        self._thread = threading.Thread(target=self._run, name="kvstore-disks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Look now what is to be written: blocks were evicted."""
        self._wake.set()

    def end(self) -> None:
        """Let the thread end after the call that it is in."""
        self._ending = True
        self._wake.set()

    def join(self, timeout_s: float) -> bool:
        """Wait until it has ended; returns False where a call to a disk hangs."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            for number, device in self._devices.items():
                self._tell_of(number, device)
            for number, device in list(self._devices.items()):
                self._adopt(number, device)
            while self._devices and not self._ending:
                self._step()
        except NodeUnavailableError:
            pass  # it has ended
        except Exception as e:
            log.critical("node %s: its disks are left alone: %s", self._node, e, exc_info=e)
            for number in list(self._devices):
                self._leave(number)
        finally:
            self._segment.close()

    def _step(self) -> None:
        if time.monotonic() >= self._looked_s + TROUBLE_EVERY_S:
            self._looked_s = time.monotonic()
            for number, device in list(self._devices.items()):
                if trouble := device.trouble():
                    self._fails(number, OSError(trouble))
        try:
            written = self._round()
        except DeadlineError as e:
            self._say.warning("node %s: its disks wait: %s", self._node, e)
            written = 0
        if written < BATCH_BYTES_MIN and not self._ending:
            self._wake.wait(LOOK_EVERY_S)
            time.sleep(BATCH_PAUSE_S)
            self._wake.clear()

    def _ask(self, what: Request, take_back: Callable[[Answer], Request] | None = None) -> Answer:
        return self._session.ask(what, time.monotonic() + ANSWER_TIMEOUT_S, take_back)

    # --- what former starts wrote ---------------------------------------------------

    def _tell_of(self, number: int, device: DiskDevice) -> None:
        shape, laps = device.geometry, [state.lap for state in device.states()]
        firsts = [shape.first_page(region) for region in range(shape.regions)]
        how = (firsts, shape.payload_pages, shape.entries, laps, device.next_lap)
        self._session.tell(DiskFound(0, 0, number, device.uuid, *how))

    def _adopt(self, number: int, device: DiskDevice) -> None:
        count, began = 0, time.monotonic()
        try:
            for _, blocks in adopt(device):
                at_once = TOLD_IMAGES if isinstance(blocks, Images) else TOLD_KEYS
                for some in in_batches(blocks, at_once):
                    if self._ending:
                        return
                    # What was forbidden meanwhile the core knows too, until all is adopted.
                    count += cast("int", self._ask(DiskAdopted(0, 0, number, some)))
            device.log.commit()  # regions that cannot be read are forbidden by now
            self._ask(DiskAdopted(0, 0, number, (), last=True))
        except (OSError, DeadlineError) as e:
            self._fails(number, e, for_good=True)
            return
        took_s = time.monotonic() - began
        text = "node %s: %s has %d blocks (%.1f s)"
        log.info(text, self._node, device.file.name, count, took_s)

    # --- writing ----------------------------------------------------------------------

    def _round(self) -> int:
        """Do once what is to be done. Return how many bytes that was."""
        plan = self._ask(Spill(0, 0, SPILL_BYTES, tuple(self._devices)), _undone)
        assert isinstance(plan, SpillPlan)
        self._write(plan.blocks)
        if plan.begin is not None:
            self._begin(plan.begin)
        self._promote(plan)
        moved = sum(one.block.length for one in plan.blocks)
        moved += sum(block.length for block in plan.promote)
        return moved + (SPILL_BYTES if plan.begin is not None else 0)

    def _write(self, blocks: Sequence[SpillBlock]) -> None:
        self._copied = 0
        for number, group in groupby(sorted(blocks, key=_device_of), _device_of):
            asked = list(group)
            written = self._write_to(number, [self._payload(one) for one in asked])
            each = written or [None] * len(asked)
            self._session.tell(Spilled(0, 0, asked, each, written is None))

    def _payload(self, one: SpillBlock) -> tuple[DiskBlock, memoryview] | None:
        """Return a block with its checksum, and where its bytes are; None when it has left."""
        block = one.block
        if one.former is not None:
            device = self._devices.get(one.former.device)
            raw = self._read(device, block._replace(place=one.former)) if device else None
            return None if raw is None else (block, raw)
        payload = self._copy(self._segment.payload[one.offset : one.offset + block.length])
        if not block.checksum or self._table.key_ids:  # readers compare a tag in its place
            digest = _digest(payload)
            if block.checksum not in (0, digest):
                self._session.hint(Suspect(NOBODY, [block.key]))
                return None
            block = block._replace(checksum=digest)
        seen = fields(self._segment.header(one.slot))
        is_still = seen is not None and seen[:2] == (one.generation, block.key)
        return (block, payload) if is_still and block.checksum else None

    def _copy(self, payload: memoryview) -> memoryview:
        """Copy a block to the start of a page of this thread's own; the node's loop goes on."""
        room = self._room(payload.nbytes)[: payload.nbytes]
        copy(room, payload)
        return room

    def _room(self, length: int) -> memoryview:
        """Return pages for a block. They are its own until `_copied` is 0 again."""
        end = self._copied + pages_of(length) * DISK_PAGE
        if end > SPILL_BYTES:
            return aligned(end - self._copied)
        start, self._copied = self._copied, end
        return self._pages[start:end]

    def _read(self, device: DiskDevice, block: DiskBlock) -> memoryview | None:
        """Return a block's bytes; None where they are not right."""
        room = self._room(block.length)
        try:
            is_right = device.read_into(block, room)
        except OSError as e:
            self._fails(device.number, e, "read", device.geometry.region_of(block.place.page))
            return None
        self._failed[device.number, "read"].clear()
        return room[: block.length] if is_right else None

    def _write_to(
        self, number: int, found: Sequence[tuple[DiskBlock, memoryview] | None]
    ) -> list[DiskBlock | None] | None:
        """Write blocks of one region; return each as it was written, None where the device
        failed."""
        ready = [one for one in found if one is not None]
        if not ready:
            return [None] * len(found)
        device = self._devices.get(number)
        if device is None:
            return None
        place = ready[0][0].place
        region = device.geometry.region_of(place.page)
        try:
            written = iter(device.write(region, place.lap, ready))
        except OSError as e:
            self._fails(number, e, "write", region)
            return None
        self._failed[number, "write"].clear()
        return [None if one is None else next(written) for one in found]

    def _begin(self, begin: Begin) -> None:
        device = self._devices.get(begin.device)
        if device is None:
            return
        again: list[SpillBlock] = []
        written: list[DiskBlock | None] | None = None
        self._copied = 0
        try:
            device.give_up(begin.region)  # before any of it leaves the index
            for some in self._former(device, begin):
                answer = self._ask(Vacate(0, 0, begin, some), _none_written)
                again += cast("list[SpillBlock]", answer)
            found = [self._payload(one) for one in again]
            device.begin(begin.region, begin.lap, begin.reset_number)
            self._session.tell(Begun(0, 0, begin))
            written = self._write_to(begin.device, found)
        except OSError as e:
            self._session.tell(Begun(0, 0, begin, done=False))
            self._fails(begin.device, e, "write", begin.region)
        finally:
            if again:
                each = written or [None] * len(again)
                self._session.tell(Spilled(0, 0, again, each, written is None))

    @staticmethod
    def _former(device: DiskDevice, begin: Begin) -> Iterator[Sequence[DiskBlock]]:
        """Yield what a region has now."""
        if begin.former_lap:
            state = RegionState(begin.region, begin.former_lap)
            yield from in_batches(device.blocks(state), TOLD_KEYS)

    def _fails(
        self,
        number: int,
        error: Exception,
        call: str = "",
        region: int = 0,
        *,
        for_good: bool = False,
    ) -> None:
        device = self._devices.get(number)
        if device is None:
            return
        failed = self._failed[number, call]
        failed.add(region)
        trouble = device.trouble()
        text = "node %s: %s failed: %s"
        self._say.warning(text, self._node, device.file.name, trouble or error)
        if for_good or trouble or len(failed) >= FAILURES_MAX:
            log.error(
                "node %s: %s is left alone until the next start: %s",
                self._node,
                device.file.name,
                trouble or error,
            )
            self._leave(number)

    def _leave(self, number: int) -> None:
        del self._devices[number]
        with contextlib.suppress(NodeUnavailableError):
            self._session.tell(DiskClosed(0, 0, number))

    # --- reading back -------------------------------------------------------------------

    def _promote(self, plan: SpillPlan) -> None:
        for block in plan.promote:
            slots = cast("list[object]", self._ask(_reserve(block), _abort))
            grant = slots[0]
            device = self._devices.get(block.place.device)
            if not isinstance(grant, Grant):
                continue
            item = (grant.slot_id, grant.generation)
            # Looked for after it was reserved: what is dropped from here on is never sealed.
            is_there = device is not None and self._table.find(block.key) == block
            self._copied = 0
            raw = self._read(device, block) if device is not None and is_there else None
            if raw is None:
                self._session.tell(Abort(0, 0, [item]))
                if is_there:
                    self._session.tell(DiskDamaged(0, 0, block))
                continue
            payload = self._segment.payload[grant.offset : grant.offset + block.length]
            copy(payload, raw)
            self._ask(Promoted(0, 0, [(*item, block.checksum)], plan.clears))


def _digest(payload: memoryview) -> int:
    """Return the checksum, with pauses in which the node's loop can go on."""
    state = xxhash.xxh3_64()
    for start in range(0, payload.nbytes, DIGESTED_BYTES):
        state.update(payload[start : start + DIGESTED_BYTES])
        time.sleep(0)
    return state.intdigest()


def _device_of(one: SpillBlock) -> int:
    return one.block.place.device


def _reserve(block: DiskBlock) -> Reserve:
    described = ([block.kind], [block.meta_length], [None], [0])
    return Reserve(0, 0, [block.key], [block.length], block.namespace_id, *described)


def _abort(answer: Answer) -> Request:
    grants: Iterable[object] = answer if isinstance(answer, list) else ()
    return Abort(0, 0, [one[:2] for one in grants if isinstance(one, Grant)])


def _undone(answer: Answer) -> Request:
    assert isinstance(answer, SpillPlan)
    return Spilled(0, 0, answer.blocks, [None] * len(answer.blocks))


def _none_written(answer: Answer) -> Request:
    blocks = cast("list[SpillBlock]", answer)
    return Spilled(0, 0, blocks, [None] * len(blocks))
