"""Objects of other hosts on a disk: only whole ones that were signed, and nothing that is
forbidden."""

from __future__ import annotations

import io
import random

import pytest
from disk_parts import NODE, open_device
from exported_parts import (
    BLOCKS,
    SECRET,
    VALUE,
    adopted,
    begun_regions,
    bytes_of,
    disk_with,
    fill,
    new_disk,
    objects_of,
    taken,
)

from kvstore.core.disk.base import EVERYTHING
from kvstore.core.resets import Resets
from kvstore.segment.disk.adopt import settle
from kvstore.segment.disk.device import DiskDevice
from kvstore.segment.disk.exported import RegionObject, RegionObjectError, opened
from kvstore.segment.disk.format import Geometry
from kvstore.segment.disk.imported import Importer
from kvstore.testing.sim.models.disk import PAGE, PowerLossError, SimDisk

OTHER = b"another secret, as long"
KEY = BLOCKS[0]


def forbid(disk: SimDisk, keys: list[bytes], ids: list[int] | None, number: int = 0) -> None:
    """Do to a disk's log what a node does when clients delete, clear or reset."""
    device = open_device(disk)
    device.log.append(keys, ids, number, device.end)
    device.log.commit()


def refused(name: str, raw: bytes, *secrets: bytes) -> str:
    """What is said of an object of which nothing counts afterwards; its region is still free."""
    disk = new_disk()
    importer = Importer(open_device(disk), secrets or (SECRET,))
    free = [*importer.free]
    with pytest.raises(RegionObjectError) as told:
        importer.take(name, io.BytesIO(raw).read)
    assert importer.free == free
    assert adopted(disk) == set()
    assert str(told.value).startswith(name)
    return str(told.value)


def test_blocks_are_there_with_their_bytes_and_only_once() -> None:
    objects = objects_of(disk_with(BLOCKS[:3], [*BLOCKS[3:], VALUE]))
    disk = new_disk()
    assert taken(disk, objects) == len(BLOCKS)
    assert adopted(disk) == set(BLOCKS)
    free = Importer(open_device(disk), [SECRET]).free
    assert taken(disk, objects) == 0
    assert Importer(open_device(disk), [SECRET]).free == free
    assert len(free) == 3


def test_the_newest_of_two_disks_stays_newest() -> None:
    disk = new_disk()
    taken(disk, objects_of(disk_with(BLOCKS[:1], BLOCKS[1:2])))
    device = open_device(disk)
    laps = {block.key: s.lap for s in device.states() if s.lap for block in device.blocks(s)}
    assert laps[BLOCKS[0]] < laps[BLOCKS[1]]


def test_what_the_disk_has_of_its_own_stays_and_is_not_written_over() -> None:
    disk = disk_with([VALUE, *BLOCKS[:2]])
    objects = objects_of(disk_with(BLOCKS[1:4]))
    assert taken(disk, objects) == 2
    assert adopted(disk) == {VALUE, *BLOCKS[:4]}
    assert open_device(disk, node_id=None)._superblock.node_id == NODE


# --- what is refused ----------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_is_refused() -> None:
    ((name, raw),) = objects_of(disk_with(BLOCKS[:2])).items()
    rng = random.Random(4)
    places = [*range(140), *range(len(raw) - 40, len(raw)), *range(140, len(raw), 211)]
    for at in places:
        flipped = bytearray(raw)
        flipped[at] ^= 1 << rng.randrange(8)
        refused(name, bytes(flipped))


def test_an_object_that_is_cut_or_goes_on_is_refused() -> None:
    ((name, raw),) = objects_of(disk_with(BLOCKS[:2])).items()
    for end in [*range(0, len(raw), 173), len(raw) - 1]:
        refused(name, raw[:end])
    assert "was changed, or is cut off" in refused(name, raw + b"\0")
    assert "is cut off" in refused(name, raw[:-PAGE])


def test_unsigned_and_foreign_ones_are_refused_by_name() -> None:
    ((name, raw),) = objects_of(disk_with(BLOCKS[:2])).items()
    assert "is not signed with this secret, or was changed" in refused(name, raw, OTHER)
    for bad in (
        b"",
        b"anything else",
        raw[:8] + b"\2" + raw[9:],
        raw[:12] + b"\xff" * 4 + raw[16:],
    ):
        assert "is no region that a node of this version exported" in refused(name, bad)
    disk = new_disk()
    assert taken(disk, {name: raw}, OTHER, SECRET) == 2  # one that is being replaced


def test_an_object_under_another_regions_name_is_refused() -> None:
    (name, raw), (other, _) = objects_of(disk_with(BLOCKS[:1], BLOCKS[1:2])).items()
    assert refused(other, raw) == f"{other} is {name} under another name"


def test_the_payloads_of_one_object_do_not_go_with_the_head_of_another() -> None:
    source = disk_with(BLOCKS[:1])
    ((name, raw),) = objects_of(source).items()
    fill(open_device(source), 0, BLOCKS[:1])
    ((_, later),) = objects_of(source).items()
    head = len(raw) - 32 - PAGE * 2
    assert "was changed" in refused(name, raw[:head] + later[head:])


def test_what_does_not_fit_into_a_region_is_refused_with_what_to_do() -> None:
    small = DiskDevice.open(
        SimDisk(Geometry(4 * PAGE, 256 << 10, 5).start(5) * PAGE, random.Random(1)),
        0,
        NODE,
        region_bytes=4 * PAGE,
        log_bytes=256 << 10,
    )
    ((name, raw),) = objects_of(disk_with(BLOCKS[:3])).items()
    with pytest.raises(RegionObjectError, match="does not fit into a region of this"):
        Importer(small, [SECRET]).take(name, io.BytesIO(raw).read)


