"""A block of a namespace with `ttl_s` is a miss after it, and nothing of it stays in memory."""

import random

import pytest
from each_input import each
from stepwise import StepwiseSegment

from kvstore.core.bounded import NO_TENANT
from kvstore.core.events import (
    Clear,
    Commit,
    Drop,
    Expire,
    Explain,
    Keep,
    Pin,
    Reserve,
    Retain,
    SessionDead,
    Unpin,
)
from kvstore.core.memory.slots import SlotState
from kvstore.core.node import NodeCore
from kvstore.core.outgoing.departures import GoneWhy
from kvstore.core.recovery import recover
from kvstore.errors import UsageError
from kvstore.keys import Namespace, ttl_of
from kvstore.segment.header import Superblock
from kvstore.segment.scan import scan
from kvstore.types import Retained

SIZE_BYTES = 256 << 10
TTL_S = 10
BOUNDED = Namespace({"name": "b", "ttl_s": TTL_S})
KEYS = BOUNDED.block_keys(range(60), 1)
SECRET = b"secret of a tenant, "


class Place:
    """A node's core and its segment."""

    def __init__(self):
        self.core = NodeCore(node_id=5, epoch=9, size_bytes=SIZE_BYTES)
        self.segment = StepwiseSegment(Superblock(5, 9, 0, SIZE_BYTES))

    def act(self, event, now):
        effects = self.core.handle(event, now)
        self.apply(effects.writes)
        return [reply.body for reply in effects.replies]

    def apply(self, writes):
        for write in writes:
            for _ in self.segment.steps(write):
                pass

    def reserve(self, keys, now, size=4096, *, at_once=True, namespace=BOUNDED):
        count, zeros = len(keys), [0] * len(keys)
        value = (SECRET * (size // len(SECRET) + 1))[:size] if at_once else None
        event = Reserve(
            *(1, 1, keys, [size] * count, namespace.id, zeros, zeros, [value] * count, zeros)
        )
        return self.act(event, now)[0]

    def has(self, key):
        slot = self.core.blocks.by_key.get(key)
        return slot is not None and slot.state is SlotState.SEALED

    @property
    def secrets(self):
        return SECRET[:8] in self.segment.bytes


def seen(segment):
    """What a restart finds there."""
    found = scan(SIZE_BYTES, segment.bounds, segment.headers, memoryview(segment.held))
    return found._replace(retained=segment.retained(found.sealed))


@pytest.fixture
def place():
    return Place()


@each("ttl_s", [1, 2, 15, 16, 31, 32, 33, 100, 3600, 86_400, 30 * 86_400])
def test_a_namespaces_id_says_how_long_its_blocks_live_never_longer_than_asked(ttl_s):
    told = ttl_of(Namespace({"ttl_s": ttl_s}).id)
    assert ttl_s * 15 / 16 <= told <= ttl_s
    if ttl_s <= 32:
        assert told == ttl_s


def test_a_namespace_without_a_bound_says_so_and_one_with_it_is_another():
    assert {ttl_of(Namespace.named(str(i)).id) for i in range(1000)} == {0}
    assert Namespace({"a": 1}).fingerprint != Namespace({"a": 1, "ttl_s": 5}).fingerprint
    ids = {Namespace({"a": i, "ttl_s": 5}).id for i in range(200)}
    assert len(ids) == 200


@each("ttl_s", [0, -1, 1.5, "5", None, True, 1 << 40])
def test_a_bound_that_is_none_is_refused(ttl_s):
    with pytest.raises(UsageError, match="ttl_s"):
        Namespace({"ttl_s": ttl_s})


def test_after_its_time_a_block_is_gone_from_books_index_and_memory(place):
    place.reserve(KEYS[:3], 100.0)
    place.reserve([bytes(32)], 100.0, namespace=Namespace.named("free"), size=4000)
    place.core.blocks.outbox.published(place.core.blocks.outbox.take_publications(9))
    place.act(Expire(), 109.9)
    assert place.has(KEYS[0])
    place.act(Expire(), 110.0)
    assert not any(map(place.has, KEYS[:3]))
    assert place.has(bytes(32)), "of another namespace"
    assert place.core.blocks.counts["expired"] == 3
    assert place.core.blocks.outbox.removals_pending == 3
    place.act(Drop(1, 1, [bytes(32)]), 110.0)
    slot = place.segment.bytes.find(SECRET[:8])
    assert slot >= 0, "what has no bound is not wiped"
    place.segment.bytes[slot : slot + 4096] = bytes(4096)
    assert not place.secrets


def test_any_event_ends_the_lives_that_are_over(place):
    place.reserve(KEYS[:1], 100.0)
    assert place.act(Pin(1, 1, KEYS[:1]), 111.0) == [[None]]


def test_a_pinned_block_is_a_miss_and_is_wiped_after_the_last_unpin(place):
    place.reserve(KEYS[:1], 100.0)
    slot = place.core.blocks.by_key[KEYS[0]]
    place.act(Pin(2, 1, KEYS[:1]), 101.0)
    place.act(Expire(), 120.0)
    assert not place.has(KEYS[0])
    assert place.secrets, "a reader may look at it without checking"
    place.act(Unpin(2, 2, [(slot.slot_id, slot.generation)]), 121.0)
    assert not place.secrets


def test_a_bound_goes_before_a_wish_to_retain(place):
    place.reserve(KEYS[:1], 100.0)
    assert place.act(Retain(1, 1, KEYS[:1], 3600, 7), 101.0) == [[Retained.BOUNDED]]
    assert place.act(Retain(1, 1, KEYS[:1], 0, 7), 101.0) == [[Retained.YES]]
    place.act(Expire(), 110.0)
    assert not place.has(KEYS[0])


@pytest.mark.parametrize("how", [Drop(1, 1, KEYS), Clear(1, 1, BOUNDED.id)])
def test_what_leaves_before_its_time_is_wiped_too(place, how):
    place.reserve(KEYS[:5], 100.0)
    place.act(how, 101.0)
    assert not place.secrets
    assert place.core.blocks.bounded.next_end > 1e9 or not len(place.core.blocks.bounded)


@pytest.mark.parametrize("dies", [True, False])
def test_what_its_writer_left_half_written_is_wiped(place, dies):
    (grant,) = place.reserve(KEYS[:1], 100.0, at_once=False)
    place.segment.bytes[grant[2] : grant[2] + 20] = SECRET
    if dies:
        place.act(SessionDead(1), 101.0)
    else:
        place.act(Clear(1, 1, BOUNDED.id), 101.0)
        place.act(Commit(1, 2, [(grant[0], grant[1], 0)]), 102.0)
    assert not place.secrets


def test_whatever_happens_only_living_blocks_are_in_memory(place):
    """Evicted, dropped, replaced: what of the tenant's bytes there is lies in sealed slots."""
    rng = random.Random(3)
    now = 100.0
    for _ in range(1500):
        now += rng.random() / 2
        some = rng.sample(KEYS, rng.randint(1, 6))
        if rng.random() < 0.6:
            place.reserve(some, now, size=rng.choice([3000, 4096, 4096, 60_000]))
        else:
            drop = Drop(1, 1, rng.sample(KEYS, 20))
            place.act(rng.choice([drop, Expire(), Retain(1, 1, some, 50, 7)]), now)
        living = [
            slot for slot in place.core.blocks.by_key.values() if slot.state is SlotState.SEALED
        ]
        assert all(now < slot.dies_at <= now + TTL_S for slot in living)
        assert len(place.core.blocks.bounded) == len(living)
        rest = bytearray(place.segment.bytes)
        for slot in living:
            rest[slot.offset : slot.offset + slot.length] = bytes(slot.length)
        assert not rest.strip(b"\0")
    counts = place.core.blocks.counts
    assert min(counts["evicted"], counts["expired"]) > 0


@pytest.mark.parametrize("after_s", [5.0, 10.0])
def test_a_restart_goes_on_with_what_is_left_of_a_life(place, after_s):
    place.reserve(KEYS[:3], 100.0)
    lost = place.core.blocks.by_key[KEYS[2]].slot_id
    place.segment.terms.pop(lost)
    again = Place()
    again.segment = place.segment
    again.core = NodeCore(node_id=5, epoch=10, size_bytes=SIZE_BYTES)
    again.apply(recover(again.core, seen(place.segment), 9, 100.0 + after_s))
    assert [again.has(key) for key in KEYS[:3]] == [after_s < TTL_S, after_s < TTL_S, False]
    again.act(Expire(), 110.0)
    assert not any(map(again.has, KEYS[:3]))
    assert not again.secrets


def test_the_next_block_of_its_place_does_not_inherit_the_end_of_a_life(place):
    free = Namespace.named("free")
    place.reserve(KEYS[:1], 100.0)
    where = place.core.blocks.by_key[KEYS[0]].slot_id
    place.act(Expire(), 110.0)
    place.reserve([bytes(32)], 111.0, namespace=free)
    assert place.core.blocks.by_key[bytes(32)].slot_id == where
    again = Place()
    again.segment = place.segment
    again.core = NodeCore(node_id=5, epoch=10, size_bytes=SIZE_BYTES)
    again.apply(recover(again.core, seen(place.segment), 9, 112.0))
    assert again.has(bytes(32))
    again.act(Expire(), 1e6)
    assert again.has(bytes(32))


def test_what_is_over_says_so_when_it_is_asked(place):
    place.reserve(KEYS[:1], 100.0)
    place.act(Expire(), 110.0)
    (answer,) = place.act(Explain(1, 1, KEYS[:1]), 113.0)
    assert answer[0] == [(GoneWhy.EXPIRED, 3.0)]


def test_a_life_that_claims_to_be_longer_than_its_namespace_allows_is_not_believed(place):
    place.reserve(KEYS[:1], 100.0)
    slot_id = place.core.blocks.by_key[KEYS[0]].slot_id
    place.apply([Keep(slot_id, 10_000, NO_TENANT)])
    again = Place()
    again.segment = place.segment
    again.core = NodeCore(node_id=5, epoch=10, size_bytes=SIZE_BYTES)
    again.apply(recover(again.core, seen(place.segment), 9, 101.0))
    assert not again.has(KEYS[0])
    assert not again.secrets


def test_a_tenants_number_is_never_the_one_of_bounded_lives(place):
    """What a restart reads would else end the block, where its tenant wanted it retained."""
    place.reserve(KEYS[:1], 100.0, namespace=Namespace({"name": "unbounded"}))
    assert place.act(Retain(1, 1, KEYS[:1], 3600, NO_TENANT), 101.0) == [[Retained.YES]]
    (term,) = place.segment.terms.values()
    assert term.tenant != NO_TENANT
