"""Blocks that are encrypted on a device: their bytes, or a miss; never another's, and never twice
with one nonce."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from disk_parts import KEYS, PAGE, SIZE, SmallNode, block_of, keys_of, open_device

from kvstore.core.resets import Resets
from kvstore.errors import UsageError
from kvstore.segment.disk import device as devices
from kvstore.segment.disk.adopt import adopt, settle
from kvstore.segment.disk.device import DiskDevice
from kvstore.segment.disk.format import ENTRY_BYTES, seed_of, with_checksum
from kvstore.segment.disk.seal import RegionSeal
from kvstore.testing.sim.models.disk import SimDisk
from kvstore.types import DiskBlock

OURS, OLD_AND_NEW, THEIRS = keys_of("ours"), keys_of("new", "ours"), keys_of("theirs")
VALUE = b"what the model was told " * 400


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk(SIZE, random.Random(3))


def written(
    disk: SimDisk, *values: bytes, keys: dict[bytes, bytes] = OURS
) -> tuple[DiskDevice, list[DiskBlock]]:
    """A device with these values in the first region, one behind the other."""
    device = open_device(disk, keys=keys)
    settle([device], Resets(), 1)
    lap, page = device.next_lap, device.geometry.first_page(0)
    device.begin(0, lap, 0)
    batch = []
    for key, value in zip(KEYS, values, strict=False):
        batch.append((block_of(key, value, page, lap), value))
        page += -(-len(value) // PAGE)
    return device, device.write(0, lap, batch)


def adopted(disk: SimDisk, keys: dict[bytes, bytes]) -> tuple[DiskDevice, list[DiskBlock]]:
    """What the next start finds."""
    disk.sync()
    device = open_device(disk, keys=keys)
    settle([device], Resets(), 2)
    found = [block for _, blocks in adopt(device) for block in blocks]
    device.log.commit()
    return device, found


def everything(disk: SimDisk) -> bytes:
    return b"".join(disk.page(page) for page in range(SIZE // PAGE))


def test_a_block_is_read_as_it_was_and_found_again_at_a_start(disk: SimDisk) -> None:
    values = [VALUE, b"x", bytes(3 * PAGE), VALUE[:PAGE]]
    device, blocks = written(disk, *values)
    assert [device.read(block) for block in blocks] == values
    assert all(len(block.tag) == 16 for block in blocks)
    again, found = adopted(disk, OURS)
    assert found == blocks[::-1]
    assert [again.read(block) for block in found[::-1]] == values


def test_no_part_of_a_value_and_no_checksum_of_it_is_on_the_disk(disk: SimDisk) -> None:
    _, (block,) = written(disk, VALUE)
    raw = everything(disk)
    assert all(VALUE[at : at + 16] not in raw for at in range(24))
    assert block.checksum.to_bytes(8, "little") not in raw
    assert block.key in raw, "which is a hash, and plain"
    _, (plain,) = written(SimDisk(SIZE, random.Random(4)), VALUE, keys={})
    assert plain.tag == b""


@pytest.mark.parametrize("at", [0, 1, 4095, 4096, len(VALUE) - 1])
def test_a_flipped_bit_of_what_is_encrypted_is_a_miss(disk: SimDisk, at: int) -> None:
    device, (block,) = written(disk, VALUE)
    disk.flip(block.place.page + at // PAGE, at % PAGE * 8 + 3)
    assert device.read(block) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": KEYS[1]},
        {"length": len(VALUE) - 1},
        {"kind": 2},
        {"meta_length": 1},
        {"namespace_id": 99},
        {"checksum": 12345},
        {"tag": bytes(16)},
        {"tag": b""},
    ],
)
def test_a_block_that_is_described_otherwise_is_a_miss(
    disk: SimDisk, wrong: dict[str, Any]
) -> None:
    device, (block,) = written(disk, VALUE)
    assert device.read(block._replace(**wrong)) is None
    assert device.read(block) == VALUE


def test_an_entry_that_was_forged_with_its_checksum_is_a_miss(disk: SimDisk) -> None:
    device, _ = written(disk, VALUE)
    page = device.geometry.start(0) + 1
    raw = bytearray(disk.page(page))
    raw[:32] = KEYS[5]
    raw[:ENTRY_BYTES] = with_checksum(bytes(raw[: ENTRY_BYTES - 8]), seed_of(device.uuid))
    disk.pending[page] = [bytes(raw)]
    again, (found,) = adopted(disk, OURS)
    assert found.key == KEYS[5]
    assert again.read(found) is None


def test_two_blocks_that_changed_places_are_misses(disk: SimDisk) -> None:
    device, (one, other) = written(disk, VALUE[:PAGE], VALUE[-PAGE:])
    pages = one.place.page, other.place.page
    for page, raw in zip(pages, [disk.page(page) for page in pages[::-1]], strict=True):
        disk.pending[page] = [raw]
    assert device.read(one) is device.read(other) is None
    swapped = one._replace(place=other.place), other._replace(place=one.place)
    assert [device.read(block) for block in swapped] == [None, None]


def test_a_region_that_was_copied_to_another_place_has_no_blocks(disk: SimDisk) -> None:
    device, _ = written(disk, VALUE)
    start, to = device.geometry.start(0), device.geometry.start(1)
    for page in range(to - start):
        disk.pending[to + page] = [disk.page(start + page)]
        disk.pending[start + page] = [bytes(PAGE)]
    assert adopted(disk, OURS)[1] == []


def test_a_new_key_encrypts_and_the_old_one_still_reads(disk: SimDisk) -> None:
    _, (old,) = written(disk, VALUE)
    device, found = adopted(disk, OLD_AND_NEW)
    assert (found, device.read(old)) == ([old], VALUE)
    device.begin(1, device.next_lap, 0)
    lap, page = device.next_lap - 1, device.geometry.first_page(1)
    (new,) = device.write(1, lap, [(block_of(KEYS[1], b"new", page, lap), b"new")])
    device, found = adopted(disk, OLD_AND_NEW)
    assert [device.read(block) for block in found] == [b"new", VALUE]
    # Without the old one its blocks are gone, and stay it.
    device, found = adopted(disk, keys_of("new"))
    assert (found, device.locked()) == ([new], {next(iter(OURS)): 1})
    assert device.read(old) is None
    assert adopted(disk, OLD_AND_NEW)[1] == [new]


def test_with_anothers_keys_nothing_is_found_and_the_missing_key_is_named(disk: SimDisk) -> None:
    _, (block,) = written(disk, VALUE)
    device, found = adopted(disk, THEIRS)
    assert (found, device.read(block)) == ([], None)
    assert device.locked() == {next(iter(OURS)): 1}


def test_a_key_with_the_id_of_another_decrypts_nothing(disk: SimDisk) -> None:
    _, (block,) = written(disk, VALUE)
    device, _ = adopted(disk, dict.fromkeys(OURS, bytes(32)))
    assert device.read(block) is None


def test_an_encrypted_disk_is_refused_without_keys_and_stays_as_it_is(disk: SimDisk) -> None:
    _, blocks = written(disk, VALUE)
    disk.sync()
    before = everything(disk)
    with pytest.raises(UsageError, match=r"disk_keys_file.*simulated disk, which is encrypted"):
        open_device(disk)
    assert everything(disk) == before
    assert adopted(disk, OURS)[1] == blocks


def test_plain_blocks_are_dropped_where_there_are_keys_and_do_not_come_back(disk: SimDisk) -> None:
    _, (block,) = written(disk, VALUE, keys={})
    device, found = adopted(disk, OURS)
    assert (found, device.read(block)) == ([], None)
    assert device.locked() == {b"": 1}
    assert adopted(disk, {})[1] == []


# --- nonces ---------------------------------------------------------------------------------


@pytest.fixture
def nonces(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    """By region's key and nonce, what was encrypted with both: it must be one value."""
    seen: dict[bytes, bytes] = {}
    real = RegionSeal.seal

    def seal(self: Any, block: DiskBlock, payload: memoryview, into: memoryview) -> DiskBlock:
        # Without the checksum: that alone is to make no difference.
        name = self._aes.key + block.place.page.to_bytes(4, "little")
        assert seen.setdefault(name, bytes(payload)) == bytes(payload), "a nonce is used twice"
        done: DiskBlock = real(self, block, payload, into)
        return done

    monkeypatch.setattr(RegionSeal, "seal", seal)
    return seen


