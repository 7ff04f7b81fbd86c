"""What is retained stays until its time, within its budget, whatever else is asked of the node."""

import random

import pytest
from allocator_pool import looks_around
from each_input import each

from kvstore.core.answers import Grant
from kvstore.core.events import (
    Clear,
    Commit,
    Copy,
    Corrupt,
    Drop,
    Keep,
    Pin,
    Reply,
    Reserve,
    Retain,
    SessionDead,
    Touch,
    Unpin,
)
from kvstore.core.memory import retained
from kvstore.core.memory.allocator import Allocator, move_cost
from kvstore.core.memory.granules import GRANULE_BYTES, PAGE
from kvstore.core.memory.retained import ENDS_SPARE, FOREVER, Retentions
from kvstore.core.memory.slots import Slot
from kvstore.core.node import NodeCore
from kvstore.keys import Namespace
from kvstore.limits import Limits
from kvstore.record import slot_of
from kvstore.testing.sim.faults import Faults
from kvstore.testing.sim.world import World
from kvstore.types import STORED, Retained

MIB = 1 << 20
SIZE = 4 * MIB
BLOCK = 16 << 10
FIT = SIZE // BLOCK
KEYS = Namespace.named("test").block_keys(range(20 * FIT), 1)
CLIENT, OTHER = 1, 2
ALICE, BOB = 11, 12


