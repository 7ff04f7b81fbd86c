"""What the index hears of blocks on disks, while they come and go."""

import pytest
from test_tier import KEYS, NS, WRITER, Disk, Driven

from kvstore.core.events import Clear, DiskClosed, DiskDamaged, Drop
from kvstore.core.scrub import Scrub
from kvstore.record import disk_location, pack_record, unpack_record


class Told(Driven):
    """One whose outbox goes to an index, which is a dict."""

    def __init__(self, *disks, **options):
        super().__init__(*disks, **options)
        self.records = {}

    def publish(self):
        outbox = self.core.blocks.outbox
        for _ in range(10_000):
            while outbox.rounds_due:
                self.tier.queue_copies(7)
            work = outbox.take_publications(100)
            self.records |= work
            outbox.published(work)
            gone = outbox.take_removals(100)
            for key, record in gone:
                if self.records.get(key) == record:
                    del self.records[key]
            outbox.removed(gone)
            if not work and not gone:
                return
        raise AssertionError("it never ends")

    def holds_true(self):
        """Each block in memory or on a disk has the one right record, and nothing else has one."""
        self.publish()
        right = {}
        for key in KEYS:
            block = self.tier.there(key)
            if block is not None:
                right[key] = pack_record(key, disk_location(7, 1, block))
        for key, slot in self.core.blocks.by_key.items():
            right[key] = slot.record
        assert self.records == right
        return {key for key, record in right.items() if unpack_record(key, record).segment}


@pytest.fixture
def node():
    node = Told(Disk(), Disk(uuid=b"\2" * 16), write="eviction").adopt()
    node.save(*KEYS[:16])
    node.settle()
    node.evict(8)
    assert set(KEYS[:8]) <= node.holds_true()
    return node


def test_what_is_written_over_or_saved_again_has_the_record_of_where_it_is_now(node):
    node.save(*KEYS[:4])
    assert not node.holds_true() & set(KEYS[:4])
    for key in KEYS[300:360]:
        node.save(key)
        node.settle()
    assert node.stats()["disk_regions_evicted"] > 0
    assert node.holds_true()


def test_what_is_on_a_disk_is_not_in_the_index_before_it_is_written():
    node = Told(Disk(), write="eviction").adopt()
    node.save(*KEYS[:16])
    node.step()
    plan = node.plan()
    assert plan.blocks
    for key in KEYS[100:116]:
        node.reserve([key])
    node.publish()
    assert not set(node.records) & {one.block.key for one in plan.blocks}
    node.told(plan.blocks, node.write(plan.blocks))
    node.publish()
    assert {one.block.key for one in plan.blocks} <= set(node.records)


@pytest.mark.parametrize("how", ["drop", "clear", "damaged", "closed"])
def test_what_left_the_disk_has_no_record(node, how):
    on_disk = node.holds_true()
    if how == "drop":
        node.ask(Drop(1, 1, KEYS[:3]))
    elif how == "clear":
        node.ask(Clear(1, 1, NS))
        node.forbid()
    elif how == "damaged":
        node.ask(DiskDamaged(WRITER, 1, node.index.get(KEYS[0])))
    else:
        node.ask(DiskClosed(WRITER, 1, 1))
    left = node.holds_true()
    assert left < on_disk
    assert bool(left) == (how != "clear")


def test_all_are_told_again_after_a_restart_and_when_the_index_lost_them(node):
    on_disk = node.holds_true()
    node.records.clear()
    node.core.blocks.republish()
    assert node.holds_true() == on_disk
    again = Told(*node.disks).adopt()
    assert again.holds_true() == {*on_disk, *node.core.blocks.by_key} & again.holds_true()
    assert on_disk <= again.holds_true()


def test_the_scrub_finds_records_of_disks_that_were_lost(node):
    on_disk = node.holds_true()
    lost = sorted(on_disk)[:2]
    for key in lost:
        del node.records[key]
    scrub = Scrub(node.core)
    for _ in range(100):
        if keys := scrub.next(5):
            scrub.found(keys, [node.records.get(key) for key in keys], [None] * len(keys))
        node.publish()
    assert node.core.blocks.counts["repaired"] == 2
    assert node.holds_true() == on_disk
