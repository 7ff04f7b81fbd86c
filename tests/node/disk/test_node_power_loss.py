"""Whatever of a node's writes lands at a power loss, what is found is right, or a miss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from lossy_node import KEYS, LossyNode, Power, space_of, without_threads
from planted_node_bugs import PLANTS, Plant, planted

from kvstore.core.events import Clear, DiskClosed, Drop, Reset, Spill, Suspect, Touch
from kvstore.testing.sim.models.disk import PowerLossError

SEEDS, SEEDS_LONG, SEEDS_AT_NIGHT = 30, 200, 5000
PLANTED_SEEDS = 150
KEY, VALUE_KEY = KEYS[0], KEYS[1]


def survive_power_losses(
    seeds: Iterable[int], keys: Mapping[bytes, bytes] | None = None
) -> Counter[str]:
    """Return how often what happened."""
    total: Counter[str] = Counter()
    for seed in seeds:
        node = LossyNode(seed, keys=keys)
        try:
            with without_threads(node):
                node.story()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        total += Counter(node.seen)
        total += Counter(hits=node.hits, adopted=node.adopted)
    return total


def check(total: Counter[str], seeds: int) -> None:
    """See to it that there was something to find."""
    assert total["adopted"] > 4 * seeds
    assert total["hits"] > 2 * seeds
    assert total["not_confirmed"]


def test_what_is_found_is_right_after_any_power_loss() -> None:
    check(survive_power_losses(range(SEEDS)), SEEDS)


def test_what_is_found_on_encrypted_disks_is_right_after_any_power_loss() -> None:
    keys = {b"the one ": bytes(range(32)), b"formerly": bytes(32)}
    check(survive_power_losses(range(SEEDS), keys), SEEDS)


@pytest.mark.long
def test_what_is_found_is_right_after_many_power_losses() -> None:
    check(survive_power_losses(range(SEEDS, SEEDS + SEEDS_LONG)), SEEDS_LONG)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_what_is_found_is_right_after_very_many_power_losses() -> None:
    seeds = range(SEEDS + SEEDS_LONG, SEEDS_AT_NIGHT)
    check(survive_power_losses(seeds), len(seeds))


def finds(plant: Plant, seeds: int) -> bool:
    """Return whether one of so many seeds finds a bug."""
    with planted(plant):
        for seed in range(seeds):
            node = LossyNode(seed)
            try:
                with without_threads(node):
                    node.story()
            except AssertionError:
                return True
    return False


@pytest.mark.parametrize(
    "name", ["what is forbidden is adopted", "answers do not wait for the log"]
)
def test_a_planted_bug_is_found_soon(name: str) -> None:
    assert finds(PLANTS[name], 6)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_planted_bugs_without_a_story_are_found() -> None:
    names = PLANTS.keys() - STORIES.keys()
    assert {name for name in names if finds(PLANTS[name], PLANTED_SEEDS)} == names


@contextmanager
def quiet_node() -> Iterator[LossyNode]:
    """A context with a node that has a block and a value on its disks alone, synced, and other
    blocks."""
    node = LossyNode(0, is_quiet=True)
    with without_threads(node):
        node.start()
        for key in (KEY, VALUE_KEY, *KEYS[2:6]):
            node.save(key)
        node.settle()
        for file in node.files:
            file.sync()
        lose_all(node)
        for key in (KEY, VALUE_KEY):
            assert node.on_disk(key) is not None
        yield node


@pytest.fixture
def node() -> Iterator[LossyNode]:
    with quiet_node() as node:
        yield node


def lose_all(node: LossyNode) -> None:
    """Lose all that was not synced, and start again."""
    for file in node.files:
        file.pending.clear()
        file.power_loss()
    node.is_dead = False
    node.check()


def drop(node: LossyNode, key: bytes) -> None:
    """Delete what is not there (any more), and hear that it is durable."""
    node.request(Drop(0, 0, [key]), [key])
    node.commit()
    assert not node.waiting


def stays_away(node: LossyNode, key: bytes) -> None:
    lose_all(node)
    assert node.on_disk(key) is None, "it is back"


def first_page_of(node: LossyNode, key: bytes) -> tuple[Power, int]:
    """Return the disk of a block, and the page of its region's header."""
    block = node.on_disk(key)
    assert block is not None
    shape = node.disks.devices[block.place.device].geometry
    return node.files[block.place.device], shape.start(shape.region_of(block.place.page))


def begin_its_region(node: LossyNode, key: bytes) -> None:
    block = node.on_disk(key)
    assert block is not None
    device = node.disks.devices[block.place.device]
    ring = node.tier._rings[device.number]
    region = device.geometry.region_of(block.place.page)
    while (at := ring.next(0)) is not None and at.region != region:
        ring.begun(at, 0)
    assert at is not None
    node.writers[at.device]._begin(at)


# --- what the seeds above do not find --------------------------------------------------------


def the_power_fails_before_the_new_header(node: LossyNode, key: bytes = KEY) -> None:
    def begin(*what: object) -> None:
        node.request(Drop(0, 0, [key]), [key])
        assert not node.waiting, "nothing is there, so nothing is waited for"
        raise PowerLossError

    for device in node.disks.devices.values():
        device.begin = begin  # type: ignore[method-assign]
    drop(node, KEYS[9])
    with pytest.raises(PowerLossError):
        begin_its_region(node, key)
    stays_away(node, key)


