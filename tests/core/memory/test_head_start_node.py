"""What a node makes of its policy `head-start`: which events count as uses, and of what."""

import pytest

from kvstore.core.demotion import DemotingCore
from kvstore.core.events import (
    Coldest,
    Commit,
    Drop,
    Fill,
    Pin,
    Reserve,
    Retain,
    Retire,
    Seal,
    Touch,
    Unpin,
)
from kvstore.core.memory.eviction import POLICIES
from kvstore.core.memory.head_start import HeadStart
from kvstore.core.node import NodeCore
from kvstore.core.parts import parts_of
from kvstore.core.recovery import Seen, recover
from kvstore.types import EXISTS, STORED
from tests.core.memory.eviction_model import key_of

PAGE = 4096
BLOCKS = 16


class Node:
    """Blocks are called by number; an event comes ten seconds after the one before."""

    def __init__(self, kind=NodeCore, blocks=BLOCKS):
        self.core = kind(node_id=5, epoch=9, size_bytes=blocks * PAGE, policy=HeadStart)
        self.now = 0.0

    def handle(self, event, after_s=10.0):
        self.now += after_s
        return self.core.handle(event, self.now)

    def put(self, *numbers, along=True, size=PAGE, after_s=10.0):
        keys, n = list(map(key_of, numbers)), len(numbers)
        zeros, values = [0] * n, [bytes(size) if along else None] * n
        put = Reserve(1, 1, keys, [size] * n, 3, zeros, zeros, values, zeros)
        answers = self.handle(put, after_s).replies[0].body
        if not along:
            items = [(slot, generation, 0) for slot, generation, *_ in answers]
            answers = self.handle(Commit(1, 2, items), 0.0).replies[0].body
        assert set(answers) <= {STORED, EXISTS}

    def touch(self, *numbers, after_s=10.0):
        self.handle(Touch(1, list(map(key_of, numbers))), after_s)

    def slot(self, number):
        return self.core.blocks.by_key[key_of(number)]

    def uses(self, *numbers):
        return [self.slot(number).uses for number in numbers]

    def there(self, *numbers):
        return [number for number in numbers if key_of(number) in self.core.blocks.by_key]

    def pin(self, number):
        self.handle(Pin(1, 1, [key_of(number)]))
        slot = self.slot(number)
        return slot.slot_id, slot.generation


@pytest.mark.parametrize("along", [True, False])
def test_a_save_is_one_use_however_many_messages_it_takes(along):
    node = Node()
    node.put(1, 2, 3, along=along)
    node.touch(1, 2, 3, after_s=0.5)
    assert node.uses(1, 2, 3) == [1, 1, 1]


def test_what_is_behind_holds_up_what_is_before_it_in_the_same_message_alone():
    node = Node()
    node.put(1, 2, 3)
    for _ in range(3):
        node.touch(3)
    node.touch(2)
    node.touch(1)
    assert node.uses(1, 2, 3) == [2, 2, 4], "each in a message of its own"
    node.touch(1, 2, 3)
    assert node.uses(1, 2, 3) == [5, 5, 5]
    node.touch(3, 4)
    node.touch(9, 3, 1)
    assert node.uses(1, 2, 3) == [6, 5, 7]


@pytest.mark.parametrize("along", [True, False])
def test_a_block_that_comes_back_holds_up_what_is_saved_with_it(along):
    node = Node()
    node.put(1, 2, 3, along=along)
    node.touch(1, 2, 3)
    node.put(*range(10, 10 + BLOCKS))
    for round_ in range(30, 30 + 4 * BLOCKS):
        node.put(round_)
    assert node.there(1, 2, 3) == []
    node.put(7, 1, along=along)
    assert node.uses(7, 1) == [4, 4]
    node.put(8, along=along)
    assert node.uses(8) == [1]


def test_what_comes_along_holds_up_nothing_behind_it():
    node = Node()
    node.put(1)
    for _ in range(4):
        node.touch(1)
    node.put(1, 2, 3)
    assert node.uses(1, 2, 3) == [6, 1, 1]


def test_what_was_dropped_begins_anew():
    node = Node()
    node.put(1)
    node.touch(1)
    node.handle(Drop(1, 1, [key_of(1)]))
    node.put(1)
    assert node.uses(1) == [1]


def test_a_pin_is_a_use_and_keeps_the_others():
    node = Node()
    node.put(1)
    node.touch(1)
    pinned = node.pin(1)
    node.put(*range(20, 20 + 2 * BLOCKS))
    node.handle(Unpin(1, 1, [pinned]))
    assert node.uses(1) == [3]


