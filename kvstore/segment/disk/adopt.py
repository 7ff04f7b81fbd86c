"""Finds the blocks that former starts wrote to a node's devices."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

from kvstore.core.disk.base import RegionState
from kvstore.core.resets import Resets
from kvstore.segment.disk.device import DiskDevice
from kvstore.segment.disk.forbidden import Record, record
from kvstore.types import DiskBlock


def settle(
    devices: Sequence[DiskDevice], resets: Resets, run: int, closed: Collection[bytes] = ()
) -> list[DiskDevice]:
    """Let each device know what it missed, before anything of it is adopted. Return those that may
    be used; the others' `trouble` says why not. `run` is the epoch of this start, `closed` has the
    UUIDs of devices that are closed for good, as the node knows them; other devices' logs may know
    more.

    A device that was away while a key was deleted, nobody knows of which it has a copy, is
    emptied. Resets it catches up with, those that the node knows and those of other devices.
    """
    said = [device.log.said for device in devices]
    deleted_in = max((one.numbers[Record.DELETED_IN] for one in said), default=0)
    run = max([run, *(one.numbers[Record.RUN] + 1 for one in said)])
    all_closed = {*closed, *(uuid for one in said for uuid in one.closed)}
    for device, own in zip(devices, said, strict=True):
        if device.uuid in all_closed:
            device.close_for_good("a sync of it failed earlier, as is noted elsewhere")
            continue
        if deleted_in > own.numbers[Record.RUN]:
            device.log.add([record(Record.ALL_UP_TO, device.end)])
        for theirs in (resets, *(one.resets for one in said)):
            for number, ids in own.resets.news(theirs):
                device.log.append((), ids, number, device.end)
        device.log.add([record(Record.RUN, run), record(Record.DELETED_IN, deleted_in)])
        with contextlib.suppress(OSError):  # it is closed now, and says so
            device.log.checkpoint()
    return [device for device in devices if not device.trouble()]


def adopt(device: DiskDevice) -> Iterator[tuple[RegionState, Sequence[DiskBlock]]]:
    """Yield each region that was begun, the newest first, with its blocks, the newest first: so the
    first block of a key is its newest. What the log forbids by now is left out.

    Where a delete can come between this and the index, whoever enters a block asks
    `device.log.forbids` again; and until all is adopted, each delete goes to the log whether the
    index has its key or not.
    """
    for state in sorted(device.states(), key=lambda state: state.lap, reverse=True):
        if state.lap:
            yield state, device.log.said.allowed(device.blocks(state), state.region)
