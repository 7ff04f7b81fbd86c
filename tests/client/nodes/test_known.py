"""The state of one start of a node, by what was heard of it and how it answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from stores import announcement

from kvstore.client.nodes.known import KnownNode, NodeState


def test_a_start_is_unheard_reachable_silent_and_gone_in_turn() -> None:
    known = KnownNode(1)
    assert known.state is NodeState.UNHEARD
    known.announcement, known.confirmed_at = announcement(node_id=7, epoch=1), 5.0
    assert known.state is NodeState.REACHABLE
    known.breaker.failed(5.0, hung=True)
    assert known.state is NodeState.SILENT
    assert known.breaker.allows(known.breaker.probe_at)
    assert known.state is NodeState.SILENT, "it has not answered yet"
    known.breaker.succeeded()
    assert known.state is NodeState.REACHABLE
    known.announcement = None
    assert known.state is NodeState.GONE


def test_one_whose_memory_is_mapped_here_is_reachable_without_a_word_in_the_index() -> None:
    known, segment = KnownNode(1), SimpleNamespace()
    mapped: Any = segment
    known.attached = mapped
    assert known.state is NodeState.REACHABLE
    known.announcement = announcement(node_id=7, epoch=1)
    known.breaker.failed(5.0, hung=True)
    assert known.state is NodeState.SILENT, "what it is asked is not answered"
