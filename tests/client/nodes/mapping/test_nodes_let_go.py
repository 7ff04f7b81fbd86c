"""When a client lets go of segments: their node is dead, or the client ends."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mapping_parts import OURS, Index, NodeOf, Spied, free_for_others
from own_python import holds_in_child

from kvstore.client.nodes.directory import HERE_BELIEVED_S, NodeDirectory


def test_a_node_that_dies_or_starts_anew_is_let_go_at_the_next_look(
    nodes: NodeDirectory, node: NodeOf, machine: Spied
) -> None:
    dies, restarts = node(1), node(2)
    node(3)
    nodes.check(8.0)
    assert len(nodes.every(8.0)) == 3
    one, two, three = (nodes.segment(node_id, 1, 8.0) for node_id in (1, 2, 3))
    dies.die()
    restarts.restart()
    nodes.check(8.0 + HERE_BELIEVED_S / 2)
    assert len(nodes.mapped) == 3
    nodes.check(8.0 + HERE_BELIEVED_S)
    assert nodes.mapped == (three,)
    assert one is not None
    assert two is not None
    assert one.gone
    assert two.gone
    assert (nodes.gone, machine.sweeps) == (2, 1)
    nodes.check(8.0 + 2 * HERE_BELIEVED_S)
    assert (nodes.gone, machine.sweeps) == (2, 1)
    assert nodes.segment(1, 1, 9.0) is None


@pytest.mark.parametrize("ask", ["ours", "every"])
def test_whoever_asks_for_segments_gets_none_of_the_dead(
    nodes: NodeDirectory, node: NodeOf, ask: str
) -> None:
    one = node(1)
    assert nodes.segment(1, 1, 0.0) is not None
    one.die()
    found = nodes.ours(8.0, find=False) if ask == "ours" else nodes.every(8.0)
    assert list(found) == []


def test_a_look_for_the_dead_waits_for_nobody(nodes: NodeDirectory, node: NodeOf) -> None:
    one = node(1)
    assert nodes.segment(1, 1, 0.0) is not None
    one.die()
    taken = threading.Event()
    done = threading.Event()

    def hold() -> None:
        with nodes._lock:
            taken.set()
            done.wait(5)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(20)
    nodes.check(8.0)
    assert not done.is_set()
    assert len(nodes.mapped) == 1
    done.set()
    thread.join()
    nodes.check(8.0)
    assert nodes.mapped == ()
    assert free_for_others(nodes)


def test_after_a_close_there_are_none(nodes: NodeDirectory, node: NodeOf, machine: Spied) -> None:
    node(1, index=OURS)
    attached = nodes.segment(1, 1, 0.0)
    assert attached is not None
    nodes.close()
    assert attached.gone
    assert machine.sweeps == 1
    assert nodes.mapped == ()
    assert nodes.segment(1, 1, 8.0) is None
    assert nodes.every(8.0) == ()
    assert nodes.ours(8.0, find=True) == []
    assert nodes.writables() == []
    assert nodes.mapped == ()


def test_what_is_mapped_while_it_closes_is_not_kept(
    tmp_path: Path, node: NodeOf, machine: Spied
) -> None:
    node(1)
    told: list[None] = []
    nodes = NodeDirectory(tmp_path, Index(), "kv:t", mapping=lambda: told.append(None))
    real = nodes._map

    def closing(*arguments: Any, **options: Any) -> Any:
        nodes._use = False
        return real(*arguments, **options)

    nodes._map = closing  # type: ignore[method-assign]
    nodes.segment(1, 1, 0.0)
    assert (nodes.mapped, len(told)) == ((), 1)


def test_a_client_that_uses_no_nodes_of_this_host_finds_none(tmp_path: Path, node: NodeOf) -> None:
    node(1, index=OURS)
    told: list[None] = []
    nodes = NodeDirectory(tmp_path, Index(), "kv:t", use=False, mapping=lambda: told.append(None))
    assert nodes.segment(1, 1, 0.0) is None
    assert nodes.map_all(0.0) is False
    assert nodes.every(0.0) == ()
    assert nodes.ours(0.0, find=True) == []
    assert nodes.writables() == []
    assert told == []


def test_a_forked_child_waits_for_no_thread_of_its_parent(
    nodes: NodeDirectory, node: NodeOf
) -> None:
    node(1)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(nodes._lock.acquire).result()
        assert holds_in_child(lambda: nodes.segment(1, 1, 0.0) is not None)
        pool.submit(nodes._lock.release).result()


def test_two_that_cannot_be_named_are_not_the_same_index(
    nodes: NodeDirectory, node: NodeOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Index, "identity", lambda self: "")
    node(1, index="")
    assert nodes.ours(8.0, find=True) == []
    assert nodes.writables() == []
