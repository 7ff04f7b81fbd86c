"""Whatever of a node's writes lands at a power loss, what is found is right, or a miss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import pytest
from lossy_node import KEYS, LossyNode, space_of, without_threads
from planted_node_bugs import HARD, PLANTS, Plant, planted

from kvstore.core.events import Clear, Drop
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


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_planted_bugs_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    found = {name for name, plant in PLANTS.items() if finds(plant, PLANTED_SEEDS)}
    with capsys.disabled():
        print(f"{len(found)} of {len(PLANTS)} planted bugs; not {sorted(PLANTS.keys() - found)}")
    assert PLANTS.keys() - HARD <= found


@pytest.fixture
def node() -> Iterator[LossyNode]:
    """A node with a block and a value on its disks alone, synced."""
    node = LossyNode(0, is_quiet=True)
    with without_threads(node):
        node.start()
        for key in (KEY, VALUE_KEY):
            node.save(key)
        node.settle()
        for file in node.files:
            file.sync()
        lose_all(node)
        for key in (KEY, VALUE_KEY):
            assert node.on_disk(key) is not None
        yield node


def lose_all(node: LossyNode) -> None:
    """Lose all that was not synced, and start again."""
    for file in node.files:
        file.pending.clear()
        file.power_loss()
    node.is_dead = False
    node.check()


@pytest.mark.parametrize("key", [KEY, VALUE_KEY], ids=["block", "value"])
def test_what_leaves_with_its_region_does_not_come_back_when_the_new_header_is_lost(
    node: LossyNode, key: bytes
) -> None:
    block = node.on_disk(key)
    assert block is not None
    device = node.disks.devices[block.place.device]

    def begin(*what: object) -> None:
        node.request(Drop(0, 0, [key]), [key])
        assert not node.waiting, "nothing is there, so nothing is waited for"
        raise PowerLossError

    device.begin = begin  # type: ignore[method-assign]
    ring = node.tier._rings[device.number]
    region = device.geometry.region_of(block.place.page)
    while (at := ring.next(0)) is not None and at.region != region:
        ring.begun(at, 0)
    assert at is not None
    node.request(Drop(0, 0, [KEYS[5]]), [KEYS[5]])
    node.commit()
    with pytest.raises(PowerLossError):
        node.writers[at.device]._begin(at)
    lose_all(node)
    assert node.on_disk(key) is None


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
