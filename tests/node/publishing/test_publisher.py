"""What a node has told the index and what not, where parts of the index are away."""

import asyncio

import pytest
from disk_index import DictIndex
from stores import announcement

from kvstore.core.disk.tier import DiskTier
from kvstore.core.events import Commit, DiskAdopted, DiskFound, Drop, Reply, Reserve
from kvstore.core.node import NodeCore
from kvstore.errors import IndexUnavailableError
from kvstore.index.memory import MemoryIndex
from kvstore.keys import Namespace
from kvstore.limits import BATCH_KEYS_MAX
from kvstore.node.publishing import publisher as module
from kvstore.node.publishing.publisher import Publisher
from kvstore.node.publishing.scrubber import Scrubber
from kvstore.record import disk_location, pack_record
from kvstore.types import STORED, DiskBlock, DiskPlace, Location

KEYS = Namespace.named("test").block_keys(range(6), 1)
SIZE = 4096


class Sharded(MemoryIndex):
    """The model, of whose keys some are in a part that may be away."""

    away = frozenset()
    gone = False

    def publish(self, records):
        if self.gone:
            raise IndexUnavailableError("switched off")
        super().publish([pair for pair in records if pair[0] not in self.away])
        return [pair for pair in records if pair[0] in self.away]

    def remove(self, records):
        if self.gone:
            raise IndexUnavailableError("switched off")
        return super().remove(records)


class Heard:
    def __init__(self):
        self.answers = []

    def send(self, answer):
        self.answers.append(answer)

    def hang_up(self):
        raise AssertionError("nobody asked for that")


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def parts(loop, monkeypatch):
    monkeypatch.setattr(module, "INDEX_RETRY_S", 0.01)
    monkeypatch.setattr(module, "REMOVE_DELAY_S", 0.01)
    core, index = NodeCore(node_id=5, epoch=9, size_bytes=64 << 10), Sharded()
    return core, index, Publisher(core, index, loop)


def put(core, keys):
    n = len(keys)
    reserve = Reserve(1, 1, keys, [SIZE] * n, 3, [0] * n, [0] * n, [None] * n, [0] * n)
    grants = core.handle(reserve, 0.0).replies[0].body
    core.handle(Commit(1, 2, [(slot, generation, 0) for slot, generation, _ in grants]), 0.0)


def turn(loop, until, within_s=5.0):
    """Run the loop until that holds."""

    async def wait():
        while not until():
            await asyncio.sleep(0.001)

    loop.run_until_complete(asyncio.wait_for(wait(), within_s))


def present(index):
    return [record is not None for record in index.lookup(KEYS)]


def test_records_of_a_shard_that_is_away_stay_pending_until_it_took_them(loop, parts):
    core, index, publisher = parts
    index.away = frozenset(KEYS[::2])
    put(core, KEYS)
    publisher.schedule()
    turn(loop, lambda: any(present(index)))
    assert present(index) == [False, True] * 3
    assert core.blocks.outbox.publications_pending == 3
    index.away = frozenset()
    turn(loop, lambda: all(present(index)))
    assert core.blocks.outbox.publications_pending == 0
    assert not publisher.away


def test_answers_do_not_wait_for_a_shard_that_is_away(loop, parts):
    core, index, publisher = parts
    heard = Heard()
    index.away = frozenset(KEYS[:1])
    put(core, KEYS)
    publisher.answer(heard, Reply(1, 1, [STORED], True))
    assert heard.answers == []
    publisher.schedule()
    turn(loop, lambda: heard.answers)
    assert core.blocks.outbox.publications_pending == 1


class Steps:
    """A loop that goes on by one call at a time."""

    def __init__(self):
        self.due = []

    def call_soon(self, call):
        self.due.append(call)

    def call_later(self, delay_s, call):
        self.due.append(call)