class Node:
    def __init__(self, limits=None, size_bytes=SIZE, **options):
        """Without limits one tenant may have retained all that the node may."""
        given = limits or Limits(retained_percent=80)
        self.core = NodeCore(node_id=5, epoch=9, size_bytes=size_bytes, limits=given, **options)
        if limits is None:
            self.core.blocks.retained = Retentions(size_bytes, 80, 80)
        self.now = 1000.0
        self.writes = []

    def ask(self, event):
        effects = self.core.handle(event, self.now)
        self.writes += effects.writes
        return effects.replies[0].body if effects.replies else None

    def put(self, *keys, size=BLOCK):
        n = len(keys)
        none = [0] * n
        event = Reserve(CLIENT, 1, keys, [size] * n, 3, none, none, [None] * n, none)
        granted = [(a[0], a[1], 0) for a in self.ask(event) if isinstance(a, Grant)]
        return self.ask(Commit(CLIENT, 2, granted)) == [STORED] * n

    def retain(self, *keys, ttl_s=60, tenant=ALICE):
        return self.ask(Retain(CLIENT, 3, keys, ttl_s, tenant))

    def check(self):
        World(0, Faults()).checks.books(self.core)

    def has(self, *keys):
        return all(key in self.core.blocks.by_key for key in keys)

    def flood(self, times, first=FIT, size=BLOCK):
        """Values of `times` the capacity, one after the other."""
        for key in KEYS[first : first + times * SIZE // size]:
            assert self.put(key, size=size)
        self.check()


@pytest.fixture
def node():
    return Node()


def test_a_retained_prefix_outlives_a_flood_of_ten_times_the_capacity(node):
    node.put(*KEYS[:20])
    assert node.retain(*KEYS[:10]) == [Retained.YES] * 10
    node.flood(10)
    assert node.has(*KEYS[:10])
    assert not any(key in node.core.blocks.by_key for key in KEYS[10:20])


def test_it_is_kept_by_nobody_it_outlives_who_asked(node):
    node.put(*KEYS[:3])
    node.retain(*KEYS[:3])
    node.ask(SessionDead(CLIENT))
    node.flood(2)
    assert node.has(*KEYS[:3])


def test_from_its_second_on_it_may_go_like_any_other(node):
    node.put(*KEYS[:3])
    node.retain(*KEYS[:3], ttl_s=5)
    node.now += 4.9
    node.flood(2)
    assert node.has(*KEYS[:3])
    node.now += 0.2
    node.flood(2, first=4 * FIT)
    assert not any(key in node.core.blocks.by_key for key in KEYS[:3])
    assert (len(node.core.blocks.retained), node.core.blocks.retained.bytes) == (0, 0)


def test_where_many_end_together_no_event_waits_for_all_of_them(node, monkeypatch):
    """Others' requests stand behind it; what is left ends with the next events."""
    monkeypatch.setattr(retained, "ENDED_AT_ONCE_MAX", 10)
    node.put(*KEYS[:25])
    node.retain(*KEYS[:25], ttl_s=5)
    node.now += 6
    left = []
    for _ in range(4):
        node.ask(Touch(CLIENT, []))
        left.append(len(node.core.blocks.retained))
    assert left == [15, 5, 0, 0]
    node.check()


def test_to_ask_again_makes_it_longer_and_never_shorter(node):
    node.put(KEYS[0])
    node.retain(KEYS[0], ttl_s=50)
    assert node.retain(KEYS[0], ttl_s=5) == [Retained.YES]
    assert node.core.blocks.by_key[KEYS[0]].kept_until == 1050
    assert node.retain(KEYS[0], ttl_s=70) == [Retained.YES]
    assert node.writes[-1] == Keep(node.core.blocks.by_key[KEYS[0]].slot_id, 1070, ALICE)
    node.now += 60
    node.flood(2)
    assert node.has(KEYS[0])
    assert node.core.blocks.counts["retentions"] == 1


def test_a_release_ends_it_and_gives_the_budget_back(node):
    node.put(*KEYS[:2])
    slot_id = node.core.blocks.by_key[KEYS[0]].slot_id
    node.retain(*KEYS[:2])
    assert node.retain(KEYS[0], ttl_s=0) == [Retained.YES]
    assert node.writes[-1] == Keep(slot_id, 0, 0)
    assert node.core.blocks.retained.bytes == BLOCK
    node.flood(2)
    assert not node.has(KEYS[0])
    assert node.has(KEYS[1])


def test_a_release_of_what_is_not_retained_changes_nothing(node):
    node.put(KEYS[0])
    assert node.retain(KEYS[0], KEYS[1], ttl_s=0) == [Retained.YES, Retained.ABSENT]
    assert not any(isinstance(write, Keep) for write in node.writes)


def test_what_another_tenant_retains_nobody_else_ends_or_lengthens(node):
    node.put(KEYS[0])
    node.retain(KEYS[0], ttl_s=50)
    assert node.retain(KEYS[0], ttl_s=50, tenant=BOB) == [Retained.YES]
    assert node.retain(KEYS[0], ttl_s=51, tenant=BOB) == [Retained.OTHERS]
    assert node.retain(KEYS[0], ttl_s=0, tenant=BOB) == [Retained.YES]
    assert (node.core.blocks.by_key[KEYS[0]].kept_until, len(node.core.blocks.retained)) == (
        1050,
        1,
    )


def test_what_is_absent_or_being_written_is_not_retained(node):
    none = [0]
    node.ask(Reserve(CLIENT, 1, KEYS[:1], [BLOCK], 3, none, none, [None], none))
    assert node.retain(*KEYS[:2]) == [Retained.ABSENT] * 2


def test_the_node_and_each_tenant_have_a_budget_to_the_byte():
    node = Node(Limits())
    node.put(*KEYS[:FIT])
    quarter = FIT // 4
    answers = node.retain(*KEYS[: quarter + 1])
    assert answers == [Retained.YES] * quarter + [Retained.TENANT_BUDGET]
    assert set(node.retain(*KEYS[quarter : 2 * quarter], tenant=BOB)) == {Retained.YES}
    assert node.retain(KEYS[-1 + FIT], tenant=13) == [Retained.NODE_BUDGET]
    assert node.core.blocks.retained.bytes == SIZE // 2
    assert node.core.blocks.counts["retentions_refused"] == 2
    node.retain(KEYS[0], ttl_s=0)
    assert node.retain(KEYS[-1 + FIT], tenant=13) == [Retained.YES]


@pytest.mark.parametrize("how", ["drop", "clear", "corrupt"])
def test_who_drops_it_means_it_and_the_broken_promise_is_counted(node, how):
    node.put(KEYS[0])
    node.retain(KEYS[0])
    slot = node.core.blocks.by_key[KEYS[0]]
    slot_id = slot.slot_id
    events = {
        "drop": Drop(OTHER, 1, KEYS[:1]),
        "clear": Clear(OTHER, 1, 3),
        "corrupt": Corrupt(slot_id, slot.generation),
    }
    node.ask(events[how])
    assert not node.has(KEYS[0])
    assert node.core.blocks.counts["retentions_broken"] == 1
    assert (len(node.core.blocks.retained), node.core.blocks.retained.bytes) == (0, 0)
    kept = [write for write in node.writes if isinstance(write, Keep)]
    assert kept[-1] == Keep(slot_id, 0, 0), "the next block there is not retained by it"


def test_a_pin_that_ends_does_not_end_it(node):
    node.put(KEYS[0])
    node.retain(KEYS[0])
    (record,) = node.ask(Pin(OTHER, 1, KEYS[:1]))
    node.ask(Unpin(OTHER, 2, [slot_of(record)]))
    node.flood(2)
    assert node.has(KEYS[0])


def test_a_pin_outlives_it(node):
    node.put(KEYS[0])
    node.retain(KEYS[0], ttl_s=5)
    (record,) = node.ask(Pin(OTHER, 1, KEYS[:1]))
    node.now += 10
    node.flood(2)
    assert node.has(KEYS[0])
    node.ask(Unpin(OTHER, 2, [slot_of(record)]))
    node.flood(2, first=4 * FIT)
    assert not node.has(KEYS[0])


class TestRoomBetween:
    """Every second block of a full node is retained: no two others lie beside each other."""

    @pytest.fixture
    def node(self):
        node = Node()
        node.put(*KEYS[:FIT])
        by_place = sorted(node.core.blocks.by_key.values(), key=lambda slot: slot.start)
        self.kept = [slot.key for slot in by_place[::2]]
        assert set(node.retain(*self.kept)) == {Retained.YES}
        node.writes.clear()
        return node

    def test_a_larger_value_still_finds_room(self, node):
        """Half of the node may be evicted: a put that fails would break another promise."""
        new = KEYS[FIT]
        assert node.put(new, size=4 * BLOCK)
        assert node.has(new, *self.kept)
        assert node.core.blocks.counts["evicted"] == 4, "two in the way, two for what moved"
        assert sum(isinstance(write, Copy) for write in node.writes) == 2

    def test_so_do_ten_times_as_many_as_fit_and_all_that_is_retained_stays(self, node):
        node.flood(10, size=4 * BLOCK)
        assert node.has(*self.kept)
        assert node.core.blocks.retained.bytes == len(self.kept) * BLOCK

    @each("size", [BLOCK, 2048 * BLOCK])
    @each("times", [2, 4, 6])
    def test_no_value_is_refused_where_others_lie_between_retained_and_pinned_blocks(
        self, size, times
    ):
        for of, first, second in ((8, 0, 4), (8, 3, 4), (16, 15, 5)):
            node = Node(size_bytes=FIT * size)
            node.put(*KEYS[:FIT], size=size)
            places = sorted(node.core.blocks.by_key.values(), key=lambda slot: slot.start)
            kept = [slot.key for slot in places[first::of]]
            pinned = [slot.key for slot in places[second::of]]
            for one, other in zip(kept, pinned, strict=True):
                assert node.retain(one) == [Retained.YES]
                assert None not in node.ask(Pin(OTHER, 1, [other]))
            for key in KEYS[FIT : 2 * FIT]:
                assert node.put(key, size=times * size)
            assert node.has(*kept, *pinned)
            node.check()

    def test_a_value_moves_up_to_its_own_size_though_that_is_more_than_one_request_may(self):
        node, size = Node(size_bytes=2048 * SIZE), 2048 * BLOCK
        node.put(*KEYS[:FIT], size=size)
        places = sorted(node.core.blocks.by_key.values(), key=lambda slot: slot.start)
        node.retain(*(slot.key for slot in places[::2]))
        assert node.put(KEYS[FIT], size=8 * size)

    def test_also_where_every_second_of_those_that_were_retained_is_so_no_more(self, node):
        node.retain(*KEYS[:FIT], ttl_s=5)
        node.now += 6
        node.flood(10, size=4 * BLOCK)
        assert node.has(*self.kept)

    def test_what_moves_says_so_beside_its_new_header_before_it_is_sealed(self, node):
        node.put(KEYS[FIT], size=4 * BLOCK)
        for key in self.kept:
            slot = node.core.blocks.by_key[key]
            assert (slot.kept_until, slot.tenant) == (1060, ALICE)
        told = {w.slot_id: w.until_s for w in node.writes if isinstance(w, Keep)}
        assert sorted(told.values()) == [0, 0, 1060, 1060]

    def test_no_more_is_moved_than_one_request_may(self, node, monkeypatch):
        monkeypatch.setattr("kvstore.core.blocks.MOVED_BYTES_MAX", GRANULE_BYTES)
        before = dict(node.core.blocks.by_key)
        assert not node.put(KEYS[FIT], size=4 * BLOCK)
        assert node.core.blocks.by_key == before, "nothing was evicted in vain"

    def test_all_values_of_a_request_together_move_no_more_than_one_request_may(
        self, node, monkeypatch
    ):
        two = 2 * move_cost(node.core.blocks.by_key[self.kept[0]]) * GRANULE_BYTES
        monkeypatch.setattr("kvstore.core.blocks.MOVED_BYTES_MAX", two)
        assert not node.put(KEYS[FIT], KEYS[FIT + 1], size=4 * BLOCK)
        assert node.core.blocks.counts["moved"] == 2
        assert node.core.blocks.counts["retentions_broken"] == 0

    def test_a_request_of_many_values_looks_at_what_is_shut_in_once(self, monkeypatch):
        """With 131,072 blocks, 32 values of 1 MiB took 16 s of the node's loop."""
        looked = looks_around(monkeypatch)
        node, blocks = Node(size_bytes=16 * SIZE), 16 * FIT
        node.put(*KEYS[:blocks])
        by_place = sorted(node.core.blocks.by_key.values(), key=lambda slot: slot.start)
        kept = [slot.key for slot in by_place[::2]]
        node.retain(*kept)
        asked = KEYS[blocks : blocks + 32]
        assert node.put(*asked, size=16 * BLOCK)
        assert node.has(*kept)
        assert sum(extents for _, extents in looked) < 3 * blocks

    def test_what_found_no_room_is_not_looked_for_again_in_that_request(self, node, monkeypatch):
        looks = []
        victims = Allocator.victims

        def counted(self, length, *args):
            looks.append(length)
            return victims(self, length, *args)

        monkeypatch.setattr(Allocator, "victims", counted)
        for key in list(node.core.blocks.by_key):
            node.ask(Pin(OTHER, 1, [key]))
        assert not node.put(*KEYS[FIT : FIT + 9], size=4 * BLOCK)
        assert looks == [4 * BLOCK] * 2, "a short look and a long one"
        node.ask(SessionDead(OTHER))
        assert node.put(KEYS[FIT], size=BLOCK)

    def test_where_too_few_others_may_go_nothing_does(self, node):
        """All but two of the others are pinned, and those two are in the way themselves."""
        others = sorted(
            (slot for slot in node.core.blocks.by_key.values() if not slot.kept_until),
            key=lambda slot: slot.start,
        )
        for slot in others[2:]:
            node.ask(Pin(OTHER, 1, [slot.key]))
        before = dict(node.core.blocks.by_key)
        assert not node.put(KEYS[FIT], size=4 * BLOCK)
        for slot in others[:2]:
            node.ask(Pin(OTHER, 1, [slot.key]))
        assert not node.put(KEYS[FIT], size=4 * BLOCK)
        assert node.core.blocks.by_key == before


def test_it_ends_with_the_first_event_of_its_second(node):
    node.put(KEYS[0])
    node.retain(KEYS[0], ttl_s=5)
    node.now += 5
    node.ask(Pin(OTHER, 1, KEYS[1:2]))
    assert len(node.core.blocks.retained) == 0


def test_to_ask_for_as_long_again_writes_nothing(node):
    node.put(KEYS[0])
    node.retain(KEYS[0])
    node.writes.clear()
    effects = node.core.handle(Retain(CLIENT, 3, KEYS[:1], 60, ALICE), node.now)
    assert effects.replies == [Reply(CLIENT, 3, [Retained.YES], False)]
    assert effects.writes == []


class TestRetentions:
    """The sums and the order of what is retained, by themselves."""

    @pytest.fixture
    def slots(self):
        return [Slot(page * PAGE, 4) for page in range(5)]

    @pytest.fixture
    def kept(self):
        return Retentions(100 * GRANULE_BYTES, 8, 4)

    def test_a_tenant_may_retain_all_of_its_share_at_once(self, kept, slots):
        assert kept.refusal(slots[0], ALICE) is None
        kept.add(slots[0], 9, ALICE)
        assert kept.refusal(slots[1], ALICE) is Retained.TENANT_BUDGET
        assert kept.refusal(slots[1], BOB) is None
        kept.remove(slots[0])
        assert kept.refusal(slots[1], ALICE) is None
        assert kept._by_tenant == {}, "of who retains nothing nothing is known"

    def test_what_a_tenant_retains_besides_counts_on(self, kept, slots):
        for slot in slots[:3]:
            kept.add(slot, 9, ALICE)
        kept.remove(slots[0])
        assert kept._by_tenant == {ALICE: 8 * GRANULE_BYTES}

    def test_the_next_end_is_the_earliest(self, kept, slots):
        assert kept.next_end == FOREVER
        for slot, until_s in zip(slots[1:], (70, 50, 60), strict=False):
            kept.add(slot, until_s, ALICE)
        assert kept.next_end == 50
        assert kept.over(49.9) == []
        assert kept.over(50) == [slots[2]]

    def test_what_ended_before_its_time_is_not_over(self, kept, slots):
        kept.add(slots[0], 50, ALICE)
        kept.remove(slots[0])
        assert kept.over(60) == []

    def test_notes_of_ends_are_made_anew_when_they_are_too_many_and_in_order(self, kept, slots):
        for slot, until_s in zip(slots[:3], (900, 800, 700), strict=True):
            kept.add(slot, until_s, ALICE)
        lengths = []
        for until_s in range(901, 901 + ENDS_SPARE + 4):
            kept.extend(slots[0], until_s)
            lengths.append(len(kept._ends))
        assert lengths == [*range(4, 2 * 3 + ENDS_SPARE + 1), 3]
        assert kept.next_end == 700


@each("seed", range(8))
def test_in_any_order_of_puts_and_wishes_what_was_promised_is_there(seed):
    rng, node, promised = random.Random(seed), Node(Limits()), {}
    for _ in range(600):
        node.now += rng.random()
        keys = rng.sample(KEYS[: 2 * FIT], rng.randint(1, 6))
        if rng.random() < 0.6:
            node.put(*keys, size=rng.choice((3000, BLOCK, 3 * BLOCK, 5 * BLOCK)))
        else:
            ttl_s = rng.choice((3, 30, 300))
            for key, answer in zip(keys, node.retain(*keys, ttl_s=ttl_s), strict=True):
                if answer is Retained.YES:
                    promised[key] = max(promised.get(key, 0), node.now + ttl_s)
        for key, until in promised.items():
            assert until <= node.now or node.has(key), f"seed {seed}"
    node.check()
    assert promised


def test_a_client_that_asks_without_end_makes_the_books_no_longer(node):
    node.put(*KEYS[:4])
    for ttl_s in range(1, 2000):
        node.retain(*KEYS[:4], ttl_s=ttl_s)
    assert len(node.core.blocks.retained._ends) <= 2 * 4 + ENDS_SPARE
    node.now += 1998.5
    node.put(KEYS[9])
    assert len(node.core.blocks.retained) == 4, "the last wish counts"
    node.now += 1
    node.put(KEYS[10])
    assert len(node.core.blocks.retained) == 0
