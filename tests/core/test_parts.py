"""A request in parts leaves a node, and is answered, as the whole one is."""

from __future__ import annotations

import random
from typing import Any

from each_input import each

from kvstore.core.answers import Grant
from kvstore.core.events import (
    NOBODY,
    Abort,
    Clear,
    Commit,
    Drop,
    Explain,
    Listing,
    Named,
    Pin,
    Reserve,
    Reset,
    Retain,
    SessionDead,
    SessionResumed,
    Stat,
    Suspect,
    Touch,
    Unpin,
)
from kvstore.core.memory.eviction import POLICIES
from kvstore.core.memory.slots import SlotState
from kvstore.core.node import NodeCore
from kvstore.core.parts import joined, parts_of

SESSION = 1
PAGES = 64
AT_MOST = 3
ROUNDS = 60


def key(number: int) -> bytes:
    return bytes([number]) * 32


def reserve(keys: list[bytes], values: bool, namespace_id: int = 7) -> Reserve:
    n = len(keys)
    value = [k[:4] * 1000 if values else None for k in keys]
    sizes = [4000] * n
    return Reserve(SESSION, 1, keys, sizes, namespace_id, [0] * n, [0] * n, value, [1] * n)


def whole(core: NodeCore, event: Any, now: float) -> Any:
    replies = core.handle(event, now).replies
    return replies[0] if replies else None


def in_parts(core: NodeCore, event: Any, now: float) -> Any:
    slots = core.held_slots(SESSION)
    parts = parts_of(event, AT_MOST, core.blocks.by_key, slots)
    assert all(len(getattr(part, "keys", ())) <= AT_MOST for part in parts)
    assert all(len(getattr(part, "slots", None) or ()) <= AT_MOST for part in parts)
    return joined(event, [r for part in parts for r in core.handle(part, now).replies])


def state(core: NodeCore) -> object:
    """As the next event finds it."""
    core.blocks.allocator.begins(core.blocks.now)
    blocks = {
        k: (s.state, s.length, s.pins, s.kept_until, s.uses) for k, s in core.blocks.by_key.items()
    }
    counts = {name: core.blocks.counts[name] for name in ("aborted", "writers_died", "evicted")}
    coldest = [
        core.blocks.allocator.slot(slot_id).key
        for slot_id in core.blocks.allocator._evictable.coldest()
    ]
    return blocks, coldest, counts


def requests(rng: random.Random, held: list[list[Any]]) -> Any:
    """The next request, and the same of each core's own slots."""
    keys = [key(n) for n in rng.sample(range(100), rng.randint(1, 14))]
    kinds = ["reserve", "value", "commit", "abort", "pin", "unpin", "keys", "retain", "session"]
    kind = rng.choice(kinds)
    if kind in ("reserve", "value"):
        return [reserve(keys, kind == "value", rng.choice([7, 8]))] * 2
    if kind == "commit":
        return [Commit(SESSION, 1, [(*g, 5) for g in grants]) for grants in held]
    if kind == "abort":
        return [Abort(SESSION, 1, grants[::2]) for grants in held]
    if kind == "pin":
        return [Pin(SESSION, 1, keys)] * 2
    if kind in ("unpin", "session"):
        return kind
    if kind == "retain":
        return [Retain(SESSION, 1, keys, rng.choice([0, 5]), 1)] * 2
    made = [Touch(SESSION, keys), Drop(SESSION, 1, keys[:5]), Explain(SESSION, 1, keys)]
    made += [Clear(SESSION, 1, rng.choice([7, 8])), Reset(SESSION, 1, rng.randrange(9), [7, 9])]
    made += [Reset(NOBODY, 0, rng.randrange(99), rng.choice([[], [8], [7]]))]
    return [rng.choice([*made, Suspect(SESSION, keys), Named(SESSION, keys, keys)])] * 2


def held_of(core: NodeCore, state: SlotState) -> list[tuple[int, int]]:
    """Return the slots that the client has reserved, or pinned."""
    slots = map(core.blocks.allocator.slot, core.held_slots(SESSION))
    return [(slot.slot_id, slot.generation) for slot in slots if slot.state is state]


def unpins(core: NodeCore) -> Unpin:
    return Unpin(SESSION, 1, held_of(core, SlotState.SEALED))


def ended(core: NodeCore, share: float, seed: int) -> SessionResumed | SessionDead:
    """The session comes back and holds that share of what it had, or it dies."""
    if share < 0.1:
        return SessionDead(SESSION)
    rng = random.Random(seed)
    written = held_of(core, SlotState.RESERVED)
    reserved = {slot: generation + (rng.random() > share) for slot, generation in written}
    pins = held_of(core, SlotState.SEALED)
    pinned = {slot: rng.randrange(3) for slot, _ in pins if rng.random() < share}
    return SessionResumed(SESSION, {**reserved, 999: 1}, {**pinned, 998: 1})


def comparable(answer: Any) -> Any:
    """Without slots: moves and evictions may have given others."""
    if answer is None or not isinstance(answer.body, list):
        return answer
    return [type(a) if isinstance(a, Grant | bytes) else a for a in answer.body]