@pytest.mark.parametrize("gone", [False, True])
def test_large_answers_that_waited_go_out_a_turn_each_and_small_ones_before_them(gone):
    core, index, steps = NodeCore(node_id=5, epoch=9, size_bytes=64 << 10), Sharded(), Steps()
    index.gone = gone
    publisher, heard = Publisher(core, index, steps), Heard()
    put(core, KEYS)
    large = [Reply(1, number, [STORED] * BATCH_KEYS_MAX, True) for number in range(16)]
    middle = [Reply(1, number, [STORED] * 100, True) for number in range(16, 22)]
    small = [Reply(1, number, [STORED], True) for number in range(22, 40)]
    named = [Reply(1, 40, {"dropped": 1}, True), Reply(1, 41, None, True)]
    for reply in (*large, *middle, *small, *named):
        publisher.answer(heard, reply)
    publisher.schedule()
    sent = []
    while steps.due and len(sent) < 40:
        before = len(heard.answers)
        steps.due.pop(0)()
        sent.append(heard.answers[before:])
    assert sent[0] == [*small, *named], "with the index's answer"
    assert [len(once) for once in sent[1:] if once] == [1] * 16 + [3, 3]
    assert [reply for once in sent[1:] for reply in once] == [*large, *middle]
    late = Reply(1, 42, [STORED] * BATCH_KEYS_MAX, True)
    publisher.answer(heard, late)
    publisher.schedule()
    while late not in heard.answers:
        steps.due.pop(0)()


def test_what_a_dead_index_did_not_take_goes_out_when_it_is_back(loop, parts):
    core, index, publisher = parts
    put(core, KEYS[:3])
    publisher.schedule()
    turn(loop, lambda: len(index) == 3)
    index.gone = True
    core.handle(Drop(1, 3, KEYS[:1]), 0.0)
    put(core, KEYS[3:4])
    publisher.schedule()
    turn(loop, lambda: publisher.away)
    assert core.blocks.outbox.publications_pending == core.blocks.outbox.removals_pending == 1
    index.gone = False
    turn(loop, lambda: present(index) == [False, True, True, True, False, False])
    turn(loop, lambda: not core.blocks.outbox.removals_pending)


def test_however_often_something_is_dropped_while_the_index_is_away_one_timer_tries_again():
    """Each drop tells the index at once; with a timer for each the node would do nothing else."""
    core, index, steps = NodeCore(node_id=5, epoch=9, size_bytes=64 << 10), Sharded(), Steps()
    publisher = Publisher(core, index, steps)
    put(core, KEYS)
    publisher.schedule()
    steps.due.pop(0)()
    index.gone = True
    for number, key in enumerate(KEYS):
        core.handle(Drop(1, 10 + number, [key]), 0.0)
        publisher.remove()
        publisher.schedule()
    assert len(steps.due) == 1
    for _ in range(5):
        steps.due.pop(0)()
        assert len(steps.due) == 1
    index.gone = False
    steps.due.pop(0)()
    assert not any(present(index))
    assert steps.due == []


def test_blocks_on_disks_are_told_in_batches_behind_others_once_the_index_takes_them(
    loop, parts, monkeypatch
):
    monkeypatch.setattr(module, "COPIES_BATCH", 10)
    core, index, publisher = parts
    disk = DiskTier(DictIndex(), [0])
    core.use_disks(disk)
    blocks = [DiskBlock(bytes([i]) * 32, DiskPlace(0, i, 1), 1, 0, 0, 1, 3) for i in range(100)]
    core.handle(DiskFound(2, 1, 0, b"d" * 16, [0], 1000, 1000, [1], 2), 0.0)
    core.handle(DiskAdopted(2, 1, 0, blocks, last=True), 0.0)
    index.gone = True
    put(core, KEYS)
    publisher.schedule()
    turn(loop, lambda: publisher.away)
    assert core.blocks.outbox.publications_pending <= len(KEYS) + 10
    index.gone = False
    publisher.schedule()
    turn(loop, lambda: None not in index.lookup([block.key for block in blocks]))
    assert all(present(index))
    assert core.blocks.outbox.rounds_due == 0
    publisher.withdraw_all()
    assert not any(index.lookup([*KEYS, *(block.key for block in blocks)]))


