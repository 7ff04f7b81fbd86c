"""What a node knows of the keys of values, and when they were used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.core import node as node_module
from kvstore.core.events import Commit, Drop, Listing, Named, Pin, Reserve, Touch
from kvstore.core.node import NodeCore
from kvstore.core.report import NAMESPACES_TOLD_MAX, SPACE_BYTES, counts
from kvstore.keys import Namespace
from kvstore.limits import Limits

if TYPE_CHECKING:
    import pytest

KEYS = [Namespace.named("test").value_key(f"k{i}") for i in range(4)]


def core() -> NodeCore:
    return NodeCore(node_id=5, epoch=9, size_bytes=64 << 10, limits=Limits())


def put(node: NodeCore, key: bytes, now: float) -> None:
    reserve = Reserve(1, 1, [key], [10], 3, [1], [0], [None], [0])
    (grant,) = node.handle(reserve, now).replies[0].body
    node.handle(Commit(1, 2, [(grant[0], grant[1], 0)]), now)


def rows(node: NodeCore, now: float) -> dict[bytes, tuple[object, ...]]:
    """(kind, age, idle time, name) by key."""
    return {row[0]: row[4:] for row in node.handle(Listing(1, 1, b"", 10), now).replies[0].body}


def test_a_block_has_its_age_its_last_use_and_the_name_that_a_client_told() -> None:
    node = core()
    put(node, KEYS[0], 10.0)
    put(node, KEYS[1], 12.0)
    node.handle(Named(1, KEYS[:1], [b"greeting"]), 13.0)
    node.handle(Touch(1, KEYS[:1]), 14.0)
    assert rows(node, 20.0) == {KEYS[0]: (1, 10.0, 6.0, b"greeting"), KEYS[1]: (1, 8.0, 8.0, b"")}
    node.handle(Pin(1, 1, KEYS[1:2]), 19.0)
    assert rows(node, 20.0)[KEYS[1]] == (1, 8.0, 1.0, b"")


def test_a_put_of_what_is_there_counts_as_use() -> None:
    node = core()
    put(node, KEYS[0], 10.0)
    node.handle(Reserve(1, 1, KEYS[:1], [10], 3, [1], [0], [None], [0]), 15.0)
    assert rows(node, 20.0) == {KEYS[0]: (1, 10.0, 5.0, b"")}


def test_names_of_what_is_not_there_or_has_gone_are_not_kept() -> None:
    node = core()
    put(node, KEYS[0], 1.0)
    node.handle(Named(1, KEYS[:2], [b"a", b"b"]), 1.0)
    assert len(node.blocks.names) == 1
    node.handle(Drop(1, 1, KEYS[:1]), 2.0)
    assert len(node.blocks.names) == 0


def test_no_more_names_are_kept_than_the_limit_says_the_first_told_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_module, "NAMES_MAX", 2)
    node = core()
    for key in KEYS[:3]:
        put(node, key, 1.0)
        node.handle(Named(1, [key], [key[:4]]), 1.0)
    named = {key: row[3] for key, row in rows(node, 2.0).items()}
    assert [named[key] for key in KEYS[:3]] == [b"", KEYS[1][:4], KEYS[2][:4]]


def test_all_nodes_are_told_of_the_namespaces_with_most_bytes() -> None:
    """Not of those with most blocks."""
    node = core()
    for number, (size, count) in enumerate([(5000, 1), *[(10, 2)] * NAMESPACES_TOLD_MAX], 1):
        keys = [Namespace.named(str(number)).value_key(str(i)) for i in range(count)]
        each = [0] * count
        reserve = Reserve(1, 1, keys, [size] * count, number, each, each, [None] * count, each)
        grants = node.handle(reserve, 1.0).replies[0].body
        node.handle(Commit(1, 2, [(grant[0], grant[1], 0) for grant in grants]), 1.0)
    told = {n: c for n, c in counts(node).items() if n.startswith(SPACE_BYTES)}
    assert len(told) == NAMESPACES_TOLD_MAX
    assert told[f"{SPACE_BYTES}1"] == 5000
    assert counts(node)["block_bytes"] == 5000 + 20 * NAMESPACES_TOLD_MAX
