"""A node killed at any store of any history, and what its next start makes of the headers.

Longer than other files: one promise is under test, and all of it needs the histories below."""

import math
import random

import pytest
from each_input import each
from hypothesis import given, settings
from hypothesis import strategies as st
from stepwise import StepwiseSegment

from kvstore.core.answers import Grant
from kvstore.core.events import (
    Abort,
    Clear,
    Commit,
    Drop,
    Hold,
    Keep,
    Mark,
    Pin,
    Reserve,
    Retain,
    Seal,
    SessionDead,
    Touch,
    Unpin,
)
from kvstore.core.holdings import FORMER
from kvstore.core.memory.slots import SlotState
from kvstore.core.node import NodeCore
from kvstore.core.recovery import recover
from kvstore.errors import InternalError
from kvstore.keys import Namespace
from kvstore.limits import Limits
from kvstore.record import unpack_record
from kvstore.segment.header import Superblock, of_reserved, pack
from kvstore.segment.scan import DamagedSegmentError, scan
from kvstore.testing.sim.faults import Faults
from kvstore.testing.sim.world import World
from kvstore.types import NO_SPACE, Retained

ARENA = 64 << 10
SIZE = 3 * ARENA
NODE = 7
KEYS = Namespace.named("test").block_keys(range(40), 1)
SIZES = (900, 4000, 9000, 30_000, ARENA)
LIMITS = Limits(pins_per_client=8)


class KilledError(Exception):
    pass


class Host:
    """The memory that outlives a node, and what its stores said so far."""

    def __init__(self) -> None:
        self.segment = StepwiseSegment(Superblock(NODE, 0, 0, SIZE))
        self.epoch = 0
        self.sealed: dict[int, Seal] = {}
        self.reserved: dict[int, int] = {}
        self.pinned: set[int] = set()
        self.generations: dict[int, int] = {}
        self.stores_left = -1
        self.now = 0.0
        self.retained: dict[bytes, int] = {}
        """Keys of blocks that somebody was told are retained, and until when."""

    def start(self) -> NodeCore:
        self.epoch += 1
        core = NodeCore(node_id=NODE, epoch=self.epoch, size_bytes=SIZE, limits=LIMITS)
        segment = self.segment
        seen = scan(SIZE, segment.bounds, segment.headers, memoryview(segment.held))
        seen = seen._replace(retained=segment.retained(seen.sealed))
        self.stores_left = -1
        self.carry_out(recover(core, seen, self.epoch - 1, self.now))
        return core

    def carry_out(self, writes) -> None:
        for write in writes:
            for _ in self.segment.steps(write):
                if self.stores_left == 0:
                    self.note(write)
                    raise KilledError
                self.stores_left -= 1
            self.note(write)

    def note(self, write) -> None:
        """What its word says is what counts: a write cut before it did not happen."""
        if isinstance(write, Hold):
            (self.pinned.add if write.held else self.pinned.discard)(write.slot_id)
            return
        if isinstance(write, Keep):
            assert not write.until_s or write.until_s > self.now
            return
        if not isinstance(write, Mark | Seal):
            return
        word = int.from_bytes(self.segment.header(write.slot_id)[:8], "little")
        state, generation = word & 0xFF, word >> 16
        if state == SlotState.RESERVED:
            generation, _, _ = of_reserved(word, self.segment.bounds.generation)
        assert generation >= self.generations.get(write.slot_id, 0)
        if isinstance(write, Mark) and state == SlotState.RESERVED:
            assert generation > self.generations.get(write.slot_id, 0)
        self.generations[write.slot_id] = generation
        self.reserved.pop(write.slot_id, None)
        self.sealed.pop(write.slot_id, None)
        if state == SlotState.SEALED:
            self.sealed[write.slot_id] = write
        elif state == SlotState.RESERVED:
            self.reserved[write.slot_id] = generation


