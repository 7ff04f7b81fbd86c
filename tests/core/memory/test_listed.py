"""Pages of the sealed blocks while others come and go, and the counts beside them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.answers import Grant
from kvstore.core.events import Commit, Drop, Explain, Listing, Reserve, Stat
from kvstore.core.memory import listed
from kvstore.core.memory.listed import Listed
from kvstore.core.memory.slots import Slot, SlotState
from kvstore.core.node import NodeCore
from kvstore.keys import Namespace
from kvstore.types import KEY_BYTES, TAG_BYTES, Key

if TYPE_CHECKING:
    import pytest

SIZE_BYTES = 1 << 20
KEYS = Namespace.named("listed").block_keys(range(300), 1)


def saved(core: NodeCore, keys: list[Key], namespace_id: int = 1, size_bytes: int = 4096) -> None:
    n = len(keys)
    event = Reserve(
        1, 1, keys, [size_bytes] * n, namespace_id, [0] * n, [0] * n, [None] * n, [0] * n
    )
    (reply,) = core.handle(event, 0.0).replies
    core.handle(Commit(1, 2, [(a[0], a[1], 0) for a in reply.body if isinstance(a, Grant)]), 0.0)


def page(core: NodeCore, after: bytes, at_most: int) -> list[Key]:
    return [row[0] for row in core.handle(Listing(1, 3, after, at_most), 0.0).replies[0].body]


Changes = list[tuple[bool, int]]


@given(
    st.sets(st.integers(0, 99), min_size=1),
    st.lists(st.lists(st.tuples(st.booleans(), st.integers(100, 199)), max_size=6), max_size=20),
    st.integers(1, 40),
)
def test_who_goes_through_all_pages_hears_of_each_block_that_stays_exactly_once(
    staying: set[int], changes: list[Changes], at_most: int
) -> None:
    core = NodeCore(node_id=5, epoch=9, size_bytes=SIZE_BYTES)
    saved(core, [KEYS[i] for i in staying])
    seen: list[Key] = []
    after = b""
    while rows := page(core, after, at_most):
        assert len(rows) <= at_most
        seen += rows
        after = rows[-1]
        for add, number in changes.pop() if changes else []:
            if add:
                saved(core, [KEYS[number]])
            else:
                core.handle(Drop(1, 4, [KEYS[number]]), 0.0)
    assert max(Counter(seen).values()) == 1
    assert {KEYS[i] for i in staying} <= set(seen)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(1, 3)), max_size=80))
def test_what_is_counted_is_what_is_there(steps: list[tuple[int, int, int]]) -> None:
    core = NodeCore(node_id=5, epoch=9, size_bytes=64 << 10)  # room for 16 of these: it evicts
    for what, number, namespace_id in steps:
        if what:
            saved(core, [KEYS[number]], namespace_id, size_bytes=4096 - namespace_id)
        else:
            core.handle(Drop(1, 4, [KEYS[number]]), 0.0)
        sealed = [slot for slot in core.blocks.by_key.values() if slot.state is SlotState.SEALED]
        stats = core.handle(Stat(1, 5), 0.0).replies[0].body
        assert stats["blocks"] == len(sealed)
        assert stats["block_bytes"] == sum(slot.length for slot in sealed)
        _, _, namespaces = core.handle(Explain(1, 6, []), 0.0).replies[0].body
        assert {i: n for i, n, _ in namespaces} == Counter(s.namespace_id for s in sealed)
        assert sorted(page(core, b"", 100)) == sorted(slot.key for slot in sealed)


def test_a_page_looks_at_few_more_blocks_than_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they all go on from one prefix, and so have one tag."""
    core = NodeCore(node_id=5, epoch=9, size_bytes=64 << 20)
    keys = [KEYS[0][:8] + key[8:] for key in Namespace.named("many").block_keys(range(10_000), 1)]
    saved(core, keys)
    looked: list[bytes] = []
    order = listed.place_of
    monkeypatch.setattr(listed, "place_of", lambda key: looked.append(key) or order(key))
    after = page(core, b"", 256)[-1]
    assert len(page(core, after, 256)) == 256
    assert len(looked) < 2_000


def block(tag: int, digest: bytes) -> Slot:
    slot = Slot(0, 4)
    slot.key = tag.to_bytes(TAG_BYTES, "big") + digest.ljust(KEY_BYTES - TAG_BYTES, b"\0")
    slot.namespace_id, slot.length = 1, 4096
    return slot


def test_pages_go_through_blocks_of_many_prefixes_that_lie_close_together() -> None:
    """From the very first place on."""
    blocks = Listed()
    for number in range(16):
        for tag in (15 - number, 0xFF - 16 * number):
            blocks.add(block(tag, bytes([0, 16 * number])))
    seen: list[Key] = []
    after = b""
    while keys := blocks.page(after, 3):
        seen += keys
        after = keys[-1]
    assert len(set(seen)) == len(seen) == len(blocks) == 32
    assert blocks.page(b"", 1)[0][TAG_BYTES:] == bytes(KEY_BYTES - TAG_BYTES)


def test_a_block_that_goes_takes_nothing_with_it_and_leaves_nothing_behind() -> None:
    blocks = Listed()
    one, other = block(1, b"same"), block(2, b"same")
    blocks.add(one)
    blocks.add(other)
    blocks.remove(one)
    assert blocks.page(b"", 9) == [other.key]
    assert blocks.namespaces(9) == [(1, 1)]
    assert blocks.bytes_by_namespace(9) == [(1, 4096)]
    blocks.remove(other)
    assert vars(blocks) == vars(Listed())