# --- what is forbidden --------------------------------------------------------------------------


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("how", ["delete", "clear", "reset", "reset_all"])
def test_what_the_disk_forbids_is_not_imported(how: str, folded: bool) -> None:
    objects = objects_of(disk_with(BLOCKS[:3]))
    disk = new_disk()
    gone = set(BLOCKS[:3]) if how == "reset_all" else {KEY}
    match how:
        case "delete":
            forbid(disk, [KEY], None)
        case "clear":
            forbid(disk, [], [KEY[0]])
        case "reset":
            forbid(disk, [], [KEY[0]], 9)
        case _:
            forbid(disk, [], [*EVERYTHING], 9)
    if folded:  # into a checkpoint, at each start
        for _ in range(3):
            open_device(disk).log.checkpoint()
    assert taken(disk, objects) == 3 - len(gone)
    assert adopted(disk) == set(BLOCKS[:3]) - gone


def test_what_was_saved_after_a_reset_that_both_know_is_imported() -> None:
    source, disk = new_disk(), new_disk()
    for each in (source, disk):
        forbid(each, [], [KEY[0]], 9)
    fill(open_device(source), 0, BLOCKS[:3])
    assert taken(disk, objects_of(source)) == 3


def test_a_reset_that_the_disk_does_not_know_is_carried_out_on_it_first() -> None:
    source, disk = new_disk(), disk_with(BLOCKS[:2])
    forbid(source, [], [KEY[0]], 9)
    fill(open_device(source), 0, BLOCKS[2:4])
    assert taken(disk, objects_of(source)) == 2
    assert adopted(disk) == {*BLOCKS[1:4]}
    # And what was saved anew after it replaces what it dropped.
    fill(open_device(source), 1, [KEY])
    assert taken(disk, objects_of(source)) == 1
    assert adopted(disk) == {*BLOCKS[:4]}


def test_what_was_saved_anew_after_that_reset_comes_in_place_of_what_it_dropped() -> None:
    source, disk = new_disk(), disk_with([KEY])
    forbid(source, [], [KEY[0]], 9)
    fill(open_device(source), 0, [KEY])
    assert taken(disk, objects_of(source)) == 1
    assert adopted(disk) == {KEY}


def test_values_in_a_signed_object_are_dropped() -> None:
    source = disk_with([KEY, VALUE])
    (state,) = begun_regions(device := opened(source))
    region = RegionObject(source, state)
    region.blocks = device.blocks(state)
    disk = new_disk()
    assert taken(disk, {region.name: b"".join(region.pieces(SECRET))}) == 1
    assert adopted(disk) == {KEY}


@pytest.mark.parametrize("later_first", [False, True])
def test_objects_from_before_and_after_a_reset_in_any_order(later_first: bool) -> None:
    source = disk_with(BLOCKS[:2])
    before = objects_of(source)
    forbid(source, [], [KEY[0]], 9)
    fill(open_device(source), 1, BLOCKS[2:3])
    after = {name: raw for name, raw in objects_of(source).items() if name not in before}
    disk = new_disk()
    for objects in (after, before) if later_first else (before, after):
        taken(disk, objects)
    assert adopted(disk) == set(BLOCKS[1:3])


def test_a_reset_that_the_node_hears_of_later_drops_what_was_imported() -> None:
    disk, known = new_disk(), Resets()
    taken(disk, objects_of(disk_with(BLOCKS[:2])))
    known.add(9, [KEY[0]])
    settle([open_device(disk)], known, 5)
    assert adopted(disk) == {BLOCKS[1]}


def test_a_deletion_elsewhere_while_the_disk_was_away_still_empties_it() -> None:
    disk, other = disk_with(BLOCKS[:1]), new_disk()
    devices = [open_device(disk), open_device(other, 1)]
    assert settle(devices, Resets(), 5) == devices
    assert settle([open_device(other, 1)], Resets(), 6)
    forbid(other, [KEY], None)
    taken(disk, objects_of(disk_with(BLOCKS[1:2])))
    settle([open_device(disk), open_device(other, 1)], Resets(), 7)
    assert adopted(disk) == set()


# --- what interrupts it -------------------------------------------------------------------------


@pytest.mark.parametrize("loses", [False, True], ids=["killed", "power_loss"])
def test_wherever_it_ends_no_half_object_counts_and_the_next_one_goes_on(loses: bool) -> None:
    objects = objects_of(disk_with(BLOCKS[:2], BLOCKS[2:4], BLOCKS[4:]))
    wholes = [set(), set(BLOCKS[:2]), set(BLOCKS[:4]), set(BLOCKS)]
    ended = 0
    for steps in range(200):
        disk = new_disk()
        open_device(disk)
        disk.sync()
        disk.power_fails_in = steps
        try:
            taken(disk, objects)
        except PowerLossError:
            ended += 1
        else:
            break
        disk.power_fails_in = None
        if loses:
            disk.power_loss()
            adopted(disk, misses=True)
        else:
            assert adopted(disk) in wholes
        taken(disk, objects)
        assert adopted(disk, misses=loses) == set(BLOCKS)
    assert ended > 30


def test_an_object_that_ends_early_leaves_room_for_the_others() -> None:
    ((name, raw),) = objects_of(disk_with(BLOCKS[:4])).items()
    disk = new_disk()
    importer = Importer(open_device(disk), [SECRET])
    for _ in range(20):
        with pytest.raises(RegionObjectError):
            importer.take(name, io.BytesIO(raw[:-1]).read)
    assert importer.take(name, io.BytesIO(raw).read) == 4
    assert bytes_of(KEY) in raw
