"""Bugs that are planted, and the tests named for them, each of which must find its own: a test that
finds none proves nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import test_damage
import test_device
import test_log
import test_power_loss
import test_resurrection
from disk_parts import PAGE, SIZE

from kvstore.core.disk.base import RegionState
from kvstore.core.resets import Resets
from kvstore.segment.disk import device as devices
from kvstore.segment.disk.device import DiskDevice
from kvstore.segment.disk.forbidden import Forbidden, Record
from kvstore.segment.disk.format import pages_of, xxh3_64_intdigest
from kvstore.segment.disk.log import Log
from kvstore.testing.sim.models.disk import SimDisk
from kvstore.types import DiskBlock

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]
SEEDS = range(400)
"""Within which a bug must be found."""


def disk() -> SimDisk:
    return SimDisk(SIZE, random.Random(3))


def payload(device: DiskDevice, block: DiskBlock) -> bytes:
    pages = devices.aligned(pages_of(block.length) * PAGE)
    device.file.read(block.place.page * PAGE, pages)
    return bytes(pages[: block.length])


def reader_that_does_not_verify(patch: Patch) -> None:
    patch.setattr(DiskDevice, "read", payload)


def reader_of_any_key(patch: Patch) -> None:
    """Takes a payload that belongs to some key."""

    def read(device: DiskDevice, block: DiskBlock) -> bytes | None:
        value = payload(device, block)
        states = device.states()
        known = {one.checksum for state in states for one in device.blocks(state)}
        return value if xxh3_64_intdigest(value) in known else None

    patch.setattr(DiskDevice, "read", read)


def reader_of_old_laps(patch: Patch) -> None:
    """Takes every entry for one of this lap."""
    real = devices.unpack_entries

    def unpack(
        area: bytes, number: int, state: RegionState, *rest: Any, sealed: bool
    ) -> list[DiskBlock] | None:
        laps = range(1, state.lap + 1)
        states = [state._replace(lap=lap) for lap in laps]
        found = [real(area, number, one, *rest, sealed=sealed) or [] for one in states]
        blocks = [block for blocks in found for block in blocks]
        return [one._replace(place=one.place._replace(lap=state.lap)) for one in blocks]

    patch.setattr(devices, "unpack_entries", unpack)


def reader_after_a_reset(patch: Patch) -> None:
    """Forgets at a start what the log says of namespaces."""
    real = Forbidden.add

    def add(self: Forbidden, records: Any) -> None:
        names = (Record.NAMESPACE, Record.CLEARED, Record.ALL_UP_TO)
        real(self, [raw for raw in records if raw[0] not in names])

    patch.setattr(Forbidden, "add", add)


def reader_after_a_delete(patch: Patch) -> None:
    patch.setattr(Forbidden, "forbids", lambda self, block, region: False)


def commit_without_a_sync(patch: Patch) -> None:
    real = Log._write

    def write(self: Log, records: Any, halves: Any) -> None:
        real(self, records, halves)
        if len(halves) == 2:
            self._file.skipped_syncs = 1  # type: ignore[attr-defined]

    patch.setattr(Log, "_write", write)


def commit_to_one_half(patch: Patch) -> None:
    real = Log._write
    patch.setattr(Log, "_write", lambda self, records, halves: real(self, records, halves[:1]))


def commits_are_not_missed(patch: Patch) -> None:
    """Reads a log whatever is missing in it."""
    real = Log._frame
    blank = real(None, bytes(512), 0)  # type: ignore[arg-type]
    patch.setattr(Log, "_frame", lambda self, raw, place: real(self, raw, place) or blank)


def regions_are_not_given_up(patch: Patch) -> None:
    patch.setattr(DiskDevice, "give_up", lambda self, region: self.log.commit())


def damage_is_no_reason(patch: Patch) -> None:
    patch.setattr(Log, "forbid_region", lambda self, region, below_lap: 0)


def headers_count_when_written(patch: Patch) -> None:
    real = DiskDevice._lap_of
    patch.setattr(
        DiskDevice,
        "_lap_of",
        lambda self, region, page: self._begun.get(region) or real(self, region, page),
    )


def laps_start_after_the_last_header(patch: Patch) -> None:
    real = DiskDevice.open.__func__  # type: ignore[attr-defined]

    def opened(cls: type[DiskDevice], *args: Any, **kwargs: Any) -> DiskDevice:
        device: DiskDevice = real(cls, *args, **kwargs)
        device.next_lap = max(state.lap for state in device.states()) + 1
        return device

    patch.setattr(DiskDevice, "open", classmethod(opened))


def a_smaller_reset_counts_as_known(patch: Patch) -> None:
    real = Resets.news
    newest = lambda self: max((n for n, _ in real(Resets(), self)), default=0)  # noqa: E731
    patch.setattr(
        Resets,
        "news",
        lambda self, theirs: [one for one in real(self, theirs) if one[0] > newest(self)],
    )


def failed_syncs_are_tried_again(patch: Patch) -> None:
    patch.setattr(Log, "_exclusively", lambda self: self._writing)


CASES: list[tuple[Plant, Callable[[], object]]] = [
    (
        reader_that_does_not_verify,
        lambda: test_device.test_a_payload_with_another_checksum_is_a_miss(disk()),
    ),
    (reader_that_does_not_verify, lambda: test_damage.survive_damage("payload", SEEDS)),
    (reader_that_does_not_verify, lambda: test_damage.survive_damage("misdirected", SEEDS)),
    (reader_that_does_not_verify, lambda: test_power_loss.survive_power_losses(SEEDS)),
    (
        reader_of_any_key,
        lambda: test_device.test_a_payload_with_another_checksum_is_a_miss(disk()),
    ),
    (
        reader_of_old_laps,
        lambda: test_device.test_entries_of_an_earlier_lap_do_not_count(disk()),
    ),
    (
        reader_after_a_reset,
        lambda: test_resurrection.test_what_was_confirmed_holds_although_all_else_is_lost("reset"),
    ),
    (
        reader_after_a_delete,
        lambda: test_resurrection.test_what_was_confirmed_holds_although_all_else_is_lost("delete"),
    ),
    (reader_after_a_delete, lambda: test_power_loss.survive_power_losses(SEEDS)),
    (commit_without_a_sync, lambda: test_power_loss.survive_power_losses(SEEDS)),
    (
        commit_to_one_half,
        lambda: test_log.test_one_half_of_the_log_is_enough(disk(), 0, "lost"),
    ),
    (
        commits_are_not_missed,
        lambda: test_log.test_where_both_halves_are_damaged_the_device_is_made_anew(
            disk(), 5, "flipped"
        ),
    ),
    (
        regions_are_not_given_up,
        test_resurrection.test_a_region_that_was_given_up_does_not_come_back_with_its_old_header,
    ),
    (regions_are_not_given_up, lambda: test_power_loss.survive_power_losses(SEEDS)),
    (
        damage_is_no_reason,
        test_resurrection.test_a_region_that_could_not_be_read_at_a_start_does_not_come_back_later,
    ),
    (
        damage_is_no_reason,
        test_resurrection.test_an_entry_that_was_damaged_on_its_way_does_not_come_back_later,
    ),
    (
        headers_count_when_written,
        lambda: test_log.test_nothing_is_left_out_while_an_old_header_may_count_again(disk()),
    ),
    (laps_start_after_the_last_header, test_resurrection.test_a_lap_is_never_begun_twice),
    (
        a_smaller_reset_counts_as_known,
        test_device.test_resets_that_the_node_heard_of_hold_on_its_disks_whatever_their_order,
    ),
    (
        failed_syncs_are_tried_again,
        lambda: test_log.test_after_one_failed_sync_nothing_is_confirmed_any_more(
            disk(), "failing_syncs"
        ),
    ),
]


@pytest.mark.parametrize(("plant", "test"), [pytest.param(*c, id=c[0].__name__) for c in CASES])
def test_is_found(plant: Plant, test: Callable[[], object], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test()