@each("policy", sorted(POLICIES))
@each("seed", range(20))
def test_the_node_and_the_answers_are_the_same(seed: int, policy: str) -> None:
    rng = random.Random(seed)
    cores = [
        NodeCore(node_id=1, epoch=1, size_bytes=PAGES * 4096, policy=POLICIES[policy])
        for _ in range(2)
    ]
    held: list[list[Any]] = [[], []]
    cut = 0
    for step in range(ROUNDS):
        now = float(step)
        events = requests(rng, held)
        if events == "unpin":
            events = [unpins(core) for core in cores]
        elif events == "session":
            share = rng.random()
            events = [ended(core, share, step) for core in cores]
        slots = cores[0].held_slots(SESSION)
        cut += len(parts_of(events[0], AT_MOST, cores[0].blocks.by_key, slots)) > 1
        answers = [whole(cores[0], events[0], now), in_parts(cores[1], events[1], now)]
        assert comparable(answers[0]) == comparable(answers[1]), (step, events[0])
        assert state(cores[0]) == state(cores[1]), (step, events[0])
        held = [held_of(core, SlotState.RESERVED) for core in cores]
    assert cut > ROUNDS // 4


def test_what_names_no_blocks_is_one_part() -> None:
    for event in (Stat(SESSION, 1), Listing(SESSION, 1, b"", 256), Touch(SESSION, [])):
        assert parts_of(event, 1) == (event,)


def test_what_is_left_of_a_session_that_has_ended_meanwhile_is_nothing() -> None:
    core = NodeCore(node_id=1, epoch=1, size_bytes=PAGES * 4096)
    core.handle(reserve([key(n) for n in range(7)], values=False), 0.0)
    slots = core.held_slots(SESSION)
    back = parts_of(SessionResumed(SESSION, {}, {}), AT_MOST, (), slots)
    dead = parts_of(SessionDead(SESSION), AT_MOST, (), slots)
    assert (len(back), len(dead)) == (3, 4)
    for event in (back[0], dead[0], back[1]):
        core.handle(event, 1.0)
        assert core.held_slots(SESSION)[:1] != slots[:1]
    for event in dead[1:]:
        assert list(core.sessions())
        core.handle(event, 1.0)
    assert not list(core.sessions())
    core.handle(back[2], 1.0)
    core.handle(dead[2], 1.0)
    assert not list(core.sessions())


def test_an_answer_waits_for_the_index_when_that_to_a_part_would() -> None:
    core = NodeCore(node_id=1, epoch=1, size_bytes=PAGES * 4096)
    event = reserve([key(n) for n in range(5)], values=True)
    core.handle(event._replace(keys=event.keys[3:], sizes=[4000] * 2), 0.0)
    assert in_parts(core, event, 1.0).after_publish


def test_a_reset_is_known_only_when_all_its_parts_are_done() -> None:
    """A node that is killed between them must hear of it again."""
    core = NodeCore(node_id=1, epoch=1, size_bytes=PAGES * 4096)
    core.handle(reserve([key(n) for n in range(10)], values=True), 0.0)
    reset = Reset(NOBODY, 0, 50, [7])
    parts = parts_of(reset, AT_MOST, core.blocks.by_key)
    assert len(parts) == 5
    for part in parts[:-1]:
        core.handle(part, 1.0)
        assert not core.resets.knows(50)
    assert not core.blocks.by_key
    core.handle(parts[-1], 1.0)
    assert core.resets.knows(50)


def test_a_reset_that_was_done_meanwhile_drops_nothing_of_what_came_after_it() -> None:
    """Another node tells of it while a client asks for it here, who then saves anew."""
    core = NodeCore(node_id=1, epoch=1, size_bytes=PAGES * 4096)
    keys = [key(n) for n in range(10)]
    core.handle(reserve(keys, values=True), 0.0)
    told = parts_of(Reset(NOBODY, 0, 50, [7]), AT_MOST, core.blocks.by_key)
    core.handle(told[0], 1.0)
    asked = core.handle(Reset(SESSION, 1, 50, [7]), 1.0).replies[0].body
    assert asked == (50, 10 - AT_MOST)
    core.handle(reserve(keys, values=True), 2.0)
    for part in told[1:]:
        core.handle(part, 3.0)
    assert len(core.blocks.by_key) == 10


def test_what_is_reserved_when_a_clear_begins_is_never_sealed() -> None:
    core = NodeCore(node_id=1, epoch=1, size_bytes=PAGES * 4096)
    keys = [key(n) for n in range(10)]
    grants = core.handle(reserve(keys, values=False), 0.0).replies[0].body
    for part in parts_of(Clear(SESSION, 2, 7), AT_MOST, core.blocks.by_key):
        core.handle(part, 1.0)
    items = [(*grant[:2], 0) for grant in grants]
    answers = core.handle(Commit(SESSION, 3, items), 2.0).replies[0].body
    assert all("cleared" in str(answer) for answer in answers)
    assert not core.blocks.by_key


def test_what_is_as_large_as_a_part_is_one_and_what_is_swept_is_not_gone_through_again() -> None:
    keys = [key(n) for n in range(AT_MOST)]
    clear, reset = Clear(SESSION, 1, 7), Reset(SESSION, 1, 50, [7])
    for event in (Touch(SESSION, keys), clear, reset):
        assert parts_of(event, AT_MOST, keys) == (event,)
        more = [*keys, key(AT_MOST)]
        cut = event._replace(keys=more) if isinstance(event, Touch) else event
        assert len(parts_of(cut, AT_MOST, more)) == (2 if isinstance(event, Touch) else 3)
    for event in (clear, reset):
        *sweeps, last = parts_of(event, 1, keys)
        assert last == event._replace(swept=True)
        assert {sweep.number for sweep in sweeps} == {0}, "it is carried out, known or not"


def test_the_answer_to_a_reset_in_one_part_is_its_own() -> None:
    core = NodeCore(node_id=1, epoch=1, size_bytes=PAGES * 4096)
    core.handle(reserve([key(n) for n in range(2)], values=True), 0.0)
    assert in_parts(core, Reset(SESSION, 1, 50, [7]), 1.0).body == (50, 2)