class Clients:
    """Three of them, who do anything that the protocol allows."""

    def __init__(self, host: Host, core: NodeCore, rng: random.Random) -> None:
        self.host, self.core, self.rng = host, core, rng
        self.grants: dict[int, list[tuple[int, int]]] = {1: [], 2: [], 3: []}
        self.pins: dict[int, list[tuple[int, int]]] = {1: [], 2: [], 3: []}

    def step(self) -> None:
        session = self.rng.randint(1, 3)
        does = self.rng.choices(
            (
                self.reserve,
                self.commit,
                self.abort,
                self.pin,
                self.unpin,
                self.retain,
                self.drop,
                self.die,
            ),
            (8, 8, 1, 3, 3, 3, 1, 0.3),
        )[0]
        self.host.now += self.rng.random()
        does(session)

    def act(self, event):
        effects = self.core.handle(event, self.host.now)
        self.host.carry_out(effects.writes)
        self.retained_are_there()
        return effects.replies[0].body if effects.replies else None

    def keys(self, at_most: int) -> list[bytes]:
        return self.rng.sample(KEYS, self.rng.randint(1, at_most))

    def reserve(self, session: int) -> None:
        keys = self.keys(4)
        n = len(keys)
        size = self.rng.choice(SIZES)
        values = [b"v" * size if self.rng.random() < 0.2 else None] * n
        zeros = [0] * n
        event = Reserve(session, 1, keys, [size] * n, 3, zeros, zeros, values, zeros)
        self.grants[session] += [a[:2] for a in self.act(event) if isinstance(a, Grant)]

    def commit(self, session: int) -> None:
        items, self.grants[session] = self.grants[session], []
        self.act(Commit(session, 1, [(*item, 0) for item in items]))

    def abort(self, session: int) -> None:
        items, self.grants[session] = self.grants[session], []
        self.act(Abort(session, 1, items))

    def pin(self, session: int) -> None:
        records = self.act(Pin(session, 1, keys := self.keys(3)))
        for key, record in zip(keys, records, strict=True):
            if isinstance(record, bytes):
                location = unpack_record(key, record)
                self.pins[session].append((location.slot, location.generation))

    def unpin(self, session: int) -> None:
        items, self.pins[session] = self.pins[session], []
        self.act(Unpin(session, 1, items))

    def retain(self, session: int) -> None:
        keys, ttl_s = self.keys(4), self.rng.choice((0, 5, 60))
        tenant = self.rng.randint(1, 2)
        until_s = math.ceil(self.host.now + ttl_s)
        for key in keys:
            slot = self.core.blocks.by_key.get(key)
            if not ttl_s and slot is not None and slot.tenant == tenant:
                self.host.retained.pop(key, None)  # a release
        answers = self.act(Retain(session, 1, keys, ttl_s, tenant))
        for key, answer in zip(keys, answers, strict=True):
            if answer is Retained.YES and ttl_s:
                self.host.retained[key] = max(until_s, self.host.retained.get(key, 0))

    def retained_are_there(self) -> None:
        """Whatever is asked of the node, and wherever it moves what it has."""
        for key, until_s in list(self.host.retained.items()):
            if until_s <= self.host.now:
                del self.host.retained[key]
                continue
            slot = self.core.blocks.by_key[key]
            assert slot.state is SlotState.SEALED
            assert slot.kept_until >= until_s

    def drop(self, session: int) -> None:
        """Who drops a block means it, retained or not."""
        if self.rng.random() < 0.05:
            self.host.retained = {}
            self.act(Clear(session, 1, 3))
        keys = self.keys(3)
        for key in keys:
            self.host.retained.pop(key, None)
        self.act(Drop(session, 1, keys))
        self.act(Touch(session, self.keys(3)))

    def die(self, session: int) -> None:
        self.grants[session], self.pins[session] = [], []
        self.act(SessionDead(session))


def check_recovered(host: Host, core: NodeCore) -> None:
    expected = {(seal.key, seal.length, slot_id) for slot_id, seal in host.sealed.items()}
    found = {
        (slot.key, slot.length, slot.slot_id)
        for slot in core.blocks.by_key.values()
        if slot.state is SlotState.SEALED
    }
    assert found == expected
    assert core.blocks.counts["recovered"] == len(expected)
    former = core.former()
    assert set(former.reserved) == set(host.reserved)
    assert set(former.pins) == host.pinned
    terms = {k.slot_id: (k.until_s, k.tenant) for k in host.segment.terms.values()}
    kept = {
        s.slot_id: (s.kept_until, s.tenant) for s in core.blocks.by_key.values() if s.kept_until
    }
    assert kept == terms
    for key, until_s in host.retained.items():
        assert until_s <= host.now or core.blocks.by_key[key].kept_until >= until_s
    World(0, Faults()).checks.books(core)
    for key, slot in core.blocks.by_key.items():
        header = host.sealed[slot.slot_id]
        location = unpack_record(key, slot.record)
        assert (location.epoch, location.generation) == (host.epoch, header.generation)
    assert core.blocks.outbox.publications_pending == len(expected)


