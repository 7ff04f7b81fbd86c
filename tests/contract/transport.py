"""What every `Transport` promises. Subclasses give a `place`: a node, and ways to reach it."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
from each_input import each
from threads_at_once import at_once

from kvstore.client.nodes.directory import NodeDirectory
from kvstore.client.nodes.saving.link import Grants
from kvstore.client.nodes.saving.writer import Writer
from kvstore.errors import UsageError
from kvstore.index.memory import MemoryIndex
from kvstore.limits import STREAM_BLOCKS_MAX
from kvstore.node import Node, NodeConfig
from kvstore.protocol.control_requests import Wants
from kvstore.record import unpack_record
from kvstore.transport.base import Outcome, Read, Transport, Wanted
from kvstore.transport.stream.security import StreamSecurity
from kvstore.types import Key, Kind, Location

MIB = 1 << 20
SECURITY = StreamSecurity(secret=b"a secret for tests")
PATIENCE_S = 20.0
OTHER = -1
"""Stands for a value beside the right one."""


def fresh_key() -> Key:
    return os.urandom(32)


class Place:
    """A node in this process, a writer on its host, and the transport under test."""

    def __init__(self, run_dir, transport_of, **config) -> None:
        self.index = MemoryIndex()
        options = {"size_bytes": 16 * MIB, "security": SECURITY, **config}
        options.setdefault("listen", ("127.0.0.1", 0))
        self.node = Node(NodeConfig(run_dir=run_dir, **options), self.index).start()
        self.word = self.node.announcement
        self.nodes = NodeDirectory(run_dir, self.index, "kv:default")
        self.writer = Writer(self.nodes, name=None, timeout_s=PATIENCE_S, checksums=False)
        self.transport: Transport = transport_of(self)

    def save(self, payload: bytes, key: Key | None = None, kind=Kind.BLOCK, meta=0):
        """(key, location) of a payload that is stored from here on."""
        key = key or fresh_key()
        (slot,) = self.writer.link().reserve_later(
            Wants([key], len(payload), kind, meta), 7, Grants()
        )()
        slot.buffer[:] = payload
        (result,) = self.writer.link().commit_later([slot])()
        assert result
        return key, self.location(key)

    def location(self, key: Key) -> Location:
        (record,) = self.index.lookup([key])
        location = unpack_record(key, record)
        assert location is not None
        return location

    def read(self, *blocks, timeout_s: float = PATIENCE_S):
        """Outcomes, and what is in the destinations."""
        wanted = [Wanted(key, location, (room(location),)) for key, location in blocks]
        outcomes = self.transport.read(self.word, wanted, time.monotonic() + timeout_s)
        return list(outcomes), [bytes(one.into[0]) for one in wanted]

    def close(self) -> None:
        self.transport.close()
        self.writer.close()
        self.nodes.close()
        self.node.stop()


def room(location: Location) -> memoryview:
    return memoryview(bytearray(location.length))


def far() -> float:
    """A deadline that no test reaches."""
    return time.monotonic() + PATIENCE_S


def reads(outcomes: Sequence[Outcome]) -> list[Read]:
    return [outcome.read for outcome in outcomes]


class TransportContract:
    @pytest.fixture
    def place(self) -> Iterator[Place]:
        raise NotImplementedError

    @each("size", [1, 100, 64 << 10, (64 << 10) + 1, MIB, 3 * MIB + 5])
    def test_a_block_arrives_as_it_was_saved(self, place: Place, size: int) -> None:
        payload = os.urandom(size)
        outcomes, (got,) = place.read(place.save(payload))
        assert reads(outcomes) == [Read.HIT]
        assert got == payload

    def test_a_payload_is_spread_over_pieces(self, place: Place) -> None:
        payload = os.urandom(2 * MIB)
        key, location = place.save(payload)
        whole = bytearray(len(payload))
        cuts = [0, 1, 1, 4096, 70_000, MIB + 3, len(payload)]
        pieces = [memoryview(whole)[a:b] for a, b in itertools.pairwise(cuts)]
        outcomes = place.transport.read(place.word, [Wanted(key, location, pieces)], far())
        assert reads(outcomes) == [Read.HIT]
        assert whole == payload

    def test_outcomes_are_in_order_whatever_is_missing(self, place: Place) -> None:
        saved = [place.save(os.urandom(1 + i % 2 * 99_999)) for i in range(6)]
        gone = place.save(b"gone")
        place.writer.drop([gone[0]])
        batch = [gone, saved[0], saved[1], gone, gone, *saved[2:], gone]
        outcomes, _ = place.read(*batch)
        expected = [Read.MISS if block is gone else Read.HIT for block in batch]
        assert reads(outcomes) == expected

    def test_a_block_that_is_wanted_twice_in_a_batch_arrives_twice(self, place: Place) -> None:
        payloads = [os.urandom(size) for size in (100_000, 1, 100_000)]
        one, small, other = [place.save(payload) for payload in payloads]
        absent = fresh_key(), one[1]
        outcomes, got = place.read(one, other, small, absent, one, small, other, one)
        assert reads(outcomes) == [Read.HIT] * 3 + [Read.MISS] + [Read.HIT] * 4
        first, second, third = payloads
        del got[3]  # of the absent one
        assert got == [first, third, second, first, second, third, first]

    def test_kind_and_meta_length_come_along(self, place: Place) -> None:
        for size in (100, 100_000):
            block = place.save(os.urandom(size), kind=Kind.NUMPY, meta=17)
            ((outcome,), _) = place.read(block)
            assert (outcome.kind, outcome.meta_length) == (Kind.NUMPY, 17)

    @each("size", [100, 100_000])
    @each(
        "change",
        [
            {"epoch": 5},
            {"segment": 1},
            {"slot": 0xFFFFFFFF},
            {"slot": 3},
            {"generation": 77},
            {"length": OTHER},
            {"granule": 200},
            {"granule": OTHER},
        ],
        ids=str,
    )
    def test_a_location_that_is_not_the_blocks_is_a_miss(
        self, place: Place, change: dict[str, int], size: int
    ) -> None:
        key, location = place.save(os.urandom(size))
        wrong = {
            field: getattr(location, field) ^ 1 if value == OTHER else value
            for field, value in change.items()
        }
        outcomes, _ = place.read((key, location._replace(**wrong)))
        assert reads(outcomes) == [Read.MISS]

    def test_another_blocks_location_is_a_miss(self, place: Place) -> None:
        one, other = (place.save(os.urandom(100)) for _ in range(2))
        outcomes, _ = place.read((one[0], other[1]), (other[0], one[1]))
        assert reads(outcomes) == [Read.MISS, Read.MISS]

    def test_a_reused_slot_is_a_miss(self, place: Place) -> None:
        old = place.save(b"1" * 100_000)
        place.writer.drop([old[0]])
        fresh = place.save(b"2" * 100_000)
        assert fresh[1].slot == old[1].slot
        outcomes, (_, got) = place.read(old, fresh)
        assert reads(outcomes) == [Read.MISS, Read.HIT]
        assert got == b"2" * 100_000

    def test_nothing_wanted_is_nothing_read(self, place: Place) -> None:
        assert place.read() == ([], [])

    def test_pieces_that_do_not_fit_are_the_callers_fault(self, place: Place) -> None:
        key, location = place.save(b"1" * 100)
        for into in (
            (memoryview(bytearray(99)),),
            (memoryview(bytearray(101)),),
            (memoryview(bytes(100)),),
            (),
        ):
            with pytest.raises(UsageError, match=r"^into="):
                place.transport.read(place.word, [Wanted(key, location, into)], far())
        one = Wanted(key, location, (room(location),))
        with pytest.raises(UsageError, match=r"^wanted="):
            place.transport.read(place.word, [one] * (STREAM_BLOCKS_MAX + 1), far())

    def test_a_deadline_that_is_over_fails_what_is_not_there(self, place: Place) -> None:
        block = place.save(b"1" * 100_000)
        outcomes, _ = place.read(block, timeout_s=-1.0)
        assert reads(outcomes) == [Read.FAILED]
        assert reads(place.read(block)[0]) == [Read.HIT]

    def test_what_came_too_late_writes_nothing_afterwards(self, place: Place) -> None:
        """Whenever in the read its time is over."""
        blocks = [place.save(bytes([7]) * 2 * MIB) for _ in range(3)]
        wanted = [Wanted(key, location, (room(location),)) for key, location in blocks]
        began = time.monotonic()
        assert reads(place.transport.read(place.word, wanted, far())) == [Read.HIT] * 3
        took_s = time.monotonic() - began
        for share in (0.05, 0.2, 0.4, 0.6, 0.8):
            for one in wanted:
                one.into[0][:] = bytes(one.location.length)
            place.transport.read(place.word, wanted, time.monotonic() + took_s * share)
            before = [bytes(one.into[0]) for one in wanted]
            again, _ = place.read(*blocks)
            assert reads(again) == [Read.HIT] * 3
            assert [bytes(one.into[0]) for one in wanted] == before

    def test_a_read_ends_when_another_thread_closes(self, place: Place) -> None:
        blocks = [place.save(bytes([7]) * 2 * MIB) for _ in range(3)]
        began, ended = threading.Event(), threading.Event()
        seen: list[Read] = []

        def read() -> None:
            while Read.FAILED not in seen:
                outcomes, got = place.read(*blocks)
                began.set()
                seen.extend(reads(outcomes))
                for outcome, payload in zip(outcomes, got, strict=True):
                    assert outcome.read is not Read.HIT or payload == bytes([7]) * 2 * MIB
            ended.set()

        threading.Thread(target=read, daemon=True).start()
        assert began.wait(PATIENCE_S)
        place.transport.close()
        place.nodes.close()
        assert ended.wait(PATIENCE_S)

    def test_a_node_that_has_ended_is_no_exception(self, place: Place) -> None:
        block = place.save(b"1" * 100_000)
        assert reads(place.read(block)[0]) == [Read.HIT]
        place.node.stop()
        place.nodes.close()
        outcomes, _ = place.read(block)
        assert reads(outcomes)[0] is not Read.HIT

    def test_after_close_everything_fails(self, place: Place) -> None:
        block = place.save(b"1" * 100)
        place.transport.close()
        place.transport.close()
        place.nodes.close()
        outcomes, _ = place.read(block)
        assert reads(outcomes) == [Read.FAILED]

    def test_many_threads_read_at_once(self, place: Place) -> None:
        payloads = {i: os.urandom(300_000 + i) for i in range(8)}
        blocks = {i: place.save(payload) for i, payload in payloads.items()}
        wrong: list[int] = []

        def read(i: int) -> None:
            for _ in range(5):
                outcomes, (got,) = place.read(blocks[i])
                if reads(outcomes) != [Read.HIT] or got != payloads[i]:
                    wrong.append(i)

        at_once([partial(read, i) for i in payloads])
        assert wrong == []

    def test_a_block_that_changes_under_the_reader_is_never_a_wrong_hit(self, place: Place) -> None:
        """One slot, rewritten all the time: each payload is one byte over and over."""
        stop = threading.Event()
        latest: list[tuple[Key, Location, int]] = []

        def rewrite() -> None:
            fill = 0
            while not stop.is_set():
                fill = (fill + 1) % 256
                key, location = place.save(bytes([fill]) * 3 * MIB)
                latest[:] = [(key, location, fill)]
                place.writer.drop([key])

        writer = threading.Thread(target=rewrite)
        writer.start()
        try:
            hits = 0
            for _ in range(60):
                if not latest:
                    continue
                key, location, fill = latest[0]
                (outcome,), (got,) = place.read((key, location))
                if outcome.read is Read.HIT:
                    hits += 1
                    assert got == bytes([fill]) * 3 * MIB
        finally:
            stop.set()
            writer.join(PATIENCE_S)
