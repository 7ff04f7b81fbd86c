"""What goes to a node's disks, what of it is found, and what never comes back."""

import itertools
import random

import pytest
from disk_index import DictIndex

from kvstore.core.answers import Grant
from kvstore.core.disk import tier
from kvstore.core.disk.base import DISK_PAGE, order_of
from kvstore.core.disk.tier import DiskTier
from kvstore.core.events import (
    Begun,
    Clear,
    Commit,
    DiskAdopted,
    DiskClosed,
    DiskDamaged,
    DiskFound,
    Drop,
    Explain,
    Promoted,
    Reserve,
    Reset,
    Retain,
    Spill,
    Spilled,
    Stat,
    Suspect,
    Touch,
    Vacate,
)
from kvstore.core.node import NodeCore
from kvstore.core.outgoing.departures import GoneWhy
from kvstore.core.parts import joined, parts_of
from kvstore.core.report import ON_DISK_CODE
from kvstore.keys import Namespace
from kvstore.types import STORED, Kind

KIB, MIB = 1 << 10, 1 << 20
SIZE = 64 * KIB
CLIENT, WRITER = 1, 2
NS = Namespace.named("test").id
KEYS = Namespace.named("test").block_keys(range(400), 1)
REGION_PAGES = 4 * SIZE // DISK_PAGE


class Disk:
    """A device that keeps what was written to it: a header and entries for each region."""

    def __init__(self, regions=4, uuid=b"\1" * 16, pages=REGION_PAGES):
        self.uuid, self.pages = uuid, pages
        self.laps = [0] * regions
        self.resets = [0] * regions
        self.entries = [[] for _ in range(regions)]
        self.written = 0

    def region(self, place):
        return place.page // self.pages

    def found(self, number):
        firsts = [i * self.pages for i in range(len(self.laps))]
        laps = list(self.laps)
        return DiskFound(WRITER, 1, number, self.uuid, firsts, self.pages, 100, laps, max(laps) + 1)


