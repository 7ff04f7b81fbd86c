"""What becomes of a node that was read, what it is told, and what a read raises."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from reading_parts import (
    DAMAGED,
    FAILED,
    HIT,
    MISS,
    NOW,
    Clock,
    Told,
    Way,
    by,
    keys,
    known,
    there,
    wanted,
)

from kvstore.circuit_breaker import BreakerState
from kvstore.client.nodes.remote import REPORT_TIMEOUT_S, RemoteNodes
from kvstore.errors import PeerError
from kvstore.protocol.control import Op
from kvstore.transport.base import Outcome, Wanted
from kvstore.transport.stream.transport import NAME as STREAM


@pytest.mark.parametrize(
    ("left_s", "took_s", "state"),
    [
        (0.25, 0.25, BreakerState.CLOSED),
        (0.25, 0.5, BreakerState.CLOSED),
        (0.25, 0.125, BreakerState.OPEN),
        (0.5, 0.5, BreakerState.OPEN),
        (0.75, 0.75, BreakerState.OPEN),
    ],
)
def test_a_read_that_failed_for_want_of_time_is_not_the_nodes_fault(
    nodes: RemoteNodes, clock: Clock, left_s: float, took_s: float, state: BreakerState
) -> None:
    """A node may take a second; who had less than half of it, and used it up, was hurried."""
    stream = Way({1: FAILED})
    by(nodes, (STREAM, stream))
    its = known(nodes)
    stream.meanwhile = lambda: setattr(clock, "now", NOW + took_s)
    assert nodes.read([wanted(1)], NOW + left_s) == [FAILED]
    assert its.breaker.state is state
    assert its.believed_until == float("-inf")


@pytest.mark.parametrize("answer", [HIT, MISS, DAMAGED])
def test_a_node_that_answers_is_there_whatever_it_has(
    nodes: RemoteNodes, told: Told, caplog: pytest.LogCaptureFixture, answer: Outcome
) -> None:
    by(nodes, (STREAM, Way({1: answer})))
    its = known(nodes)
    its.breaker.failed(NOW, hung=False)
    assert nodes.read([wanted(1)]) == [answer]
    assert its.breaker.state is BreakerState.CLOSED
    assert "cannot be read" not in caplog.text


def test_a_failure_is_said_with_its_reason(
    nodes: RemoteNodes, caplog: pytest.LogCaptureFixture
) -> None:
    by(nodes, (STREAM, Way({2: FAILED})))
    nodes.read([wanted(1), wanted(2)])
    assert "cannot be read for now: broken" in caplog.text


@pytest.mark.parametrize("left_s", [0.125, 0.75])
def test_a_node_is_told_which_blocks_arrived_damaged_and_no_others(
    nodes: RemoteNodes, told: Told, left_s: float
) -> None:
    by(nodes, (STREAM, Way({1: DAMAGED, 2: MISS, 4: DAMAGED})))
    nodes.read([wanted(number) for number in (1, 2, 3, 4)], NOW + left_s)
    until = NOW + min(left_s, REPORT_TIMEOUT_S)
    assert told == [(7, [Op.SUSPECT, 0, keys(1, 4)], until)]


def test_what_was_read_is_counted_by_its_way(nodes: RemoteNodes, told: Told) -> None:
    by(nodes, (STREAM, Way({2: MISS, 3: DAMAGED, 4: FAILED, 5: FAILED})))
    nodes.read([wanted(number) for number in range(1, 6)] + [wanted(6, length=50)])
    assert nodes.counts == {
        **dict.fromkeys(nodes.counts, 0),
        "stream_hits": 2,
        "stream_bytes": 150,
        "stream_misses": 2,
        "stream_checksum": 1,
        "stream_failed": 2,
    }


def test_what_a_read_of_another_node_raises_is_raised(nodes: RemoteNodes) -> None:
    class Broken(Way):
        def read(self, word: Any, batch: Sequence[Wanted], deadline: float) -> list[Outcome]:
            if word.node_id == 8:
                raise ZeroDivisionError
            return super().read(word, batch, deadline)

    by(nodes, (STREAM, Broken()))
    with pytest.raises(ZeroDivisionError):
        nodes.read([wanted(1), wanted(2, node_id=8)])


def test_of_nodes_that_no_thread_could_ask_nothing_is_known(
    nodes: RemoteNodes, looks: list[tuple[list[int], float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert there(nodes, wanted(1), wanted(2, node_id=8)) == [True, False]
    assert [numbers for numbers, _ in looks] == [[1]]


def test_threads_are_kept_for_the_next_read_and_waited_for_by_no_close(
    nodes: RemoteNodes,
) -> None:
    pool, release, begun = nodes._threads, threading.Event(), threading.Event()

    def stuck() -> None:
        begun.set()
        release.wait(20)

    pool.submit(stuck)
    assert begun.wait(20)
    freed = threading.Timer(5, release.set)
    freed.start()
    nodes.close()
    assert not release.is_set()
    freed.cancel()
    release.set()
    with pytest.raises(PeerError):
        pool.submit(stuck)
    nodes.close()
