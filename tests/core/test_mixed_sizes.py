"""A full node of one model's blocks when another model follows, with blocks of another size."""

import random

import pytest
from each_input import each

from kvstore.core.answers import Grant
from kvstore.core.events import Commit, Reserve, Retain, Touch
from kvstore.core.memory.eviction import POLICIES
from kvstore.core.node import NodeCore
from kvstore.types import STORED

KIB, MIB = 1 << 10, 1 << 20


class Node:
    policy = "lru"

    def __init__(self, size_bytes):
        self.core = NodeCore(
            node_id=5, epoch=9, size_bytes=size_bytes, policy=POLICIES[self.policy]
        )
        self.rng = random.Random(1)
        self.now = 0.0

    def keys(self, count):
        return [self.rng.randbytes(32) for _ in range(count)]

    def put(self, keys, size, *, along=False):
        """Values that travel `along` in the request, or are written and committed. All are stored,
        and there when that is said."""
        n, self.now = len(keys), self.now + 1
        none, values = [0] * n, [bytes(size) if along else None] * n
        event = Reserve(1, 1, keys, [size] * n, 3, none, none, values, none)
        answers = self.core.handle(event, self.now).replies[0].body
        granted = [(a[0], a[1], 0) for a in answers if isinstance(a, Grant)]
        if granted:
            answers = self.core.handle(Commit(1, 2, granted), self.now).replies[0].body
        assert answers == [STORED] * n
        assert self.there(keys) == n

    def touch(self, keys, *, left=False):
        self.core.handle(Touch(1, keys, left=left), self.now)

    def there(self, keys):
        return sum(key in self.core.blocks.by_key for key in keys)


@pytest.fixture(params=sorted(POLICIES), autouse=True)
def _each_policy(request, monkeypatch):
    monkeypatch.setattr(Node, "policy", request.param)


def full(size_bytes, block_bytes):
    """The node, and the keys of its blocks."""
    node = Node(size_bytes)
    keys = node.keys(size_bytes // block_bytes)
    for key in keys:
        node.put([key], block_bytes)
    assert node.there(keys) == len(keys)
    return node, keys


@each("along", [True, False])
@each(
    ("large", "small", "count"),
    [(MIB, 4 * KIB, 16), (2 * MIB, 16 * KIB, 32), (8 * MIB, 64 * KIB, 16), (4 * MIB, 4 * KIB, 1)],
)
def test_large_blocks_that_nobody_uses_make_room_for_small_ones(large, small, count, along):
    """Of the small ones 7 in 100 stayed once, because each cost less than a large one that was
    colder by far."""
    node, dead = full(32 * MIB, large)
    puts = []
    for _ in range(16 * MIB // small // count):
        puts += node.keys(count)
        node.put(puts[-count:], small, along=along)
    assert node.there(puts) == len(puts)
    assert node.there(dead) >= len(dead) // 2 - 1


def test_small_blocks_that_nobody_uses_make_room_for_large_ones():
    node, dead = full(32 * MIB, 64 * KIB)
    puts = node.keys(16)
    for key in puts:
        node.put([key], MIB)
    assert node.there(puts) == 16
    assert node.there(dead) == 256


@pytest.mark.parametrize("along", [True, False])
def test_what_is_used_stays_whatever_its_size(along):
    """Half of the node is in use, in blocks of two sizes; what passes through is used once."""
    node, cold = full(32 * MIB, MIB)
    used = cold[-8:], node.keys(8 * MIB // (16 * KIB))
    for begin in range(0, len(used[1]), 32):
        node.put(used[1][begin : begin + 32], 16 * KIB, along=along)
        node.touch(used[0])
    for step in range(100):
        node.touch([*used[0], *used[1]])
        size = (4 * KIB, 256 * KIB, MIB)[step % 3]
        node.put(node.keys(2), size, along=along and size == 4 * KIB)
    assert node.there(used[0]) == len(used[0])
    assert node.there(used[1]) == len(used[1])


def test_blocks_that_were_left_go_before_all_others_and_those_that_are_used_again_do_not():
    node, keys = full(32 * MIB, MIB)
    node.touch(keys[-3:], left=True)
    assert node.there(keys) == len(keys)
    node.touch(keys[-1:])
    node.put(node.keys(2), MIB)
    assert node.there(keys[-3:-1]) == 0
    assert node.there([*keys[:-3], keys[-1]]) == len(keys) - 2


def test_a_block_that_is_left_while_it_is_retained_stays():
    node, keys = full(32 * MIB, MIB)
    node.core.handle(Retain(1, 1, keys[-1:], 100, 1), node.now)
    node.touch(keys[-1:], left=True)
    node.put(node.keys(3), MIB)
    assert node.there(keys[-1:]) == 1
