"""Which segment a record leads to: mapped once, of the start that it names, or none."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mapping_parts import NodeOf, Spied, ids

from kvstore.client.nodes import directory
from kvstore.client.nodes.directory import HERE_BELIEVED_S, NodeDirectory


def test_a_start_of_a_node_is_mapped_once_and_is_of_the_own_index(
    nodes: NodeDirectory, node: NodeOf, machine: Spied
) -> None:
    node(1)
    node(2)
    assert nodes.mapped == ()
    first = nodes.segment(2, 1, 0.0)
    assert first is not None
    assert (first.announcement.node_id, first.ours, first.gone) == (2, True, False)
    assert nodes.segment(2, 1, 1.0) is first
    second = nodes.segment(1, 1, 1.0)
    assert nodes.mapped == (second, first)
    assert nodes.segment(1, 2, 1.0) is None
    assert (machine.sweeps, nodes.gone) == (0, 0)


def test_what_a_record_names_is_of_the_own_index_from_then_on(
    nodes: NodeDirectory, node: NodeOf
) -> None:
    node(1, index="redis://another")
    assert ids(nodes.every(0.0)) == [1]
    assert nodes.ours(0.0, find=True) == []
    assert nodes.segment(1, 1, 0.0) is not None
    assert ids(nodes.ours(0.0, find=False)) == [1]


def test_no_such_node_is_believed_for_a_while(nodes: NodeDirectory, node: NodeOf) -> None:
    assert nodes.segment(1, 1, 8.0) is None
    node(1)
    assert nodes.segment(1, 1, 8.0 + HERE_BELIEVED_S / 2) is None
    assert nodes._attach(1, 1, 8.0 + HERE_BELIEVED_S / 2) is None, "another thread has just looked"
    assert nodes.segment(1, 1, 8.0 + HERE_BELIEVED_S) is not None


def test_no_more_starts_are_remembered_than_may_be_and_what_is_mapped_stays(
    nodes: NodeDirectory, node: NodeOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "NODES_KNOWN_MAX", 2)
    node(1)
    mapped = nodes.segment(1, 1, 8.0)
    assert mapped is not None
    absent = [nodes.entry(node_id, 1) for node_id in (2, 3, 4)]
    assert nodes.entry(4, 1) is absent[2]
    assert nodes.entry(2, 1) is not absent[0], "the oldest goes"
    assert nodes.segment(1, 1, 8.0) is mapped
    node(2)
    assert nodes.segment(2, 1, 8.0) is not None
    assert nodes.entry(3, 1).attached is None, "there is room for it all the same"


def test_a_dead_node_is_not_mapped_but_swept(
    nodes: NodeDirectory, node: NodeOf, machine: Spied
) -> None:
    node(1).die()
    assert nodes.segment(1, 1, 0.0) is None
    assert machine.sweeps == 1
    assert nodes.every(0.0) == ()


def test_a_segment_that_cannot_be_mapped_is_none_and_a_directory_without_a_word_is_passed_over(
    nodes: NodeDirectory, node: NodeOf, tmp_path: Path
) -> None:
    (tmp_path / "nodes" / "a").mkdir(parents=True)
    broken = node(1)
    broken.segment.head_path.rename(tmp_path / "elsewhere")
    node(2)
    assert nodes.segment(1, 1, 0.0) is None
    assert nodes.entry(1, 1).absent_until > 0.0
    assert nodes.segment(2, 1, 0.0) is not None
    assert ids(nodes.every(0.0)) == [2]
    assert ids(nodes.ours(0.0, find=True)) == [2]
    assert nodes.writables() == []


@pytest.mark.parametrize("changes", [{"epoch": 2}, {"node_id": 2}])
def test_a_segment_whose_superblock_names_another_start_is_not_mapped(
    nodes: NodeDirectory, node: NodeOf, changes: dict[str, int]
) -> None:
    """The word may be older or newer than the file: what lies there is not what it promises."""
    there = node(1)
    word = dataclasses.replace(there.word, **changes)
    there.directory.announce(word)
    assert nodes.segment(word.node_id, word.epoch, 1.0) is None
    assert not nodes.map_all(1.0)
    assert nodes.mapped == ()


def test_who_waited_while_another_thread_mapped_it_has_the_same_segment(
    nodes: NodeDirectory, node: NodeOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    node(1)

    @contextmanager
    def lock() -> Iterator[None]:
        nodes._attach(1, 1, 0.0)
        yield

    with monkeypatch.context() as patched:
        patched.setattr(nodes, "_lock", lock())
        found = nodes.segment(1, 1, 0.0)
    assert nodes.mapped == (found,)