BLOCK = DiskBlock(KEYS[0], DiskPlace(0, 3, 1), SIZE, 0, 0, 1, 3)
ON_DISK = pack_record(KEYS[0], disk_location(5, 9, BLOCK))


def of(node_id, epoch, segment=0):
    return pack_record(KEYS[0], Location(node_id, epoch, segment, 2, 3, 1, SIZE, 1))


def with_disk(core):
    """Have the core find one block on its disk, of which the index is yet to hear."""
    core.use_disks(DiskTier(DictIndex(), [0]))
    core.handle(DiskFound(2, 1, 0, b"d" * 16, [0], 1000, 1000, [1], 2), 0.0)
    core.handle(DiskAdopted(2, 1, 0, [BLOCK], last=True), 0.0)


@pytest.mark.parametrize("stays", [of(6, 1), of(6, 1, segment=2)], ids=["memory", "disk"])
def test_a_record_of_another_node_that_lives_stays_until_its_copy_is_gone(loop, parts, stays):
    core, index, publisher = parts
    index.announce(6, announcement(node_id=6, epoch=1).pack(), 60.0)
    index.publish([(KEYS[0], stays)])
    with_disk(core)
    publisher.schedule()
    outbox = core.blocks.outbox
    turn(loop, lambda: not outbox.rounds_due and not outbox.publications_pending)
    assert index.lookup(KEYS[:1]) == [stays]
    index.remove([(KEYS[0], stays)])
    Scrubber(core, index, publisher, lambda: None).step()
    turn(loop, lambda: index.lookup(KEYS[:1]) == [ON_DISK])


@pytest.mark.parametrize(
    "goes",
    [of(6, 2), of(7, 1), of(5, 9), of(5, 8, segment=1), b"damaged"],
    ids=["a former start", "not announced", "its own memory", "its former start", "damaged"],
)
def test_what_nobody_has_in_memory_gives_its_place_to_a_disk(loop, parts, goes):
    core, index, publisher = parts
    index.announce(6, announcement(node_id=6, epoch=1).pack(), 60.0)
    index.publish([(KEYS[0], goes)])
    with_disk(core)
    publisher.schedule()
    turn(loop, lambda: index.lookup(KEYS[:1]) == [ON_DISK])


def test_records_that_name_many_nodes_cost_one_request(parts, monkeypatch):
    """Each request may take as long as the index's deadline, and the node's loop waits for it."""
    _core, index, publisher = parts
    asked = []
    for name in ("node", "nodes"):
        real = getattr(index, name)
        monkeypatch.setattr(index, name, lambda *args, real=real: asked.append(1) or real(*args))
    keys = [bytes([number]) * 32 for number in range(200)]
    records = [pack_record(key, Location(100 + n, 1, 0, 2, 3, 1, SIZE, 1))
               for n, key in enumerate(keys)]  # fmt: skip
    assert publisher.elsewhere(keys, records) == [None] * len(keys)
    assert len(asked) == 1


def test_while_nobody_can_be_looked_up_blocks_in_memory_are_told_and_those_on_disks_wait(
    loop, parts, monkeypatch
):
    core, index, publisher = parts
    real, asked = index.lookup, []

    def lookup(keys):
        asked.append(keys)
        if len(asked) < 4:
            raise IndexUnavailableError("it reads nothing")
        return real(keys)

    monkeypatch.setattr(index, "lookup", lookup)
    with_disk(core)
    publisher.schedule()
    turn(loop, lambda: asked)
    heard = Heard()
    put(core, KEYS[1:])
    publisher.answer(heard, Reply(1, 1, [STORED], True))
    publisher.schedule()
    turn(loop, lambda: heard.answers and None not in real(KEYS[1:]))
    assert real(KEYS[:1]) == [None]
    turn(loop, lambda: real(KEYS[:1]) == [ON_DISK])