def lives(seeds: range) -> tuple[int, int]:
    """Nodes that lose their power, each of which is then given an old copy of its disk too."""
    hits = adoptions = 0
    for seed in seeds:
        node = SmallNode(seed, OURS)
        node.live(25)
        copy = dict(node.disk.pages)
        node.live(25)
        node.disk.pages, node.disk.pending = copy, {}
        # What is deleted may come back with the copy: the oracle asks for the right bytes alone.
        node.known, node.closed_uuids = Resets(), set()
        node.right = {key: value for key, value in node.right.items() if key[0] % 2}
        node.start()
        for _ in range(3):
            node.next_region()
            for key in KEYS:
                node.save(key)
            node.spill()
        node.power_loss()
        hits, adoptions = hits + node.hits, adoptions + node.adopted
    return hits, adoptions


SEEDS = range(120)


def only_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values under names may be older ones after a copy came back: any that was ever saved."""
    saved: dict[bytes, set[bytes]] = {}
    save = SmallNode.save

    def noted(node: SmallNode, key: bytes) -> None:
        save(node, key)
        saved.setdefault(key, set()).add(node.memory.get(key, b""))

    def check(node: SmallNode) -> None:
        for key in KEYS:
            answer = node.get(key)
            assert answer is None or answer in saved[key]
            node.hits += answer is not None

    monkeypatch.setattr(SmallNode, "save", noted)
    monkeypatch.setattr(SmallNode, "check", check)
    monkeypatch.setattr(SmallNode, "act", _without_gets(SmallNode.act))


def _without_gets(act: Any) -> Any:
    def quiet(node: SmallNode) -> None:
        get, node.get = node.get, lambda key: None  # type: ignore[method-assign]
        try:
            act(node)
        finally:
            node.get = get  # type: ignore[method-assign]

    return quiet


def test_no_nonce_is_used_twice_over_power_losses_and_old_copies_of_the_disk(
    nonces: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_right(monkeypatch)
    hits, adoptions = lives(SEEDS)
    assert len(nonces) > 20 * len(SEEDS)
    assert hits > len(SEEDS)
    assert adoptions > len(SEEDS)


def test_a_salt_that_is_not_drawn_anew_is_found(
    nonces: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the former."""
    only_right(monkeypatch)
    monkeypatch.setattr(devices, "os", SimpleNamespace(urandom=bytes))
    with pytest.raises(AssertionError, match="a nonce is used twice"):
        lives(SEEDS)


def test_answers_from_an_encrypted_disk_are_right_after_any_power_loss() -> None:
    hits = adoptions = 0
    for seed in range(300):
        node = SmallNode(seed, OURS)
        for _ in range(2):
            node.live(20)
        hits, adoptions = hits + node.hits, adoptions + node.adopted
    assert hits > 300
    assert adoptions > 300


def test_a_device_does_not_go_on_with_a_region_of_a_former_start(disk: SimDisk) -> None:
    _, (block,) = written(disk, VALUE)
    again, _ = adopted(disk, OURS)
    with pytest.raises(OSError, match="takes no blocks"):
        again.write(0, block.place.lap, [])