def test_pins_of_a_run_that_end_together_are_a_run():
    node = Node()
    node.put(1, 2, 3)
    for _ in range(3):
        node.touch(3)
    pinned = [node.pin(number) for number in (1, 2, 3)]
    node.handle(Unpin(1, 1, pinned))
    assert node.uses(1, 2, 3) == [5, 5, 5]


def test_the_end_of_a_promise_is_no_use():
    node = Node()
    node.put(1)
    node.handle(Retain(1, 1, [key_of(1)], 100, 1))
    node.touch(1)
    node.put(2, after_s=500)
    assert node.uses(1) == [2]
    assert node.slot(1).placed_at == node.now, "but it goes after others from then on"


def test_a_long_message_in_parts_is_one_run():
    cores = Node(), Node()
    for node in cores:
        node.put(*range(9))
        node.touch(8)
        node.touch(8)
    touch = Touch(1, list(map(key_of, range(9))))
    cores[0].handle(touch)
    for part in parts_of(touch, 2):
        cores[1].handle(part, 0.0 if part.goes_on else 10.0)
    assert cores[0].uses(*range(9)) == cores[1].uses(*range(9)) == [4] * 9


def test_a_run_of_somebody_else_between_two_parts_holds_up_nothing():
    node = Node()
    node.put(1, 2)
    node.put(3)
    for _ in range(5):
        node.touch(3)
    node.handle(Touch(2, [key_of(3)]))
    node.handle(Touch(1, [key_of(1), key_of(2)], goes_on=True))
    assert node.uses(1, 2, 3) == [2, 2, 7]


def test_what_is_used_again_and_again_outlives_what_passes_through():
    node = Node()
    node.put(1, 2, 3)
    for _ in range(3):
        node.touch(1, 2, 3, after_s=50)
    for number in range(100, 100 + 3 * BLOCKS):
        node.put(number, after_s=5)
    assert node.there(1, 2, 3) == [1, 2, 3]
    for number in range(200, 200 + 3 * BLOCKS):
        node.put(number, after_s=20)
    assert node.there(1, 2, 3) == []


def test_room_for_a_large_value_is_where_blocks_go_first_not_where_they_were_used_first():
    """Of two places for it, one has blocks of long ago that were used often."""
    often, once = range(1, 9), range(9, 17)
    node = Node()
    for number in often:
        node.put(number)
    for _ in range(5):
        node.touch(*often)
    for number in once:
        node.put(number, after_s=1)
    node.put(99, size=8 * PAGE)
    assert node.there(*often, *once) == [*often]


def test_a_restart_knows_the_order_and_no_uses():
    node = Node()
    node.put(1, 2)
    node.touch(2)
    seals = []
    for number in (3, 4):
        keys, zero = [key_of(number)], [0]
        put = Reserve(1, 1, keys, [PAGE], 3, zero, zero, [bytes(PAGE)], zero)
        seals += [write for write in node.handle(put).writes if isinstance(write, Seal)]
    again = Node()
    again.core.epoch = 10
    recover(again.core, Seen(node.core.blocks.bounds, seals, set(), [], [], []), 9, 1000.0)
    again.now = 1000.0
    assert again.uses(3, 4) == [1, 1]
    again.put(5)
    assert [slot.key for slot in again.core.blocks.allocator.coldest()] == list(
        map(key_of, (3, 4, 5))
    )


def test_what_goes_down_a_tier_is_what_the_policy_says_and_is_not_used_by_that():
    node = Node(kind=DemotingCore)
    node.put(1)
    node.touch(1)
    node.put(2)
    leaving = node.handle(Coldest(7, 1, BLOCKS * PAGE, 1)).replies[0].body
    assert [block.key for block in leaving] == [key_of(2)]
    node.handle(Retire(7, 1, [(block.slot, block.generation) for block in leaving]))
    assert node.there(2) == []
    node.put(2)
    assert node.uses(1, 2) == [2, 3], "it is known again"


def test_every_policy_fills_and_serves_a_node():
    for policy in POLICIES.values():
        core = NodeCore(node_id=5, epoch=9, size_bytes=BLOCKS * PAGE, policy=policy)
        n = 3 * BLOCKS
        keys, zeros = list(map(key_of, range(n))), [0] * n
        put = Reserve(1, 1, keys, [PAGE] * n, 3, zeros, zeros, [bytes(PAGE)] * n, zeros)
        effects = core.handle(put, 1.0)
        assert effects.replies[0].body == [STORED] * n
        assert sum(isinstance(write, Fill) for write in effects.writes) == n
        assert list(core.blocks.by_key) == keys[-BLOCKS:]
