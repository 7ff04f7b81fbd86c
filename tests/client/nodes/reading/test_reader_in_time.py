"""By when blocks are read of nodes on other hosts, and who is asked at all."""

from __future__ import annotations

import pytest
from reading_parts import (
    FAILED,
    HIT,
    MISS,
    NOW,
    WORDS,
    Way,
    by,
    known,
    wanted,
)

from kvstore.circuit_breaker import BreakerState
from kvstore.client.nodes import remote as remote_module
from kvstore.client.nodes.remote import RemoteNodes
from kvstore.transport.base import Read
from kvstore.transport.nixl.transport import NAME as NIXL
from kvstore.transport.stream.transport import NAME as STREAM


@pytest.mark.parametrize("given", [None, 0.25, 60.0])
def test_the_time_of_a_read_is_that_of_its_bytes_or_less(
    nodes: RemoteNodes, given: float | None
) -> None:
    stream = Way()
    by(nodes, (STREAM, stream))
    deadline = None if given is None else NOW + given
    assert nodes.read([wanted(1), wanted(2)], deadline) == [HIT, HIT]
    of_its_bytes = NOW + nodes.timeout_s(200)
    assert stream.asked == [([1, 2], min(of_its_bytes, deadline or of_its_bytes))]


def test_all_nodes_are_read_at_once_and_each_answer_is_that_of_its_block(
    nodes: RemoteNodes,
) -> None:
    stream = Way({2: MISS, 3: FAILED})
    by(nodes, (STREAM, stream))
    batch = [wanted(1), wanted(2, node_id=8), wanted(3, node_id=8), wanted(4)]
    assert nodes.read(batch, NOW + 60) == [HIT, MISS, FAILED, HIT]
    until = NOW + nodes.timeout_s(200)
    assert sorted(stream.asked) == [([1, 4], until), ([2, 3], until)]


@pytest.mark.parametrize(
    ("left_s", "asked"), [(-1.0, False), (0.0, False), (2.0**-20, True), (0.5, True)]
)
def test_without_time_left_nobody_is_asked(nodes: RemoteNodes, left_s: float, asked: bool) -> None:
    stream = Way()
    by(nodes, (STREAM, stream))
    (outcome,) = nodes.read([wanted(1)], NOW + left_s)
    assert (outcome.read is Read.HIT) is asked
    assert len(stream.asked) == asked
    assert known(nodes).breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize("way", [STREAM, NIXL])
def test_a_node_that_is_not_there_fails_and_counts_for_the_way_that_is_allowed(
    nodes: RemoteNodes, way: str
) -> None:
    nodes.transports.names = [way]
    stream = Way()
    by(nodes, (STREAM, stream))
    outcomes = nodes.read([wanted(1, node_id=9), wanted(2, node_id=9)])
    assert [outcome.read for outcome in outcomes] == [Read.FAILED] * 2
    assert stream.asked == []
    assert {name: count for name, count in nodes.counts.items() if count} == {f"{way}_failed": 2}


def test_who_fails_meanwhile_is_not_asked_and_nobodys_try_is_used_up(
    nodes: RemoteNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the question whether it is there, and the read."""
    stream = Way()
    by(nodes, (STREAM, stream))
    its = known(nodes)
    its.breaker.failed(NOW, hung=True)
    monkeypatch.setattr(nodes, "node", lambda *_: WORDS[7])
    assert nodes.read([wanted(1)])[0].read is Read.FAILED
    monkeypatch.setattr(nodes, "node", lambda *_: None)
    probe_at = its.breaker.probe_at
    remote_module.time.now = probe_at  # type: ignore[attr-defined]
    assert nodes.read([wanted(1)])[0].read is Read.FAILED
    assert its.breaker.allows(probe_at), "its next try is left for who asks it"
    monkeypatch.setattr(nodes, "node", lambda *_: WORDS[7])
    monkeypatch.setattr(nodes.directory, "get", lambda _: None)
    assert nodes.read([wanted(1)])[0].read is Read.FAILED
    assert stream.asked == []
