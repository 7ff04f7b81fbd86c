"""By which transport a block of another host's node, or of VRAM here, is read."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from reading_parts import (
    FAILED,
    HIT,
    MISS,
    NOW,
    WORDS,
    Told,
    Vram,
    Way,
    by,
    keys,
    wanted,
)
from reading_parts import ways as ways_of
from stores import announcement

from kvstore.client.nodes.remote import TOUCH_TIMEOUT_S, UNCHECKED_REASON, RemoteNodes
from kvstore.protocol.control import Op
from kvstore.transport.base import Outcome, Read
from kvstore.transport.nixl.transport import NAME as NIXL
from kvstore.transport.stream.transport import NAME as STREAM


@pytest.mark.parametrize(
    ("nixl", "allowed", "ways"),
    [
        (None, [STREAM], [STREAM]),
        ((False, True), [NIXL, STREAM], [STREAM]),
        ((True, True), [NIXL, STREAM], [NIXL, STREAM]),
        ((True, False), [NIXL, STREAM], [STREAM]),
        ((True, False), [NIXL], [NIXL]),
        ((True, True), [NIXL], [NIXL]),
    ],
)
def test_nixl_comes_first_where_it_is_ready_and_alone_where_it_is_all_there_is(
    nodes: RemoteNodes, nixl: Any, allowed: list[str], ways: list[str]
) -> None:
    if nixl is not None:
        usable, ready = nixl
        nodes.transports._made[NIXL] = SimpleNamespace(  # type: ignore[assignment]
            name=NIXL, usable=lambda _: usable, ready=lambda _: ready, close=lambda: None
        )
    nodes.transports.names = allowed
    found = ways_of(nodes, replace(WORDS[7], transports={STREAM: "tcp://there:7400", NIXL: ""}))
    assert [way.name for way in found] == ways
    assert [way for way in found if way.name == STREAM] == [nodes.stream] * (STREAM in ways)


@pytest.mark.parametrize("way", [NIXL, STREAM])
@pytest.mark.parametrize("in_vram", [False, True])
def test_what_nixl_wrote_into_vram_is_counted_apart(
    nodes: RemoteNodes, told: Told, way: str, in_vram: bool
) -> None:
    counts = dict(nodes.counts)
    assert set(counts) >= {"nixl_vram_hits", "nixl_vram_bytes"}
    by(nodes, (way, Way({1: HIT._replace(in_vram=in_vram)})))
    nodes.read([wanted(1)])
    took = "nixl_vram" if in_vram and way == NIXL else way
    assert nodes.counts == {**counts, f"{took}_hits": 1, f"{took}_bytes": 100}


def test_a_node_that_does_not_offer_nixl_is_not_tried_by_it(nodes: RemoteNodes) -> None:
    def usable(_: object) -> bool:
        raise AssertionError("asked of a node that offers none")

    nixl = SimpleNamespace(usable=usable, close=lambda: None)
    nodes.transports._made[NIXL] = nixl  # type: ignore[assignment]
    nodes.transports.names = [NIXL, STREAM]
    assert ways_of(nodes, WORDS[7]) == [nodes.stream]


def test_what_fails_one_way_is_read_the_next_in_the_other_half_of_the_time(
    nodes: RemoteNodes, told: Told
) -> None:
    first, second = Way({2: FAILED, 3: MISS, 4: FAILED}), Way({4: MISS})
    by(nodes, (NIXL, first), (STREAM, second))
    outcomes = nodes.read([wanted(number) for number in (1, 2, 3, 4)], NOW + 0.5)
    assert outcomes == [HIT, HIT, MISS, MISS]
    assert first.asked == [([1, 2, 3, 4], NOW + 0.25)]
    assert second.asked == [([2, 4], NOW + 0.5)]
    assert told == [(7, [Op.TOUCH, 0, keys(1)], NOW + TOUCH_TIMEOUT_S)]
    counts = {name: count for name, count in nodes.counts.items() if count}
    assert counts == {
        "nixl_hits": 1,
        "nixl_bytes": 100,
        "nixl_misses": 1,
        "nixl_failed": 2,
        "stream_hits": 1,
        "stream_bytes": 100,
        "stream_misses": 1,
    }


def test_no_way_is_asked_for_nothing(nodes: RemoteNodes, told: Told) -> None:
    first, second = Way({1: MISS, 2: MISS}), Way()
    by(nodes, (NIXL, first), (STREAM, second))
    assert nodes.read([wanted(1), wanted(2)]) == [MISS, MISS]
    assert second.asked == []
    assert told == []
    by(nodes, (NIXL, Way({1: FAILED})))
    assert nodes.read([wanted(1)]) == [FAILED]


def test_a_block_without_a_checksum_is_read_by_a_stream_alone(
    nodes: RemoteNodes, told: Told
) -> None:
    first, second = Way({1: FAILED}), Way()
    by(nodes, (NIXL, first), (STREAM, second))
    batch = [wanted(1), wanted(2, checksum=0), wanted(3), wanted(4, checksum=0)]
    assert nodes.read(batch, NOW + 0.5) == [HIT] * 4
    assert first.asked == [([1, 3], NOW + 0.25)]
    assert second.asked == [([1], NOW + 0.5), ([2, 4], NOW + 0.5)]
    del first.asked[:], second.asked[:]
    assert nodes.read(batch[1::2], NOW + 0.5) == [HIT] * 2
    assert (first.asked, second.asked) == ([], [([2, 4], NOW + 0.5)])
    alone = Way()
    by(nodes, (NIXL, alone))
    unread = Outcome(Read.MISS, UNCHECKED_REASON)
    assert nodes.read(batch, NOW + 0.5) == [HIT, unread, HIT, unread]
    assert [numbers for numbers, _ in alone.asked] == [[1, 3]]
    by(nodes, (STREAM, second))
    assert nodes.read(batch, NOW + 0.5) == [HIT] * 4


def test_a_block_on_a_disk_of_another_host_is_read_by_a_stream_alone(
    nodes: RemoteNodes, told: Told
) -> None:
    first, second = Way(), Way({4: MISS})
    by(nodes, (NIXL, first), (STREAM, second))
    batch = [wanted(i) for i in range(1, 5)]
    for i in (1, 3):  # the second and the last
        batch[i] = batch[i]._replace(location=batch[i].location._replace(segment=1 + i))
    assert nodes.read(batch) == [HIT, HIT, HIT, MISS]
    assert [numbers for numbers, _ in first.asked] == [[1, 3]]
    assert [numbers for numbers, _ in second.asked] == [[2, 4]]


@pytest.mark.parametrize("given", [0.25, 60.0])
def test_a_node_in_vram_is_read_as_such_and_no_other(nodes: RemoteNodes, given: float) -> None:
    vram, stream = Vram(announcement(node_id=5)), Way()
    nodes.vram = vram  # type: ignore[assignment]
    by(nodes, (STREAM, stream))
    batch = [wanted(1, node_id=5), wanted(2), wanted(3, node_id=5)]
    assert nodes.read(batch, NOW + given) == [HIT] * 3
    assert vram.way.asked == [([1, 3], NOW + min(given, nodes.timeout_s(200)))]
    assert [numbers for numbers, _ in stream.asked] == [[2]]
