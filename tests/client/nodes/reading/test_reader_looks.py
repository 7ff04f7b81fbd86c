"""Which blocks a node on another host says that it has, and by when it is asked."""

from __future__ import annotations

import pytest
from reading_parts import (
    NOW,
    Clock,
    Vram,
    known,
    there,
    wanted,
)
from stores import announcement

from kvstore.circuit_breaker import BreakerState
from kvstore.client.nodes import remote as remote_module
from kvstore.client.nodes.remote import RemoteNodes
from kvstore.errors import NodeUnavailableError
from kvstore.transport.cuda_memory import NAME as CUDA_IPC


def test_each_node_says_which_blocks_it_has_by_a_deadline_that_claims_do_not_move(
    nodes: RemoteNodes, looks: list[tuple[list[int], float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "STREAM_BLOCKS_MAX", 2)
    asked = [wanted(1, length=10_000_000), wanted(2), wanted(3, node_id=8), wanted(4)]
    assert there(nodes, *asked) == [False, True, False, True]
    until = NOW + nodes.timeout_s(0)
    assert sorted(looks) == [([1, 2], until), ([3], until), ([4], until)]
    its = nodes.directory.get(8)
    assert its is not None
    assert its.breaker.state is BreakerState.OPEN


@pytest.mark.parametrize(
    ("left_s", "state"), [(0.25, BreakerState.CLOSED), (0.75, BreakerState.OPEN)]
)
def test_a_question_that_failed_for_want_of_time_is_not_the_nodes_fault(
    nodes: RemoteNodes,
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    left_s: float,
    state: BreakerState,
) -> None:
    its = known(nodes, 8)

    def look(*_: object) -> list[bool]:
        clock.now = NOW + left_s
        raise NodeUnavailableError("silent")

    monkeypatch.setattr(remote_module, "look", look)
    asked = wanted(1, node_id=8)
    assert nodes.there([(asked.key, asked.location)], NOW + left_s) == [False]
    assert its.breaker.state is state


def test_nobody_is_asked_when_the_time_is_over(
    nodes: RemoteNodes, looks: list[tuple[list[int], float]]
) -> None:
    asked = wanted(1)
    assert nodes.there([(asked.key, asked.location)], NOW) == [False]
    assert looks == []


def test_of_a_node_that_is_not_there_nothing_is_known(
    nodes: RemoteNodes,
    looks: list[tuple[list[int], float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert there(nodes, wanted(1, node_id=9), wanted(2, node_id=9)) == [False, False]
    nodes.vram = Vram()  # type: ignore[assignment]
    assert there(nodes, wanted(1, node_id=9)) == [False]
    monkeypatch.setattr(nodes.directory, "get", lambda _: None)
    assert there(nodes, wanted(1)) == [False]
    assert looks == []


def test_a_node_in_vram_is_asked_as_such_and_no_other(
    nodes: RemoteNodes, looks: list[tuple[list[int], float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    vram = announcement(node_id=5, transports={CUDA_IPC: "there"})
    nodes.vram = Vram(vram)  # type: ignore[assignment]
    asked = [wanted(1, node_id=5, length=1), wanted(2, node_id=5), wanted(3)]
    assert there(nodes, *asked) == [True, False, True]
    assert [numbers for numbers, _ in looks] == [[3]]
    nodes.vram = None
    monkeypatch.setattr(nodes, "node", lambda *_: vram)
    assert there(nodes, wanted(1)) == [True]  # by a stream, if that is how it is reached
