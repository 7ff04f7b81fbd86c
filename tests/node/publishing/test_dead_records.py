"""What a node that is gone for good left in the index goes, and nothing else does."""

from __future__ import annotations

from contextlib import closing

import pytest
from contract.index import scanned
from redis_servers import RedisServer, wait_until
from stores import NodeThread, announcement

from kvstore import Client
from kvstore.errors import IndexRefusedError, IndexUnavailableError
from kvstore.index.base import KeyRecord
from kvstore.index.memory import MemoryIndex
from kvstore.index.redis.index import open_index
from kvstore.machine import Machine
from kvstore.node.publishing import dead_records
from kvstore.node.publishing.dead_records import (
    LOOK_EVERY_S,
    LOOKED_AWAY_S,
    REFUSED_S,
    DeadRecords,
)
from kvstore.node.publishing.scrubber import Scrubber
from kvstore.record import pack_record
from kvstore.types import Location

US, OTHER, DEAD = 10, 20, 30


class World(Machine):
    """An index, and a clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.monotonic = lambda: self.now  # type: ignore[method-assign]
        self.index = MemoryIndex(now=lambda: 0.0)
        self.sweep = DeadRecords(self.index, US, machine=self)
        self.announce(US)

    def announce(self, node_id: int, epoch: int = 1) -> None:
        self.index.announce(node_id, announcement(node_id=node_id, epoch=epoch).pack(), 60)

    def publish(self, node_id: int, epoch: int = 1, number: int = 0) -> KeyRecord:
        key = bytes([node_id, epoch, number]) + bytes(29)
        record = KeyRecord(key, pack_record(key, Location(node_id, epoch, 0, 0, 1, 0, 10, 0)))
        self.index.publish([record])
        return record

    def has(self, record: KeyRecord) -> bool:
        return self.index.lookup([record.key]) == [record.record]

    def look_for(self, seconds: float, every_s: float = LOOKED_AWAY_S / 2) -> None:
        until = self.now + seconds
        while self.now < until:
            self.sweep.step()
            self.now += every_s
        self.sweep.step()


DAY_S = 20 * LOOKED_AWAY_S
"""In most of these tests."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(dead_records, "UNSEEN_S", DAY_S)
    return World()


def test_records_of_a_start_that_was_unseen_for_a_day_go_and_those_of_others_stay() -> None:
    world = World()
    assert dead_records.UNSEEN_S == 24 * 3600
    world.announce(OTHER, epoch=2)
    dead, former = world.publish(DEAD), world.publish(OTHER, epoch=1)
    living = [world.publish(US), world.publish(OTHER, epoch=2)]
    odd = KeyRecord(bytes(32), b"no record of ours")
    world.index.publish([odd])
    world.look_for(24 * 3600 - LOOKED_AWAY_S)
    assert all(map(world.has, (dead, former, *living)))
    world.look_for(2 * LOOKED_AWAY_S)
    assert not world.has(dead)
    assert not world.has(former)
    assert all(map(world.has, (odd, *living)))


def test_a_node_that_was_seen_meanwhile_has_another_day(world: World) -> None:
    record = world.publish(DEAD)
    world.look_for(DAY_S / 2)
    world.announce(DEAD)
    world.sweep.step()
    world.index.withdraw(DEAD)
    world.look_for(DAY_S - LOOKED_AWAY_S)
    assert world.has(record)
    world.look_for(2 * LOOKED_AWAY_S)
    assert not world.has(record)


@pytest.mark.parametrize("raw", [b'{"version": 99}', b"nobody can read this"])
def test_a_node_of_another_version_lives_in_all_its_starts(world: World, raw: bytes) -> None:
    record = world.publish(OTHER)
    world.index.announce(OTHER, raw, 60)
    world.look_for(DAY_S * 2)
    assert world.has(record)


def test_time_in_which_nobody_looked_does_not_count(world: World) -> None:
    """A process that stood, a host that slept: who knows whether the others lived meanwhile."""
    record = world.publish(DEAD)
    world.look_for(DAY_S - LOOKED_AWAY_S)
    world.now += DAY_S
    world.look_for(DAY_S - LOOKED_AWAY_S)
    assert world.has(record)


def test_nor_does_time_in_which_the_index_was_away(world: World, monkeypatch) -> None:
    record = world.publish(DEAD)
    world.look_for(DAY_S - LOOKED_AWAY_S)

    def away() -> dict[int, bytes]:
        raise IndexUnavailableError("away")

    with monkeypatch.context() as patch:
        patch.setattr(world.index, "nodes", away)
        world.look_for(3 * LOOKED_AWAY_S)
    world.look_for(DAY_S / 2)
    assert world.has(record)


def test_one_node_looks_for_all(world: World, monkeypatch) -> None:
    world.announce(US - 1)
    monkeypatch.setattr(world.index, "scan", lambda place: pytest.fail("it is the other's turn"))
    assert world.sweep.step() == LOOK_EVERY_S


def test_what_came_in_place_of_a_dead_nodes_record_stays(world: World, monkeypatch) -> None:
    record = world.publish(DEAD)
    world.look_for(DAY_S - LOOKED_AWAY_S)
    newer = KeyRecord(record.key, pack_record(record.key, Location(US, 1, 0, 0, 1, 0, 10, 0)))
    real = world.index.scan

    def meanwhile(place):
        found = real(place)
        world.index.publish([newer])
        return found

    monkeypatch.setattr(world.index, "scan", meanwhile)
    world.look_for(2 * LOOKED_AWAY_S)
    assert world.has(newer)


def test_without_the_right_to_list_records_it_asks_again_in_an_hour_and_says_so(
    world: World, monkeypatch, caplog
) -> None:
    def refuse(place):
        raise IndexRefusedError("this user lacks a right")

    monkeypatch.setattr(world.index, "scan", refuse)
    with caplog.at_level("INFO"):
        assert world.sweep.step() == REFUSED_S
    assert "kvstore acl --sweep" in caplog.text


def test_a_node_that_comes_back_publishes_again_what_was_removed(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real ones, but for the clock of who sweeps, and for its not seeing the other."""
    monkeypatch.setattr(dead_records, "UNSEEN_S", DAY_S)
    with NodeThread(redis_server, size_bytes=16 << 20) as node:
        prefix = node.client_options["key_prefix"]
        with (
            Client(**node.client_options) as client,
            closing(open_index(redis_server.url, key_prefix=prefix, timeout_s=5)) as index,
        ):
            assert all(client.put_many([(f"k{i}", b"v") for i in range(300)]))
            before = scanned(index)
            assert len(before) == 300
            world = World()
            alone = world.index.nodes()
            monkeypatch.setattr(index, "nodes", lambda: alone)
            world.sweep = dead_records.DeadRecords(index, US, machine=world)
            with monkeypatch.context() as away:
                away.setattr(Scrubber, "step", lambda scrubber: None)
                world.look_for(DAY_S + 2 * LOOKED_AWAY_S)
                assert scanned(index) == {}
            wait_until(lambda: scanned(index) == before, "all of them are published again")
