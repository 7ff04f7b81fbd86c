"""What a client suspects is looked at before it is dropped, and only so much in a second."""

from kvstore.core.events import Corrupt, Drop, Explain, Pin, Reserve, Suspect, Unpin
from kvstore.core.node import NodeCore
from kvstore.core.outgoing.departures import GoneWhy
from kvstore.token_bucket import TokenBucket

KEY, OTHER = b"k" * 32, b"o" * 32
MIB = 1 << 20


def core_with(*values: tuple[bytes, int]) -> NodeCore:
    """Sealed blocks of 4 bytes, by key, with that checksum."""
    core = NodeCore(node_id=1, epoch=1, size_bytes=2 * MIB)
    for key, checksum in values:
        core.handle(Reserve(1, 1, [key], [4], 0, [0], [0], [b"four"], [checksum]), 0.0)
    return core


def test_only_a_sealed_block_with_a_checksum_is_looked_at() -> None:
    core = core_with((KEY, 7), (OTHER, 0))
    (check,) = core.handle(Suspect(1, [KEY, OTHER, b"a" * 32]), 0.0).checks
    assert (check.length, check.checksum) == (4, 7)
    assert set(core.blocks.by_key) == {KEY, OTHER}


def test_a_damaged_block_goes_and_its_reason_is_known() -> None:
    core = core_with((KEY, 7))
    (check,) = core.handle(Suspect(1, [KEY]), 0.0).checks
    core.handle(Corrupt(check.slot_id, check.generation), 0.0)
    assert KEY not in core.blocks.by_key
    assert core.blocks.counts["corrupt"] == 1
    assert core.blocks.outbox.removals_pending == 0  # it was never published
    ((fates, _, _),) = [reply.body for reply in core.handle(Explain(1, 1, [KEY]), 1.0).replies]
    assert fates == [(GoneWhy.CORRUPT, 1.0)]


def test_a_slot_that_was_used_anew_is_left_alone() -> None:
    core = core_with((KEY, 7))
    (check,) = core.handle(Suspect(1, [KEY]), 0.0).checks
    core.handle(Drop(1, 1, [KEY]), 0.0)
    core.handle(Reserve(1, 1, [OTHER], [4], 0, [0], [0], [b"four"], [8]), 0.0)
    assert core.blocks.by_key[OTHER].slot_id == check.slot_id
    core.handle(Corrupt(check.slot_id, check.generation), 0.0)
    assert OTHER in core.blocks.by_key


def test_a_pinned_damaged_block_is_a_miss_and_its_slot_stays_until_it_is_let_go() -> None:
    core = core_with((KEY, 7))
    core.handle(Pin(1, 1, [KEY]), 0.0)
    slot = core.blocks.by_key[KEY]
    core.handle(Corrupt(slot.slot_id, slot.generation), 0.0)
    assert KEY not in core.blocks.by_key
    assert slot.pins == 1
    core.handle(Unpin(1, 1, [(slot.slot_id, slot.generation)]), 0.0)
    assert slot.pins == 0


def test_a_second_has_so_many_bytes_and_no_more() -> None:
    budget = TokenBucket(100)
    assert budget.allows(60, 0.0)
    assert not budget.allows(60, 0.0)
    assert budget.allows(40, 0.0)
    assert budget.allows(50, 0.5)
    assert not budget.allows(1, 0.5)
    assert budget.allows(100, 100.0)
    assert not budget.allows(1, 50.0)  # a clock that went back gives nothing
