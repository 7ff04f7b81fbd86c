"""Which nodes of this host are found, read and written to, when no record names them."""

from __future__ import annotations

import threading

import pytest
from mapping_parts import OURS, Index, NodeOf, Spied, free_for_others, ids

from kvstore.client.nodes.directory import HERE_BELIEVED_S, NodeDirectory
from kvstore.errors import IndexUnavailableError
from kvstore.transport.cuda_memory import NAME as CUDA_IPC


def test_every_living_node_of_the_same_keys_is_mapped_when_nobody_can_be_asked(
    nodes: NodeDirectory, node: NodeOf
) -> None:
    node(1, index="redis://another")
    node(2, key_prefix="kv:another", index=OURS)
    node(3, index=OURS)
    node(4, index=OURS).die()
    assert nodes.map_all(8.0)
    assert sorted(ids(nodes.mapped)) == [1, 3]
    assert not nodes.map_all(8.0 + HERE_BELIEVED_S), "nothing new"
    node(5)
    assert not nodes.map_all(8.0 + HERE_BELIEVED_S * 1.5), "it has just looked"
    assert nodes.map_all(8.0 + HERE_BELIEVED_S * 2)
    assert sorted(ids(nodes.every(8.0 + HERE_BELIEVED_S * 2))) == [1, 3, 5]
    assert nodes.ours(8.0 + HERE_BELIEVED_S * 2, find=False) == []


def test_of_the_own_index_without_a_question_are_those_that_name_it_or_were_known_to_it(
    nodes: NodeDirectory, node: NodeOf
) -> None:
    node(1, index="redis://another")
    node(2, index="redis://alias")
    node(3, index=OURS)
    node(4, index="")
    nodes._index.announce(2, b"{}", 60.0)
    assert ids(nodes.ours(8.0, find=False)) == []
    assert ids(nodes.ours(8.0, find=True)) == [3]
    assert ids(nodes.mapped) == [3]
    assert sorted(found.node_id for found, _ in nodes.writables()) == [2, 3]
    assert ids(nodes.ours(8.0 + HERE_BELIEVED_S / 2, find=True)) == [3], "it has just looked"
    assert sorted(ids(nodes.ours(8.0 + HERE_BELIEVED_S, find=True))) == [2, 3]


def test_a_segment_that_was_mapped_for_want_of_an_index_is_taken_for_ours_when_it_is(
    nodes: NodeDirectory, node: NodeOf
) -> None:
    node(1, index=OURS)
    node(2, index="redis://another")
    assert nodes.map_all(8.0)
    assert ids(nodes.ours(8.0, find=True)) == [1]
    assert nodes.map_all(9.0) is False
    assert ids(nodes.ours(9.0, find=True)) == [1]
    assert len(nodes.mapped) == 2


def test_who_must_not_wait_does_not_wait_for_who_looks_around(
    nodes: NodeDirectory, node: NodeOf
) -> None:
    node(1, index=OURS)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with nodes._lock:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(20)
    freed = threading.Timer(5, done.set)
    freed.start()
    assert nodes.ours(8.0, find=True) == []
    assert not done.is_set()
    done.set()
    thread.join()
    freed.cancel()
    assert ids(nodes.ours(8.0, find=True)) == [1], "it was no look"
    assert free_for_others(nodes)


def test_those_to_write_to_live_serve_the_same_keys_and_are_of_the_same_index(
    nodes: NodeDirectory, node: NodeOf, machine: Spied
) -> None:
    node(1, index=OURS)
    node(2, index=OURS, key_prefix="kv:another")
    node(3, index=OURS, transports={CUDA_IPC: "there"})
    node(4, index=OURS).die()
    node(5, index="redis://another")
    node(6, index="redis://alias")
    nodes._index.announce(6, b"{}", 60.0)
    assert [directory.name for _, directory in nodes.writables()] == ["n1", "n6"]
    assert machine.sweeps == 1
    for name, found in ((None, "n1"), ("n1", "n1"), ("n6", "n6")):
        chosen = nodes.writable(name)
        assert chosen is not None
        assert chosen[1].name == found
    assert nodes.writable("n5") is None


def test_the_index_is_asked_once_about_each_start(
    nodes: NodeDirectory, node: NodeOf, asked: list[int]
) -> None:
    for node_id in (1, 2, 3):
        node(node_id, index="redis://alias")
        nodes._index.announce(node_id, b"{}", 60.0)
        for _ in range(2):
            assert len(nodes.writables()) == node_id
        if node_id < 3:
            assert asked == list(range(1, node_id + 1))


def test_an_index_that_is_away_is_said_when_no_node_names_it(
    nodes: NodeDirectory, node: NodeOf
) -> None:
    assert isinstance(nodes._index, Index)
    nodes._index.away = True
    assert nodes.writables() == []
    node(2, index="redis://alias")
    with pytest.raises(IndexUnavailableError):
        nodes.writables()
    node(1, index=OURS)
    assert [word.node_id for word, _ in nodes.writables()] == [1]
    nodes._index.away = False
    assert [word.node_id for word, _ in nodes.writables()] == [1]
