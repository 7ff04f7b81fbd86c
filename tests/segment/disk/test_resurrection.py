"""What was deleted, cleared or reset does not come back, whatever a power loss leaves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from disk_parts import KEYS, PAGE, REGIONS, SmallNode

from kvstore.testing.sim.models.disk import PowerLossError
from kvstore.types import DiskBlock

KEY = KEYS[1]
"""One whose kind may have other bytes later."""
NAMESPACE = KEY[0] % 3

FORBIDS: dict[str, Callable[[SmallNode], None]] = {
    "delete": lambda node: node.delete(KEY),
    "clear": lambda node: node.clear([NAMESPACE]),
    "clear_all": lambda node: node.clear([]),
    "reset": lambda node: node.clear([NAMESPACE], 1 << 40),
    "reset_all": lambda node: node.clear([], 1 << 40),
}


def on_disk(seed: int = 1) -> SmallNode:
    """Return a node with one value on its disk, synced, and none in memory."""
    node = SmallNode(seed)
    node.next_region()
    node.save(KEY)
    node.spill()
    node.disk.sync()
    node.memory.clear()
    assert node.get(KEY) == node.right[KEY]
    return node


def lose_all(node: SmallNode) -> None:
    """Lose all that was not synced, and start again."""
    node.disk.pending.clear()
    node.power_loss()


def test_without_being_forbidden_it_comes_back() -> None:
    node = on_disk()
    lose_all(node)
    assert node.get(KEY) == node.right[KEY]
    assert node.adopted == 1


@pytest.mark.parametrize("forbid", FORBIDS)
def test_what_was_confirmed_holds_although_all_else_is_lost(forbid: str) -> None:
    node = on_disk()
    FORBIDS[forbid](node)
    for _ in range(3):
        lose_all(node)
        assert node.get(KEY) is None
    node.save(KEY)
    node.next_region()
    node.spill()
    node.disk.sync()
    lose_all(node)
    assert node.get(KEY) == node.right[KEY]


@pytest.mark.parametrize("forbid", FORBIDS)
def test_another_value_of_the_key_that_is_lost_leaves_none(forbid: str) -> None:
    node = on_disk()
    FORBIDS[forbid](node)
    node.save(KEY)
    node.spill()
    lose_all(node)
    assert node.get(KEY) is None


@pytest.mark.parametrize("forbid", FORBIDS)
def test_power_may_fail_while_it_is_forbidden(forbid: str) -> None:
    for seed, steps in itertools.product(range(8), range(4)):
        node = on_disk(seed)
        node.disk.power_fails_in = steps
        try:
            FORBIDS[forbid](node)
        except PowerLossError:
            pass
        else:
            assert steps == 3  # two halves and a sync
        node.power_loss()
        if node.get(KEY) is None:  # and it stays so, now that another may be saved
            node.right.pop(KEY, None)
        for _ in range(2):
            lose_all(node)
            node.check()


@pytest.mark.parametrize("forbid", FORBIDS)
def test_a_write_on_its_way_when_it_is_forbidden_is_forbidden_too(forbid: str) -> None:
    node = SmallNode(1)
    node.next_region()
    node.save(KEY)
    late: list[Sequence[tuple[DiskBlock, bytes]]] = []
    write = node.device.write
    node.device.write = lambda *call: late.append(call[2]) or []  # type: ignore[method-assign]
    node.spill()
    node.index.clear()
    node.writing = {KEY}  # it has its place, and is not written yet
    FORBIDS[forbid](node)
    write(node.region, node.lap, *late)
    node.disk.sync()
    node.power_loss()
    assert node.adopted == 0


def test_a_region_that_was_given_up_does_not_come_back_with_its_old_header() -> None:
    node = on_disk()
    region = node.region
    while node.region != (region - 1) % REGIONS:
        node.next_region()
    node.next_region()
    assert node.index == {}
    node.delete(KEY)  # nothing is there, so nothing is logged
    node.save(KEY)
    lose_all(node)
    assert node.get(KEY) is None


def test_a_region_that_could_not_be_read_at_a_start_does_not_come_back_later() -> None:
    node = on_disk()
    for page in (
        node.device.geometry.start(node.region),
        node.device.geometry.start(node.region) + 1,
    ):
        node = on_disk()
        node.disk.unreadable.add(page)
        lose_all(node)
        assert node.index == {}
        node.delete(KEY)
        node.save(KEY)
        node.disk.unreadable.clear()
        lose_all(node)
        assert node.get(KEY) is None


def test_an_entry_that_was_damaged_on_its_way_does_not_come_back_later() -> None:
    node = on_disk()
    page = node.device.geometry.start(node.region) + 1
    good = node.disk.pages[page]
    node.disk.flip(page, 100)
    lose_all(node)
    assert node.index == {}
    node.delete(KEY)
    node.disk.pages[page] = good
    lose_all(node)
    assert node.get(KEY) is None


def test_a_value_that_could_not_be_read_once_does_not_come_back_later() -> None:
    node = on_disk()
    page = node.index[KEY].place.page
    good = node.disk.pages[page]
    node.disk.flip(page, 100)
    assert node.get(KEY) is None
    node.save(KEY)
    node.disk.pages[page] = good
    lose_all(node)
    assert node.get(KEY) is None


def test_a_lap_is_never_begun_twice() -> None:
    """A region of which all but the header landed says nothing of a later one of the same lap."""
    node = SmallNode(1)
    laps = []
    for _ in range(4):
        node.next_region()
        laps.append(node.lap)
        header = node.device.geometry.start(node.region)
        node.save(KEY)
        node.spill()
        node.disk.pages |= {p: v[-1] for p, v in node.disk.pending.items() if p != header}
        node.memory.clear()
        lose_all(node)
        assert node.index == {}
    assert len(set(laps)) == len(laps)


def test_an_entry_names_a_place_in_its_own_region() -> None:
    node = on_disk()
    block = node.index[KEY]
    start = node.device.geometry.start(node.region)
    elsewhere = node.device.geometry.start((node.region + 1) % REGIONS)
    node.disk.pages[elsewhere + 1] = node.disk.pages[start + 1]
    lose_all(node)
    assert node.index == {KEY: block}
    assert node.disk.page(elsewhere) == bytes(PAGE)