@settings(max_examples=75)
@given(st.integers(0, 2**32))
def test_after_a_kill_at_any_store_exactly_the_sealed_blocks_are_there(seed):
    """Several starts in a row on the same memory; clients of earlier ones live on at times."""
    rng = random.Random(seed)
    host = Host()
    core = host.start()
    for _ in range(4):
        clients = Clients(host, core, rng)
        kept = dict(core.former().reserved), set(core.former().pins)
        if rng.random() < 0.5:
            clients.act(SessionDead(FORMER))
            kept = {}, set()
        host.stores_left = rng.randrange(600)
        try:
            for _ in range(400):
                clients.step()
                for slot_id, slot in kept[0].items():
                    assert core.blocks.allocator.slot(slot_id) is slot
                    assert slot.state is SlotState.RESERVED, f"seed {seed}: rule 5"
                assert kept[1] <= host.pinned, f"seed {seed}: a pinned slot"
        except KilledError:
            pass
        core = host.start()
        check_recovered(host, core)


def started(host: Host, *keys: bytes, size: int = 8192) -> tuple[NodeCore, Clients]:
    core = host.start()
    clients = Clients(host, core, random.Random(0))
    n = len(keys)
    zeros = [0] * n
    event = Reserve(1, 1, keys, [size] * n, 3, zeros, zeros, [None] * n, zeros)
    clients.grants[1] += [a[:2] for a in clients.act(event)]
    return core, clients


def test_a_slot_that_was_reserved_is_nobody_elses_until_its_writer_is_known_to_be_dead():
    host = Host()
    started(host, KEYS[0], size=ARENA)
    core, clients = started(host, *KEYS[1:3], size=ARENA)
    event = Reserve(2, 1, KEYS[3:4], [ARENA], 3, [0], [0], [None], [0])
    assert clients.act(event) == [NO_SPACE]
    clients.act(SessionDead(FORMER))
    assert not core.former().reserved
    assert isinstance(clients.act(event)[0], tuple)


def test_a_pinned_block_stays_where_it_is_and_can_be_found():
    host = Host()
    core, clients = started(host, *KEYS[:8])
    clients.commit(1)
    clients.act(Pin(2, 1, KEYS[:1]))
    core = host.start()
    slot = core.blocks.by_key[KEYS[0]]
    assert core.former().pins == {slot.slot_id: 1}
    assert host.segment.held[slot.slot_id] == 1
    clients = Clients(host, core, random.Random(0))
    for key in KEYS[8:]:
        clients.act(Reserve(1, 1, [key], [ARENA], 3, [0], [0], [b"v" * ARENA], [0]))
    assert core.blocks.by_key[KEYS[0]] is slot
    clients.act(SessionDead(FORMER))
    assert host.segment.held[slot.slot_id] == 0


def test_a_block_dropped_while_it_was_pinned_is_gone_and_its_slot_is_not_reused():
    host = Host()
    core, clients = started(host, KEYS[0])
    clients.commit(1)
    clients.act(Pin(2, 1, KEYS[:1]))
    clients.act(Drop(1, 1, KEYS[:1]))
    core = host.start()
    assert not core.blocks.by_key
    (slot_id,) = core.former().pins
    assert core.blocks.allocator.slot(slot_id).state is SlotState.DOOMED


def test_records_of_blocks_that_left_just_before_the_end_are_taken_out_of_the_index():
    host = Host()
    core, clients = started(host, KEYS[0])
    clients.commit(1)
    ((_, record),) = core.blocks.outbox.take_publications(10)
    clients.act(Drop(1, 1, KEYS[:1]))
    core = host.start()
    assert core.blocks.outbox.take_removals(10) == [(KEYS[0], record)]


def test_a_block_evicted_before_it_was_published_again_takes_its_old_record_along():
    host = Host()
    core, clients = started(host, KEYS[0])
    clients.commit(1)
    ((_, record),) = core.blocks.outbox.take_publications(10)
    core = host.start()
    Clients(host, core, random.Random(0)).act(Drop(1, 1, KEYS[:1]))
    assert (KEYS[0], record) in core.blocks.outbox.take_removals(10)
    assert core.blocks.outbox.publications_pending == 0


