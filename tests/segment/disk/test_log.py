"""What is forbidden stays so over power losses, damage, and a log that is full."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from disk_parts import LOG_BYTES, PAGE, SIZE, open_device

from kvstore.core.disk.base import order_of
from kvstore.core.resets import Resets
from kvstore.segment.disk.adopt import settle
from kvstore.segment.disk.device import DiskDevice
from kvstore.segment.disk.forbidden import CLOSED_MAX, Record
from kvstore.segment.disk.log import APPENDED_MAX
from kvstore.testing.sim.models.disk import PowerLossError, SimDisk
from kvstore.types import DiskBlock, DiskPlace, Key, Kind

LOG_PAGES = range(2, 2 + LOG_BYTES // PAGE)
HALF_PAGES = LOG_BYTES // PAGE // 2


def key(number: int) -> Key:
    return number.to_bytes(32, "big")


KEY = key(1)


def block(of: Key = KEY, *, page: int = 70, lap: int = 1, namespace_id: int = 5) -> DiskBlock:
    return DiskBlock(of, DiskPlace(0, page, lap), 100, Kind.BYTES, 0, 1, namespace_id)


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk(SIZE, random.Random(3))


def started(disk: SimDisk, run: int = 1) -> DiskDevice:
    device = open_device(disk)
    settle([device], Resets(), run)
    return device


def again(disk: SimDisk, run: int = 2) -> DiskDevice:
    """Start after a power loss of which nothing landed."""
    disk.pending.clear()
    disk.power_loss()
    return started(disk, run)


def forbid(device: DiskDevice, keys: Sequence[Key], up_to: int) -> None:
    device.log.append(keys, None, 0, up_to)
    device.log.commit()


ORDER = order_of(block().place)


def test_a_key_is_forbidden_up_to_an_order_and_at_once(disk: SimDisk) -> None:
    device = started(disk)
    device.log.append([key(1)], None, 0, ORDER)
    for log in (device.log, (device.log.commit(), again(disk).log)[1]):
        assert log.forbids(block())
        assert not log.forbids(block(page=71))
        assert not log.forbids(block(lap=2))
        assert not log.forbids(block(key(2)))


def test_a_namespace_and_everything_are_forbidden_up_to_an_order(disk: SimDisk) -> None:
    device = started(disk)
    device.log.append((), [5, 6], 0, ORDER)
    device.log.commit()
    device = again(disk)
    assert device.log.forbids(block())
    assert device.log.forbids(block(namespace_id=6))
    assert not device.log.forbids(block(page=71))
    assert not device.log.forbids(block(namespace_id=7))
    device.log.append((), (), 0, ORDER)
    device.log.commit()
    device = again(disk, 3)
    assert device.log.forbids(block(namespace_id=7))
    assert not device.log.forbids(block(page=71))


def test_a_region_is_forbidden_below_a_lap(disk: SimDisk) -> None:
    device = started(disk)
    page = device.geometry.first_page(1)
    device.log.forbid_region(1, 8)
    device.log.commit()
    log = again(disk).log
    assert log.forbids(block(page=page, lap=7))
    assert not log.forbids(block(page=page, lap=8))
    assert not log.forbids(block(page=device.geometry.first_page(2), lap=7))


def test_a_region_that_failed_stays_forbidden_until_it_is_begun_again(disk: SimDisk) -> None:
    device = started(disk)
    device.begin(0, 1, 0)
    device.log.forbid_region(0, device.next_lap)
    for _ in range(2):
        device.log.checkpoint()
        assert device.log.forbids(block(lap=1))
    device.begin(0, device.next_lap, 0)
    device.log.checkpoint()
    assert not device.log.forbids(block(lap=1))  # nothing is there any more


def test_nothing_is_said_again_and_a_ticket_covers_what_came_before(disk: SimDisk) -> None:
    log = started(disk).log
    first, second = log.append([key(1)], None, 0, 1), log.append([key(2)], None, 0, 1)
    syncs = disk.syncs
    assert log.commit() == second > first
    assert log.commit() == second
    assert disk.syncs == syncs + 1


def test_a_reset_is_known_by_its_number_with_what_it_named(disk: SimDisk) -> None:
    device = started(disk)
    device.log.append((), [5, 9], 1 << 40, ORDER)
    device.log.append((), (), 2 << 40, ORDER)
    device.log.commit()
    for run in (2, 3):
        resets = again(disk, run).log.said.resets
        assert Resets().news(resets) == [(1 << 40, (5, 9)), (2 << 40, ())]


# --- power losses -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_power_may_fail_at_any_step_of_commits_and_checkpoints(seed: int) -> None:
    """Commit until the log has been written anew twice; each time that the power fails, all that
    was confirmed is there."""
    steps, rng = 0, random.Random(seed)
    disk = SimDisk(SIZE, rng)
    confirmed: dict[Key, int] = {}
    run = 1
    device = started(disk)
    while steps < 250:
        disk.power_fails_in = rng.randrange(1, 40)
        try:
            for _ in range(20):
                steps += 1
                names = {key(rng.randrange(30)): rng.randrange(1, 1 << 33) for _ in range(12)}
                for name, up_to in names.items():
                    device.log.append([name], None, 0, up_to)
                device.log.commit()
                for name, up_to in names.items():
                    confirmed[name] = max(confirmed.get(name, 0), up_to)
        except PowerLossError:
            pass
        run += 1
        disk.power_loss()
        device = started(disk, run)
        for name, up_to in confirmed.items():
            at = block(name, page=up_to & 0xFFFFFFFF, lap=up_to >> 32)
            assert device.log.forbids(at), f"seed {seed}, step {steps}"


def test_what_was_not_confirmed_may_be_gone_and_takes_nothing_along(disk: SimDisk) -> None:
    device = started(disk)
    forbid(device, [key(1)], ORDER)
    device.log.append([key(number) for number in range(2, 40)], None, 0, ORDER)
    disk.power_fails_in = 2  # both halves, and then the sync
    with pytest.raises(PowerLossError):
        device.log.commit()
    page = next(iter(disk.pending))
    disk.pending = {page: disk.pending[page]}
    disk.pages[page] = disk.pending.pop(page)[-1][:512].ljust(PAGE, b"\0")  # torn
    uuid = device.uuid
    device = again(disk)
    assert device.uuid == uuid
    assert device.log.forbids(block())
    assert not device.log.forbids(block(key(2)))


def test_what_landed_of_an_unfinished_checkpoint_is_none_of_the_next(disk: SimDisk) -> None:
    device = started(disk)
    uuid = device.uuid
    forbid(device, [key(number) for number in range(100)], ORDER)
    device.log.append([key(number) for number in range(100, 300)], None, 0, ORDER)
    disk.power_fails_in = 5  # a sync, and then most of the first half
    with pytest.raises(PowerLossError):
        device.log.checkpoint()
    page = max(disk.pending)
    disk.pages[page] = disk.pending[page][-1]
    for run in (2, 3):
        device = again(disk, run)
        assert device.uuid == uuid
        assert device.log.forbids(block(key(99)))
        assert not device.log.forbids(block(key(299)))


# --- damage -----------------------------------------------------------------------------


def log_pages_of(disk: SimDisk, half: int) -> list[int]:
    own = LOG_PAGES[half * HALF_PAGES : (half + 1) * HALF_PAGES]
    return [page for page in own if any(disk.page(page))]


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("how", ["flipped", "lost", "unreadable"])
def test_one_half_of_the_log_is_enough(disk: SimDisk, half: int, how: str) -> None:
    device = started(disk)
    for number in range(5):
        forbid(device, [key(number)], ORDER)
    for page in log_pages_of(disk, half):
        if how == "flipped":
            disk.flip(page, 300)
        elif how == "lost":
            disk.pages[page] = bytes(PAGE)
        else:
            disk.unreadable.add(page)
    uuid = device.uuid
    device = open_device(disk)
    assert device.uuid == uuid
    assert all(device.log.forbids(block(key(number))) for number in range(5))


@pytest.mark.parametrize(
    ("commit", "how"),
    [
        *((commit, "flipped") for commit in range(6)),
        *((commit, "lost") for commit in range(5)),
        *((commit, "of another place") for commit in range(1, 6)),
    ],
)
def test_where_both_halves_are_damaged_the_device_is_made_anew(
    disk: SimDisk, commit: int, how: str
) -> None:
    device = started(disk)
    for number in range(5):
        forbid(device, [key(number)], ORDER)
    for half in (0, 1):
        page = log_pages_of(disk, half)[commit]
        if how == "flipped":
            disk.flip(page, 300)
        else:
            disk.pages[page] = bytes(PAGE) if how == "lost" else disk.pages[page - 1]
    assert open_device(disk).uuid != device.uuid


def test_a_header_with_a_lap_that_the_log_does_not_know_says_that_it_is_an_old_one(
    disk: SimDisk,
) -> None:
    device = started(disk)
    before = {page: disk.page(page) for page in LOG_PAGES}
    device.begin(0, device.next_lap, 0)
    disk.sync()
    disk.pages |= before
    assert open_device(disk).uuid != device.uuid


def test_commits_behind_an_earlier_checkpoint_say_that_a_newer_one_is_lost(disk: SimDisk) -> None:
    device = started(disk)
    before = {page: disk.pages[page] for page in (LOG_PAGES[0], LOG_PAGES[HALF_PAGES])}
    device.log.checkpoint()
    forbid(device, [key(1)], ORDER)
    disk.pages |= before
    assert open_device(disk).uuid != device.uuid


def test_a_device_that_was_made_anew_has_nothing_of_its_former_self(disk: SimDisk) -> None:
    device = started(disk)
    for region in range(device.geometry.regions):
        device.begin(region, device.next_lap, 0)
    disk.sync()
    for half in (0, 1):
        disk.flip(log_pages_of(disk, half)[0], 300)
    made = open_device(disk)
    assert {state.lap for state in made.states()} == {0}
    assert made.log.commit() == 0  # no region has to be forbidden


# --- a log that is full -----------------------------------------------------------------


def test_what_forbids_only_laps_that_are_over_is_left_out(disk: SimDisk) -> None:
    device = started(disk)
    regions = device.geometry.regions
    for lap in range(1, 3 * regions):
        device.begin(lap % regions, lap, 0)
        forbid(device, [key(lap)], lap << 32 | 70)
    device.log.checkpoint()
    oldest = 2 * regions
    for lap in range(1, 3 * regions):
        assert device.log.forbids(block(key(lap), lap=lap)) == (lap >= oldest), lap


def test_nothing_is_left_out_while_an_old_header_may_count_again(disk: SimDisk) -> None:
    device = started(disk)
    for region in range(device.geometry.regions):
        device.begin(region, 1 + region, 0)
    forbid(device, [key(1)], 1 << 32 | 70)
    device.log.checkpoint()
    device.give_up(0)
    disk.lose_page = device.geometry.start(0)
    device.begin(0, device.next_lap, 0)
    device.log.checkpoint()
    assert device.log.forbids(block(lap=1))
    assert again(disk).log.forbids(block(lap=1))


def test_nothing_is_left_out_before_the_new_headers_are_durable() -> None:
    """The checkpoint may land and a header that was written before it not."""
    for steps in range(1, 8):
        disk = SimDisk(SIZE, random.Random(3))
        device = started(disk)
        for region in range(device.geometry.regions):
            device.begin(region, 1 + region, 0)
        forbid(device, [key(1)], 1 << 32 | 70)
        device.begin(0, device.next_lap, 0)
        disk.power_fails_in = steps
        try:
            device.log.checkpoint()
        except PowerLossError:
            disk.pending.pop(device.geometry.start(0), None)
        disk.pages |= {page: versions[-1] for page, versions in disk.pending.items()}
        device = again(disk)
        if device.states()[0].lap == 1:
            assert device.log.forbids(block(lap=1)), steps


def test_more_keys_than_fit_forbid_all_that_is_older_than_half_of_them(disk: SimDisk) -> None:
    device = started(disk)
    for start in range(0, 3000, 100):
        keys = [key(number) for number in range(start, start + 100)]
        for number, one in enumerate(keys):
            device.log.append([one], None, 0, start + number)
        device.log.commit()
    device.log.checkpoint()
    device = again(disk)
    folded = device.log.said.numbers[Record.ALL_UP_TO]
    assert 1000 < folded < 2800
    assert device.log.forbids(block(key(9999), page=folded, lap=0))
    assert not device.log.forbids(block(key(9999), page=folded + 1, lap=0))
    for number in range(3000):
        assert device.log.forbids(block(key(number), page=number, lap=0))
        if number > folded:
            assert not device.log.forbids(block(key(number), page=number + 1, lap=0))


def test_as_many_resets_as_a_node_remembers_fit_into_the_smallest_log(disk: SimDisk) -> None:
    device = started(disk)
    for number in range(1, 400):
        device.log.append((), range(number % 64), number << 20, 1)
        device.log.commit()
    for number in range(2 * CLOSED_MAX):
        device.log.note_closed(bytes([number]) * 16)
    device.log.checkpoint()
    assert len(device.log.said.closed) == CLOSED_MAX
    resets, former = again(disk).log.said.resets, device.log.said.resets
    assert (resets.pack(), resets.floor) == (former.pack(), former.floor)
    assert resets.floor


# --- a sync that fails ------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["failing_syncs", "failing_writes"])
def test_after_one_failed_sync_nothing_is_confirmed_any_more(disk: SimDisk, fault: str) -> None:
    device = started(disk)
    forbid(device, [key(1)], ORDER)
    setattr(disk, fault, 1)
    device.log.append([key(2)], None, 0, ORDER)
    with pytest.raises(OSError):
        device.log.commit()
    assert not disk.failing_syncs + disk.failing_writes
    for _ in range(2):
        with pytest.raises(OSError, match="its log is closed"):
            device.log.commit()
    told = device.trouble()
    assert told is not None
    assert "its log failed" in told
    for call in (
        lambda: device.begin(0, device.next_lap, 0),
        lambda: device.write(0, 1, []),
        lambda: device.read(block()),
    ):
        with pytest.raises(OSError, match="closed for good"):
            call()
    with pytest.raises(OSError, match="closed for good, since a sync failed"):
        open_device(disk)


def test_a_closed_device_is_known_to_the_others_where_it_cannot_say_so(disk: SimDisk) -> None:
    other_disk = SimDisk(SIZE, random.Random(4))
    device, other = open_device(disk), open_device(other_disk, 1)
    settle([device, other], Resets(), 1)
    before = dict(disk.pages)
    disk.failing_syncs = 9
    device.log.append([key(2)], None, 0, ORDER)
    with pytest.raises(OSError):
        device.log.commit()
    other.log.note_closed(device.uuid)
    other.log.commit()
    disk.pages, disk.failing_syncs = before, 0
    device, other = open_device(disk), open_device(other_disk, 1)
    assert settle([device, other], Resets(), 2) == [other]
    assert "noted elsewhere" in str(device.trouble())
    with pytest.raises(OSError, match="closed for good"):  # and now it says so itself
        open_device(disk)


def test_the_node_too_may_know_that_a_device_was_closed(disk: SimDisk) -> None:
    device = started(disk)
    assert settle([device], Resets(), 2, closed=[device.uuid]) == []


def test_while_a_sync_hangs_what_waits_for_it_is_bounded_and_all_of_it_is_forbidden(
    disk: SimDisk,
) -> None:
    device, batch = started(disk), range(1000)
    for start in range(0, 2 * APPENDED_MAX, len(batch)):
        device.log.append([key(start + i) for i in batch], None, 0, ORDER)
        assert len(device.log._appended) <= APPENDED_MAX
    assert len(device.log.said._keys) <= APPENDED_MAX + len(batch)
    device.log.commit()
    device = again(disk)
    assert all(device.log.forbids(block(key(i))) for i in range(0, 2 * APPENDED_MAX, 997))
    assert not device.log.forbids(block(KEY, lap=2))