def the_drive_loses_the_new_header(node: LossyNode) -> None:
    file, file.lose_page = first_page_of(node, KEY)
    begin_its_region(node, KEY)
    drop(node, KEY)
    for device in node.disks.devices.values():
        device.log.checkpoint()
    file.lose_page = -1
    stays_away(node, KEY)


def unreadable_at_a_start(node: LossyNode, page: int) -> None:
    file, header = first_page_of(node, KEY)
    file.unreadable = {header + page}
    node.check()
    assert node.on_disk(KEY) is None
    drop(node, KEY)
    file.unreadable = set()
    stays_away(node, KEY)


def on_disk_0(node: LossyNode) -> bytes:
    """Return a key of a block on the disk that is away in the next start."""
    there = {key: block for key in KEYS[:6:2] if (block := node.on_disk(key))}
    key = next(key for key, block in there.items() if block.place.device == 0)
    node.away = 0
    node.check()
    assert node.on_disk(key) is None
    return key


def a_disk_comes_back_after_a_delete(node: LossyNode) -> None:
    key = on_disk_0(node)
    drop(node, key)
    node.away = -1
    stays_away(node, key)


def a_disk_comes_back_after_a_reset(node: LossyNode) -> None:
    key = on_disk_0(node)
    node.request(Reset(0, 0, node.core.resets.next_number(1), (space_of(key),)), [key])
    node.commit()
    node.away = -1
    stays_away(node, key)


def a_flipped_bit_is_right_again(node: LossyNode) -> None:
    block = node.on_disk(KEY)
    assert block is not None
    file = node.files[block.place.device]
    file.flip(block.place.page, 7)
    node.carry_out(Suspect(1, [KEY]))
    node.settle()
    assert node.on_disk(KEY) is None
    drop(node, KEY)
    file.flip(block.place.page, 7)
    stays_away(node, KEY)


def a_drive_loses_what_it_did_not_sync(node: LossyNode) -> None:
    block = node.on_disk(KEY)
    assert block is not None
    file = node.files[block.place.device]
    pages, file.failing_syncs = dict(file.pages), 9
    node.request(Drop(0, 0, [KEY]), [KEY])
    node.commit()
    assert not node.waiting
    file.pages = pages
    lose_all(node)


def it_is_deleted_just_before_it_is_read_back(node: LossyNode) -> None:
    real = node.ask

    def ask(what: Any, *how: Any) -> Any:
        body = real(what, *how)
        if isinstance(what, Spill) and body.promote:
            node.request(Drop(0, 0, [KEY]), [KEY])
        return body

    node.ask = ask  # type: ignore[method-assign]
    node.carry_out(Touch(1, [KEY, KEY]))
    node.settle()
    assert not node.waiting
    node.get(KEY)


STORIES: dict[str, Callable[[LossyNode], None]] = {
    "a commit that failed is taken for done": a_drive_loses_what_it_did_not_sync,
    "a region is given up in memory alone": the_power_fails_before_the_new_header,
    "a region is given up after its blocks left": the_power_fails_before_the_new_header,
    "a new header counts before it is durable": the_drive_loses_the_new_header,
    "a header that cannot be read is believed later": lambda node: unreadable_at_a_start(node, 0),
    "entries that cannot be read are believed later": lambda node: unreadable_at_a_start(node, 1),
    "a disk that was away does not hear of resets": a_disk_comes_back_after_a_reset,
    "nobody notes the first delete": a_disk_comes_back_after_a_delete,
    "lost blocks are not forbidden": a_flipped_bit_is_right_again,
    "what was dropped meanwhile is read back": it_is_deleted_just_before_it_is_read_back,
}


@pytest.mark.parametrize("name", STORIES)
def test_a_planted_bug_that_no_seed_finds_is_found_by_its_story(name: str) -> None:
    with quiet_node() as node:
        STORIES[name](node)
    with (
        planted(PLANTS[name]),
        quiet_node() as node,
        pytest.raises(AssertionError, match="was dropped"),
    ):
        STORIES[name](node)


def test_a_value_that_leaves_with_its_region_stays_away(node: LossyNode) -> None:
    the_power_fails_before_the_new_header(node, VALUE_KEY)


def test_all_that_is_deleted_of_disks_that_are_left_alone_stays_away(node: LossyNode) -> None:
    """Once the last of it is out of the index, nothing says any more that there was a disk."""
    for number in node.disks.devices:
        node.carry_out(DiskClosed(2, 0, number))
    for key in KEYS[:6]:
        drop(node, key)
    lose_all(node)
    assert [key for key in KEYS if node.on_disk(key)] == []


def test_of_two_clears_at_once_none_is_answered_before_it_is_durable(node: LossyNode) -> None:
    other = KEYS[2]
    assert space_of(other) != space_of(KEY)
    node.request(Drop(0, 0, [KEYS[5]]), [KEYS[5]])
    for key in (KEY, other):
        node.request(Clear(0, 0, space_of(key)), [key])
    first = node.acts - 1
    while first in node.waiting:
        node.disks._commit_each()
        node.loop.calls.pop(0)()
    lose_all(node)
    assert node.on_disk(KEY) is None


def test_a_delete_is_not_answered_before_one_that_made_it_find_nothing(node: LossyNode) -> None:
    node.request(Drop(0, 0, [KEY]), [KEY])
    node.request(Drop(0, 0, [KEY]), [KEY])
    assert len(node.waiting) == 2
    node.commit()
    assert not node.waiting
    lose_all(node)
    assert node.on_disk(KEY) is None