def test_what_was_stored_first_is_evicted_first_when_nothing_else_is_known():
    host = Host()
    core, clients = started(host, *KEYS[:3], size=ARENA)
    clients.commit(1)
    core, clients = started(host, KEYS[3], size=ARENA)  # reuses the slot of KEYS[0]
    clients.commit(1)
    assert KEYS[0] not in core.blocks.by_key
    core, clients = started(host, KEYS[4], size=ARENA)
    assert KEYS[1] not in core.blocks.by_key
    assert KEYS[3] in core.blocks.by_key


def test_what_was_stored_last_is_published_first():
    host = Host()
    core, clients = started(host, *KEYS[:3], size=ARENA)
    clients.commit(1)
    core, clients = started(host, KEYS[3], size=ARENA)  # in the slot of KEYS[0]
    clients.commit(1)
    core = host.start()
    assert [key for key, _ in core.blocks.outbox.take_publications(2)] == [KEYS[3], KEYS[2]]


def test_a_header_that_is_not_whole_is_dropped_and_its_slot_is_free():
    host = Host()
    core, clients = started(host, *KEYS[:2])
    clients.commit(1)
    slot_id = core.blocks.by_key[KEYS[0]].slot_id
    host.segment.headers[slot_id * 64 + 20] ^= 1
    core = host.start()
    assert list(core.blocks.by_key) == [KEYS[1]]
    assert core.blocks.counts["recovery_dropped"] == 1
    assert host.segment.header(slot_id)[0] == SlotState.FREE
    World(0, Faults()).checks.books(core)


@each(
    ("offset", "value"),
    [(128, 9), (128 + 1, 40), (128 + 4, 0xFF), (64, SlotState.SEALED), (64, SlotState.RESERVED)],
    ids=["state", "granule", "size", "sealed within another", "reserved within another"],
)
def test_headers_that_contradict_each_other_are_not_recovered_from(offset, value):
    host = Host()
    started(host, *KEYS[:2])
    host.segment.headers[offset] = value
    with pytest.raises(DamagedSegmentError):
        host.start()


@pytest.mark.parametrize(
    "wrong",
    [
        {"generation": (1 << 48) - 1},
        {"used_below": 1 << 20, "used_from": 0},
        {"used_below": 0, "used_from": 1 << 20},
        {"used_below": 1, "used_from": 2},
    ],
    ids=str,
)
def test_bounds_that_contradict_the_headers_are_not_recovered_from(wrong):
    """Without those pages blocks would be in two places, or none."""
    host = Host()
    _, clients = started(host, *KEYS[:2], size=ARENA)
    clients.commit(1)
    host.segment.bounds = host.segment.bounds._replace(**wrong)
    with pytest.raises(DamagedSegmentError):
        host.start()


def test_slots_that_overlap_within_a_page_are_not_recovered_from():
    host = Host()
    core, clients = started(host, *KEYS[:2], size=5000)
    clients.commit(1)
    first, second = sorted(core.blocks.by_key.values(), key=lambda slot: slot.start)
    assert first.start + first.size == second.start
    header = host.sealed[second.slot_id]._replace(granule=second.granule - 1)
    host.segment.headers[second.slot_id * 64 :][:64] = pack(header[1:])
    with pytest.raises(InternalError):
        host.start()


def test_generations_go_on_over_a_restart_whatever_the_headers_still_say():
    """Those of small slots are forgotten when a large one takes their pages."""
    host = Host()
    core, clients = started(host, *KEYS[:16], size=4096)
    clients.commit(1)
    last = max(slot.generation for slot in core.blocks.by_key.values())
    clients.act(Clear(1, 1, 3))
    for page in range(SIZE // 4096):
        host.segment.headers[page * 64 :][:64] = bytes(64)
    core, clients = started(host, KEYS[20], size=4096)
    assert next(iter(core.former().reserved.values()), None) is None
    assert core.blocks.by_key[KEYS[20]].generation > last


def test_never_used_pages_are_not_looked_at():
    host = Host()
    _, clients = started(host, *KEYS[:2], size=4096)
    clients.commit(1)
    bounds = host.segment.bounds
    pages = range(bounds.used_below, bounds.used_from)
    assert all(not any(host.segment.header(page)) for page in pages)
    seen = scan(SIZE, bounds, host.segment.headers, memoryview(host.segment.held))
    assert len(seen.sealed) == 2