class Driven:
    """A core with disks, and what its writer thread would do. A block's content is its checksum."""

    def __init__(self, *disks, size_bytes=MIB, index=None, **options):
        self.disks = disks
        self.now = 0.0
        self.index = index or DictIndex()
        self.tier = DiskTier(self.index, range(len(disks)), **options)
        self.core = NodeCore(node_id=7, epoch=1, size_bytes=size_bytes)
        self.core.use_disks(self.tier)
        self.forbidden = []

    def adopt(self, forbidden=()):
        for number in range(len(self.disks)):
            self.find(number)
            self.adopt_from(number, forbidden)
        return self

    def find(self, number):
        self.ask(self.disks[number].found(number))

    def adopt_from(self, number, forbidden=()):
        disk = self.disks[number]
        for region, entries in enumerate(disk.entries):
            blocks = [
                block._replace(place=block.place._replace(device=number))
                for block in entries
                if not any(self.forbids(one, disk, region, block, number) for one in forbidden)
            ]
            self.ask(DiskAdopted(WRITER, 1, number, blocks))
        self.ask(DiskAdopted(WRITER, 1, number, [], last=True))

    @staticmethod
    def forbids(one, disk, region, block, number):
        if one.namespace_ids is None:
            meant = block.key in one.keys
        else:
            meant = not one.namespace_ids or block.namespace_id in one.namespace_ids
        older = order_of(block.place) <= one.up_to.get(number, 1 << 63)
        return meant and (older or disk.resets[region] < one.reset_number)

    def ask(self, event):
        effects = self.core.handle(event, self.now)
        return effects.replies[0].body if effects.replies else None

    def effects(self, event):
        return self.core.handle(event, self.now)

    def reserve(self, keys, size=SIZE, kind=Kind.BLOCK, ns=NS):
        n = len(keys)
        return self.ask(
            Reserve(CLIENT, 1, keys, [size] * n, ns, [kind] * n, [0] * n, [None] * n, [0] * n)
        )

    def save(self, *keys, checksum=1, **how):
        """Save one by one, so that the first is the coldest; the effects of the last commit."""
        for key in keys:
            (grant,) = self.reserve([key], **how)
            item = (grant.slot_id, grant.generation, checksum)
            effects = self.effects(Commit(CLIENT, 1, [item]))
        return effects

    def plan(self, at_most=16 * MIB):
        return self.ask(Spill(WRITER, 1, at_most))

    def write(self, writes):
        done = []
        for one in writes:
            disk = self.disks[one.block.place.device]
            block = one.block._replace(checksum=one.block.checksum or 99)
            assert disk.laps[disk.region(block.place)] == block.place.lap
            disk.entries[disk.region(block.place)].append(block)
            disk.written += -(-block.length // DISK_PAGE) * DISK_PAGE
            done.append(block)
        return done

    def told(self, writes, done, failed=False):
        self.ask(Spilled(WRITER, 1, writes, done, failed))

    def begin(self, begin):
        disk = self.disks[begin.device]
        again = self.ask(Vacate(WRITER, 1, begin, list(disk.entries[begin.region])))
        disk.laps[begin.region] = begin.lap
        disk.resets[begin.region] = begin.reset_number
        disk.entries[begin.region] = []
        self.ask(Begun(WRITER, 1, begin))
        self.told(again, self.write(again))

    def step(self):
        """One round of the writer thread; whether there was something to do."""
        plan = self.plan()
        self.told(plan.blocks, self.write(plan.blocks))
        if plan.begin is not None:
            self.begin(plan.begin)
        for block in plan.promote:
            what = ([block.kind], [block.meta_length], [None], [0])
            reserve = Reserve(WRITER, 1, [block.key], [block.length], block.namespace_id, *what)
            (grant,) = self.ask(reserve)
            if not isinstance(grant, Grant):
                continue
            item = (grant.slot_id, grant.generation, block.checksum)
            self.ask(Promoted(WRITER, 1, [item], plan.clears))
        self.forbid()
        return bool(plan.blocks or plan.begin or plan.promote)

    def settle(self):
        for _ in range(1000):
            if not self.step():
                return
        raise AssertionError("the writer never comes to an end")

    def forbid(self):
        while self.tier.sweep(10):
            pass
        self.forbidden += self.tier.outgoing()

    def stats(self):
        return self.ask(Stat(CLIENT, 1))

    def evict(self, count, **how):
        """Save other blocks until so many are evicted."""
        before = self.core.blocks.counts["evicted"]
        at = 200
        while self.core.blocks.counts["evicted"] < before + count:
            self.save(KEYS[at], **how)
            self.settle()
            at += 1


@pytest.fixture
def node():
    return Driven(Disk(regions=16), write="eviction").adopt()


def test_a_node_that_is_not_full_writes_nothing(node):
    node.save(*KEYS[:10])
    node.settle()
    assert node.disks[0].written == 0
    assert node.disks[0].laps == [0] * 16


def test_what_was_evicted_is_on_a_disk(node):
    node.save(*KEYS[:16])
    node.settle()
    node.evict(8)
    assert all(node.index.get(key) is not None for key in KEYS[:8])
    fates, *_ = node.ask(Explain(CLIENT, 1, KEYS[:1]))
    assert fates[0][0] == ON_DISK_CODE
    stats = node.stats()
    assert stats["disk_skipped_late"] == 0
    assert stats["disk_blocks"] * SIZE == stats["disk_bytes"] == stats["disk_written_bytes"]


def test_what_is_on_a_disk_is_not_written_again(node):
    node.save(*KEYS[:16])
    node.settle()
    node.evict(8)
    written = node.disks[0].written
    node.save(*KEYS[:2])
    node.settle()
    before = node.stats()["disk_written_bytes"]
    node.ask(Drop(CLIENT, 1, KEYS[200:300]))
    node.save(*KEYS[300:314])
    node.settle()
    keys = [block.key for entries in node.disks[0].entries for block in entries]
    assert len(keys) == len(set(keys))
    assert written <= before


def test_each_evicted_block_is_on_a_disk_or_counted_with_its_reason():
    node = Driven(Disk(regions=64), write="eviction").adopt()
    node.save(*KEYS[:128], size=8 * KIB)
    node.save(*KEYS[128:144])
    node.settle()
    node.evict(8)
    node.save(*KEYS[300:304])
    stats = node.stats()
    skipped = sum(count for name, count in stats.items() if name.startswith("disk_skipped"))
    on_disk = [key for key in KEYS if node.index.get(key) is not None]
    assert stats["disk_skipped_small"] == 128
    assert stats["disk_skipped_late"] > 0
    gone = [key for key in on_disk if key not in node.core.blocks.by_key]
    assert stats["evicted"] == skipped + len(gone)


def test_what_is_evicted_before_it_was_written_is_counted_as_late(node):
    node.save(*KEYS[:16])
    for key in KEYS[20:24]:
        node.save(key)
    assert node.stats()["disk_skipped_late"] == 4


def test_without_a_device_what_is_evicted_is_counted():
    node = Driven(Disk(), write="eviction")
    node.ask(DiskClosed(WRITER, 1, 0))
    node.save(*KEYS[:16])
    node.settle()
    node.save(KEYS[16])
    assert node.stats()["disk_skipped_no_device"] == 1


def test_a_block_larger_than_a_region_is_never_written():
    disk = Disk(regions=4, pages=8)
    node = Driven(disk, write="through").adopt()
    node.save(KEYS[0], size=9 * DISK_PAGE)
    node.save(KEYS[1], size=8 * DISK_PAGE)
    node.settle()
    assert [one.key for entries in disk.entries for one in entries] == [KEYS[1]]
    node.evict(2, size=SIZE)
    assert node.stats()["disk_skipped_large"] >= 1


def test_writing_through_writes_at_once_and_idle_after_a_while():
    for mode, wait_s in (("through", 0.0), ("idle", tier.IDLE_S)):
        node = Driven(Disk(regions=16), write=mode).adopt()
        node.save(*KEYS[:8])
        if wait_s:
            node.settle()
            assert node.index.blocks == 0
        node.now += wait_s
        node.settle()
        assert node.index.blocks == 8
        written = node.disks[0].written
        node.now += 100
        node.settle()
        assert node.disks[0].written == written


def test_a_node_that_is_never_idle_for_long_writes_in_its_pauses_what_was_saved_a_while_ago():
    node = Driven(Disk(regions=16), write="idle").adopt()
    node.save(*KEYS[:8])
    for _ in range(int(tier.IDLE_S)):
        node.settle()
        assert node.index.blocks == 0
        node.now += 0.9
        node.save(KEYS[200 + int(node.now)])
        node.now += 0.1
    node.ask(Touch(CLIENT, [KEYS[0]]))
    node.settle()
    assert node.index.blocks == 0, "it is no pause"
    node.now += 2 * tier.QUIET_S
    node.settle()
    assert [node.index.get(key) is not None for key in KEYS[:8]] == [True] * 8
    assert node.index.blocks == 8


def test_the_oldest_region_is_begun_again_and_its_blocks_are_gone(node):
    node.save(*KEYS[:16])
    for i in range(16, 16 + 80):
        node.save(KEYS[i])
        node.settle()
    stats = node.stats()
    assert stats["disk_regions_evicted"] > 0
    there = {block.key for entries in node.disks[0].entries for block in entries}
    assert stats["disk_blocks"] == len(there) <= 16 * 4
    for key in KEYS[:100]:
        assert (node.index.get(key) is not None) == (key in there)


def test_of_a_region_retained_blocks_have_a_second_chance_before_those_used_on_disk_alone():
    """All together at most a tenth of it, and of that half for what was used."""
    disk = Disk(regions=4, pages=40 * SIZE // DISK_PAGE)
    node = Driven(disk, write="through").adopt()
    hot, retained = KEYS[:10], KEYS[30:40]
    for key in KEYS[:40]:
        node.save(key)
        node.settle()
    node.ask(Touch(CLIENT, hot))
    node.ask(Retain(CLIENT, 1, retained, 10_000, 0))
    for key in KEYS[40:162]:
        node.save(key)
        node.settle()
    assert node.tier.counts["regions_evicted"] == 1
    kept = [key for key in KEYS[:40] if node.index.get(key) is not None]
    assert len([key for key in kept if key in hot]) == 2
    assert kept[2:] == retained[:2]


class Ledger(Driven):
    """What was really written: first since it was saved, and again."""

    def __init__(self, *disks, **options):
        super().__init__(*disks, **options)
        self.first, self.again, self.on_disk_since = 0, 0, set()

    def save(self, *keys, **how):
        self.on_disk_since.difference_update(keys)
        return super().save(*keys, **how)

    def write(self, writes):
        for key in (one.block.key for one in writes):
            if key in self.on_disk_since:
                self.again += SIZE
            else:
                self.first += SIZE
            self.on_disk_since.add(key)
        return super().write(writes)


@pytest.mark.parametrize("write", tier.WRITE_MODES)
@pytest.mark.parametrize("seed", range(2))
def test_what_is_written_again_is_at_most_a_tenth_of_what_was_first_written(write, seed):
    """Ten blocks are in use until their copies are written over, and then for a while not."""
    rng = random.Random(seed)
    node = Ledger(Disk(regions=5, pages=8 * SIZE // DISK_PAGE), write=write).adopt()
    others = itertools.cycle(KEYS[10:])
    for step in range(1300):
        in_use = rng.sample(KEYS[:10], 4) if step % 65 < 45 else []
        for key in [next(others), *in_use]:
            if key not in node.core.blocks.by_key and node.tier.there(key) is None:
                node.save(key)
            node.ask(Touch(CLIENT, [key]))
            node.step()
            assert node.again <= 0.1 * node.first
        node.now += rng.choice([0.0, 0.0, 2 * tier.IDLE_S])
        if rng.random() < 0.02:
            node.ask(Retain(CLIENT, 1, [rng.choice(KEYS[:10])], rng.choice([0, 1000]), 0))
    assert node.again > 0.05 * node.first, "it is not enough to never write again"
    stats = node.stats()
    assert stats["disk_again_bytes"] == node.again
    assert stats["disk_skipped_again"] > 0


def test_what_is_retained_stays_on_the_disk_when_its_region_is_written_over():
    disk = Disk(regions=4, pages=40 * SIZE // DISK_PAGE)
    node = Driven(disk, write="through").adopt()
    node.save(*KEYS[:2])
    node.settle()
    node.ask(Retain(CLIENT, 1, [KEYS[0]], 10_000, 0))
    for key in KEYS[2:250]:
        node.save(key)
        node.settle()
    assert node.tier.counts["regions_evicted"] > 0
    assert (node.index.get(KEYS[0]) is None, node.index.get(KEYS[1]) is None) == (False, True)


def test_a_second_use_brings_a_block_back_into_memory(node):
    node.save(*KEYS[:16])
    node.settle()
    node.evict(4)
    node.ask(Touch(CLIENT, [KEYS[0]]))
    node.settle()
    assert KEYS[0] not in node.core.blocks.by_key
    node.ask(Touch(CLIENT, [KEYS[0]]))
    node.settle()
    assert KEYS[0] in node.core.blocks.by_key
    assert node.stats()["disk_promoted"] == 1


@pytest.mark.parametrize("how", ["drop", "clear", "reset"])
def test_what_was_dropped_is_not_brought_back_by_a_read_that_was_under_way(node, how):
    node.save(*KEYS[:16])
    node.settle()
    node.evict(4)
    for _ in range(2):
        node.ask(Touch(CLIENT, [KEYS[0]]))
    plan = node.plan()
    (block,) = plan.promote
    drops = {
        "drop": Drop(CLIENT, 1, [KEYS[0]]),
        "clear": Clear(CLIENT, 1, NS),
        "reset": Reset(CLIENT, 1, 5, (NS,)),
    }
    (grant,) = node.reserve([KEYS[0]])
    node.ask(drops[how])
    node.ask(Promoted(CLIENT, 1, [(grant.slot_id, grant.generation, block.checksum)], plan.clears))
    assert KEYS[0] not in node.core.blocks.by_key


def test_what_was_dropped_while_it_was_written_is_not_found(node):
    node.save(*KEYS[:16])
    assert node.step()
    plan = node.plan()
    done = node.write(plan.blocks)
    key = plan.blocks[0].block.key
    node.ask(Drop(CLIENT, 1, [key]))
    node.told(plan.blocks, done)
    assert node.index.get(key) is None
    node.forbid()
    assert any(key in one.keys for one in node.forbidden)


def test_a_value_that_is_saved_over_another_one_forbids_it(node):
    node.save(*KEYS[:16], kind=Kind.BYTES, checksum=1)
    node.settle()
    node.evict(4)
    effects = node.save(KEYS[0], kind=Kind.BYTES, checksum=2)
    (reply,) = effects.replies
    assert reply.body == [STORED]
    assert reply.after_log
    assert node.index.get(KEYS[0]) is None
    node.forbid()
    node.save(KEYS[1], kind=Kind.BYTES, checksum=1)
    assert not node.tier.outgoing()
    assert node.index.get(KEYS[1]) is not None


def test_a_reset_closes_the_region_that_is_filled(node):
    node.save(*KEYS[:16])
    node.settle()
    node.evict(1)
    begun = sum(lap > 0 for lap in node.disks[0].laps)
    node.ask(Reset(CLIENT, 1, 77, (NS,)))
    node.forbid()
    node.save(*KEYS[100:116])
    node.evict(1)
    assert sum(lap > 0 for lap in node.disks[0].laps) == begun + 1
    assert max(node.disks[0].resets) == 77
    assert node.forbidden[-1].reset_number == 77


def test_a_start_finds_what_was_written_and_not_what_was_forbidden(node):
    node.save(*KEYS[:16])
    node.settle()
    node.evict(8)
    node.ask(Drop(CLIENT, 1, [KEYS[0]]))
    node.forbid()
    again = Driven(*node.disks, write="eviction").adopt(node.forbidden)
    assert again.index.get(KEYS[0]) is None
    assert all(again.index.get(key) == node.index.get(key) for key in KEYS[1:8])
    again.save(*KEYS[100:116])
    again.evict(1)
    assert len({lap for lap in again.disks[0].laps if lap}) == sum(
        lap > 0 for lap in again.disks[0].laps
    )


@pytest.mark.parametrize("how", ["drop", "clear", "replace"])
def test_what_is_dropped_before_it_was_adopted_is_not(node, how):
    node.save(*KEYS[:16], kind=Kind.BYTES)
    node.settle()
    node.evict(8, kind=Kind.BYTES)
    again = Driven(*node.disks, write="eviction")
    again.find(0)
    if how == "drop":
        effects = again.effects(Drop(CLIENT, 1, [KEYS[0]]))
    elif how == "clear":
        effects = again.effects(Clear(CLIENT, 1, NS))
    else:
        effects = again.save(KEYS[0], kind=Kind.BYTES, checksum=5)
    assert effects.replies[0].after_log
    again.forbid()
    again.adopt_from(0)
    assert again.index.get(KEYS[0]) is None
    assert (again.index.get(KEYS[1]) is None) == (how == "clear")
    third = Driven(*node.disks, write="eviction").adopt(again.forbidden)
    assert third.index.get(KEYS[0]) is None


def test_after_too_many_deletes_nothing_is_adopted_and_what_is_deleted_is_still_forbidden(
    node, monkeypatch
):
    monkeypatch.setattr(tier, "DROPPED_MAX", 10)
    node.save(*KEYS[:16])
    node.settle()
    node.evict(8)
    again = Driven(*node.disks, write="eviction")
    again.find(0)
    again.ask(Drop(CLIENT, 1, KEYS[300:311]))
    again.adopt_from(0)
    assert again.index.blocks == 0
    again.ask(Drop(CLIENT, 1, [KEYS[0]]))
    again.forbid()
    third = Driven(*node.disks, write="eviction").adopt(again.forbidden)
    assert third.index.get(KEYS[0]) is None
    assert third.index.get(KEYS[1]) is not None


def test_what_is_written_in_any_24_hours_stays_within_the_budget():
    disk = Disk(regions=8)
    budget = 20 * SIZE
    node = Driven(disk, write="eviction", bytes_per_day=budget).adopt()
    rng = random.Random(7)
    written = []
    for _ in range(600):
        node.now += rng.randrange(1200)
        key = KEYS[rng.randrange(400)]
        if key not in node.core.blocks.by_key:
            node.save(key)
        before = disk.written
        node.settle()
        written.append((node.now, disk.written - before))
        assert sum(n for at, n in written if at > node.now - 86400) <= budget
    assert disk.written > 2 * budget
    assert node.stats()["disk_skipped_budget"] > 0


def test_a_device_more_or_less_moves_its_share_of_the_keys_alone():
    def chosen(count):
        disks = [Disk(regions=1000, uuid=bytes([n + 1]) * 16) for n in range(count)]
        node = Driven(*disks, write="through", size_bytes=64 * MIB).adopt()
        node.save(*KEYS)
        node.settle()
        return {
            block.key: number
            for number, disk in enumerate(disks)
            for entries in disk.entries
            for block in entries
        }

    four, five = chosen(4), chosen(5)
    moved = [key for key in KEYS if four[key] != five[key]]
    assert all(five[key] == 4 for key in moved)
    assert 40 < len(moved) < 130


def test_what_a_client_found_damaged_is_looked_at_and_is_gone(node):
    node.save(*KEYS[:16])
    node.settle()
    node.evict(4)
    node.ask(Suspect(CLIENT, [KEYS[0], KEYS[399]]))
    (block,) = node.plan().promote
    node.ask(DiskDamaged(WRITER, 1, block))
    assert node.index.get(KEYS[0]) is None
    fates, *_ = node.ask(Explain(CLIENT, 1, KEYS[:1]))
    assert fates[0][0] == GoneWhy.CORRUPT
    assert node.stats()["disk_damaged"] == 1
    node.ask(DiskDamaged(WRITER, 1, block._replace(key=KEYS[1])))
    assert node.index.get(KEYS[1]) is not None


@pytest.mark.parametrize("kind", [Kind.BLOCK, Kind.BYTES])
def test_a_block_that_may_have_been_written_is_forbidden_when_the_device_fails(node, kind):
    node.save(*KEYS[:16], kind=kind)
    node.step()
    plan = node.plan()
    place = plan.blocks[0].block.place
    node.told(plan.blocks, [None] * len(plan.blocks), failed=True)
    node.forbid()
    forbidden = {key for one in node.forbidden for key in one.keys}
    written = {one.block.key for one in plan.blocks}
    assert forbidden == written
    node.step()
    again = node.plan().blocks
    assert {one.block.key for one in again} == written
    assert {one.block.place.lap for one in again} == {place.lap + 1}


def test_a_region_that_cannot_be_begun_is_passed_over(node):
    node.save(*KEYS[:16])
    first = node.plan().begin
    node.ask(Begun(WRITER, 1, first, done=False))
    second = node.plan().begin
    assert second.region != first.region
    assert second.lap > first.lap
    node.settle()
    there = [block for block in map(node.index.get, KEYS) if block is not None]
    assert there
    assert first.region not in {node.disks[0].region(block.place) for block in there}


class FourBlocks(DictIndex):
    """An index that has no room for a fifth."""

    most = 4

    def put(self, block):
        full = self.blocks >= self.most and self.get(block.key) is None
        gone = next(iter(self._blocks.values())) if full else None
        if gone is not None:
            self.remove(gone.key)
        return super().put(block) or gone


def test_an_index_that_is_full_loses_the_one_that_had_to_go():
    node = Driven(Disk(regions=16), write="through", index=FourBlocks()).adopt()
    node.save(*KEYS[:8], kind=Kind.BYTES)
    node.settle()
    assert node.stats()["disk_skipped_table_full"] == 4
    node.forbid()
    assert {key for one in node.forbidden for key in one.keys} == set(KEYS[:4])


@pytest.mark.parametrize("kind", [Kind.BLOCK, Kind.BYTES])
def test_what_may_be_on_a_disk_and_is_in_no_index_any_more_is_forbidden(kind):
    """By its device's order, so that other copies stay; its answer holds nobody up."""
    for how in ("failed", "closed", "damaged"):
        node = Driven(Disk(regions=16), write="eviction").adopt()
        node.save(*KEYS[:16], kind=kind)
        node.step()
        if how == "damaged":
            node.settle()
            block = next(filter(None, map(node.index.get, KEYS)))
            events = [DiskDamaged(WRITER, 1, block)]
            lost = [block]
        else:
            plan = node.plan()
            lost = [one.block for one in plan.blocks]
            failed = Spilled(WRITER, 1, plan.blocks, [None] * len(lost), True)
            events = [failed] if how == "failed" else [DiskClosed(WRITER, 1, 0), failed]
        replies = [reply for event in events for reply in node.effects(event).replies]
        assert not any(reply.after_log for reply in replies)
        node.forbid()
        assert lost
        for block in lost:
            assert any(Driven.forbids(one, node.disks[0], 0, block, 0) for one in node.forbidden)


def test_a_delete_waits_for_what_was_forbidden_before(node):
    """Whether it finds the key or not: it says that it is gone. So does a save of a value."""
    node.save(*KEYS[:16])
    node.settle()
    node.evict(4)
    for keys, there in ((KEYS[:1], True), (KEYS[:1], False), (KEYS[300:301], False)):
        (reply,) = node.effects(Drop(CLIENT, 1, keys)).replies
        assert (reply.after_log, reply.body) == (True, [there])
        node.forbid()
    assert node.save(KEYS[300], kind=Kind.BYTES).replies[0].after_log


def test_nobody_else_waits_for_a_clear(node):
    node.save(*KEYS[:16])
    node.settle()
    node.evict(4)
    (reply,) = node.effects(Clear(CLIENT, 1, NS)).replies
    assert reply.after_log
    assert node.tier.sweeping
    assert not node.save(KEYS[300]).replies[0].after_log
    assert not node.effects(Stat(CLIENT, 1)).replies[0].after_log


def test_what_was_written_while_a_clear_goes_on_and_is_taken_out_is_forbidden(node):
    node.save(*KEYS[:16])
    node.settle()
    node.evict(4)
    node.ask(Clear(CLIENT, 1, NS))
    node.save(*KEYS[100:116])
    for _ in range(3):
        plan = node.plan()
        node.told(plan.blocks, node.write(plan.blocks))
        if plan.begin is not None:
            node.begin(plan.begin)
    late = [block for block in map(node.index.get, KEYS[100:116]) if block is not None]
    assert late
    node.forbid()
    assert not any(map(node.index.get, KEYS))
    region = node.disks[0].region
    for block in late:
        assert any(
            Driven.forbids(one, node.disks[0], region(block.place), block, 0)
            for one in node.forbidden
        )


def test_the_first_delete_of_a_start_is_noted_for_devices_that_are_away(node):
    node.ask(Drop(CLIENT, 1, [KEYS[0]]))
    node.ask(Drop(CLIENT, 1, [KEYS[1]]))
    assert [one.keys for one in node.tier.outgoing()] == [[]]


def two_copies():
    """Two disks that each have the block of one key, and the newer start that finds both."""
    disks = [Disk(regions=16, uuid=bytes([number]) * 16) for number in (1, 2)]
    for disk in disks:
        alone = Driven(disk, write="through").adopt()
        alone.save(KEYS[0])
        alone.settle()
        assert alone.index.get(KEYS[0]) is not None
    return disks


def test_of_two_copies_the_one_that_is_in_no_index_is_forbidden():
    disks = two_copies()
    node = Driven(*disks, write="eviction").adopt()
    node.forbid()
    kept = node.index.get(KEYS[0])
    again = Driven(*disks, write="eviction").adopt(node.forbidden)
    assert again.index.get(KEYS[0]) == kept
    again.forbid()
    assert again.forbidden == []
    node.ask(DiskDamaged(WRITER, 1, kept))
    node.forbid()
    (reply,) = node.effects(Drop(CLIENT, 1, [KEYS[0]])).replies
    assert reply.body == [False]
    third = Driven(*disks, write="eviction").adopt(node.forbidden)
    assert third.index.get(KEYS[0]) is None


def test_a_copy_on_a_closed_disk_that_another_one_replaces_is_forbidden():
    disks = two_copies()
    node = Driven(*disks, write="through").adopt()
    node.forbid()
    on = node.index.get(KEYS[0]).place.device
    node.ask(DiskClosed(WRITER, 1, on))
    assert node.index.closed == {on}, "readers leave it out"
    node.save(KEYS[0])
    node.settle()
    assert node.index.get(KEYS[0]).place.device == 1 - on
    again = Driven(*disks, write="eviction").adopt(node.forbidden)
    assert again.index.get(KEYS[0]) == node.index.get(KEYS[0])


def test_what_a_disk_that_closed_while_it_was_adopted_has_is_forbidden_when_it_is_dropped():
    disks = two_copies()
    node = Driven(disks[0], write="eviction")
    node.find(0)
    node.ask(DiskClosed(WRITER, 1, 0))
    node.ask(Drop(CLIENT, 1, [KEYS[0]]))
    node.forbid()
    again = Driven(disks[0], write="eviction").adopt(node.forbidden)
    assert again.index.get(KEYS[0]) is None


class TwoBlocks(FourBlocks):
    """An index that has no room for a third."""

    most = 2


def test_a_block_that_had_to_go_while_a_start_adopts_is_forbidden():
    disk = Disk(regions=16)
    node = Driven(disk, write="through").adopt()
    node.save(*KEYS[:4])
    node.settle()
    again = Driven(disk, write="eviction", index=TwoBlocks()).adopt()
    again.forbid()
    assert again.index.blocks == 2
    gone = {key for key in KEYS[:4] if again.index.get(key) is None}
    assert {key for one in again.forbidden for key in one.keys} == gone
    assert again.stats()["disk_adopted"] == 2


def test_the_answer_to_a_request_in_parts_waits_for_the_log_if_one_part_does(node):
    node.save(*KEYS[:16])
    node.settle()
    node.evict(4)
    whole = Drop(CLIENT, 1, [*KEYS[:4], *KEYS[300:312]])
    parts = parts_of(whole, 4)
    replies = []
    for part in parts:
        replies += node.effects(part).replies
        node.forbid()
    assert [reply.after_log for reply in replies] == [True] * 4
    replies[1:] = [reply._replace(after_log=False) for reply in replies[1:]]
    assert joined(whole, replies).after_log


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_a_key_is_its_last_value_or_a_miss(seed):
    Story(seed).run(400)


class Story:
    """Random saves, drops, resets, crashes and rounds of the writer, against what is right."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.disks = [Disk(regions=5, uuid=bytes([n + 1]) * 16) for n in range(2)]
        self.mode = self.rng.choice(tier.WRITE_MODES)
        self.node = Driven(*self.disks, write=self.mode).adopt()
        self.right = {}
        """The value that was saved last under each key, where none was dropped since."""
        self.log = []
        self.values = 0
        self.spaces = [NS, Namespace.named("b").id]

    def ns(self, key):
        return self.spaces[key[20] % 2]

    def run(self, steps):
        acts = [self.save] * 8 + [self.write] * 4 + [self.touch] * 2 + [self.partly] * 2
        acts += [self.drop, self.replace, self.idle]
        rare = [self.clear, self.reset, self.crash]
        for _ in range(steps):
            self.rng.choice(acts if self.rng.random() < 0.97 else rare)()
            self.node.forbid()
            self.check()

    def key(self):
        return KEYS[self.rng.randrange(60)]

    def save(self):
        key = self.key()
        self.values += 1
        taken = self.node.core.blocks.by_key.get(key)
        if taken is not None:
            return
        self.node.save(key, kind=Kind.BYTES, checksum=self.values, ns=self.ns(key))
        self.right[key] = self.values

    def replace(self):
        key = self.key()
        self.node.ask(Drop(CLIENT, 1, [key]))
        self.right.pop(key, None)
        self.save()

    def write(self):
        self.node.step()

    def partly(self):
        """The writer is in the middle when something else happens."""
        plan = self.node.plan()
        done = self.node.write(plan.blocks)
        self.rng.choice([self.save, self.drop, self.replace, self.clear])()
        lost = [block if self.rng.random() < 0.8 else None for block in done]
        self.node.told(plan.blocks, lost, failed=True)
        if plan.begin is not None and self.rng.random() < 0.8:
            self.node.begin(plan.begin)
        elif plan.begin is not None:
            disk = self.disks[plan.begin.device]
            there = list(disk.entries[plan.begin.region])
            again = self.node.ask(Vacate(WRITER, 1, plan.begin, there))
            self.node.told(again, [None] * len(again))

    def touch(self):
        self.node.ask(Touch(CLIENT, [self.key() for _ in range(4)]))

    def idle(self):
        self.node.now += 2 * tier.IDLE_S

    def drop(self):
        key = self.key()
        self.node.ask(Drop(CLIENT, 1, [key]))
        self.right.pop(key, None)

    def clear(self):
        space = self.rng.choice(self.spaces)
        self.node.ask(Clear(CLIENT, 1, space))
        self.right = {k: v for k, v in self.right.items() if self.ns(k) != space}

    def reset(self):
        spaces = self.rng.choice([(), (self.spaces[0],)])
        number = self.node.core.resets.next_number(self.rng.randrange(1 << 20, 1 << 30))
        self.node.ask(Reset(CLIENT, 1, number, spaces))
        self.right = {k: v for k, v in self.right.items() if spaces and self.ns(k) not in spaces}

    def crash(self):
        """The host restarts: the disks have what was written, and the log."""
        self.log += self.node.forbidden
        self.node = Driven(*self.disks, write=self.mode)
        order = [0, 1]
        self.rng.shuffle(order)
        for number in order:
            self.node.find(number)
            self.rng.choice([self.save, self.drop, self.clear, self.idle])()
            self.node.forbid()
            self.node.adopt_from(number, self.log)

    def check(self):
        for key in KEYS[:60]:
            block = self.node.index.get(key)
            if block is not None:
                assert block.checksum == self.right.get(key), key.hex()
            slot = self.node.core.blocks.by_key.get(key)
            if slot is not None and slot.on_disk and block is not None:
                assert slot.checksum == block.checksum
        for disk in self.disks:
            assert all(len(entries) <= 4 for entries in disk.entries)
