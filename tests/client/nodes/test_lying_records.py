"""Records in the index whose length is not that of the block: misses, and nothing else."""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence

import pytest
from redis_servers import RedisServer  # noqa: TC002  # as in every other test
from stores import MIB, NodeProcess
from two_hosts import listening_node

from kvstore import Client, UsageError
from kvstore.client.nodes import fetch as fetching
from kvstore.limits import CLAIMED_BYTES_MAX
from kvstore.record import pack_record, unpack_record
from kvstore.transport.base import Outcome, Wanted
from kvstore.types import Location

COUNT = 40
HUGE = 256 * MIB


@pytest.fixture(scope="module")
def lasting(redis_server: RedisServer) -> Iterator[NodeProcess]:
    """A node as large as a lie may be."""
    with listening_node(redis_server, size=2 * HUGE) as process:
        yield process


Lie = Callable[[str, int], None]


@pytest.fixture
def lie(reader: Client, monkeypatch: pytest.MonkeyPatch) -> Lie:
    """From here on the reader's index claims that a value has another length. Not written into
    Redis: the node would soon publish its own record again."""
    lengths: dict[bytes, int] = {}
    index = reader.session.index

    def changed(key: bytes, record: bytes | None) -> bytes | None:
        location = None if record is None else unpack_record(key, record)
        if location is None or key not in lengths:
            return record
        return pack_record(key, location._replace(length=lengths[key]))

    def lying(real: Callable[..., Sequence[bytes | None]]) -> Callable[..., object]:
        return lambda keys: [changed(*pair) for pair in zip(keys, real(keys), strict=False)]

    for name in ("match", "lookup"):
        monkeypatch.setattr(index, name, lying(getattr(index, name)))
    return lambda name, length: lengths.update({reader.namespace.value_key(name): length})


@pytest.mark.parametrize("out", [None, bytearray(1000), bytearray(100)], ids=["no", "fits", "less"])
@pytest.mark.parametrize("length", [HUGE, 2000, 999, 1])
def test_a_claimed_length_that_is_not_the_blocks_is_a_miss(
    reader: Client, writer: Client, lie: Lie, length: int, out: bytearray | None
) -> None:
    assert writer.put("k", os.urandom(1000))
    lie("k", length)
    assert reader.get("k", out=out) is None
    assert reader.get_many(["k"], out=None if out is None else [out]) == [None]


def test_an_out_that_is_too_small_for_what_is_really_there_is_the_callers_fault(
    reader: Client, writer: Client
) -> None:
    assert writer.put("k", os.urandom(1000))
    with pytest.raises(UsageError, match="out"):
        reader.get("k", out=bytearray(100))


def test_lies_cost_no_memory(reader: Client, writer: Client, lie: Lie) -> None:
    names = [f"k{i}" for i in range(COUNT)]
    assert all(writer.put_many([(name, os.urandom(1000)) for name in names]))
    for name in names[1:]:
        lie(name, HUGE)
    tracemalloc.start()
    values = reader.get_many(names)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [value is None for value in values] == [False] + [True] * (COUNT - 1)
    assert most_bytes < CLAIMED_BYTES_MAX


def test_lies_about_a_node_that_says_nothing_cost_no_more_time(
    reader: Client, writer: Client, lie: Lie, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline of a read grows with what is read: not with what is claimed to be there."""
    assert writer.put("k", os.urandom(1000))
    lie("k", HUGE)
    asked: list[int] = []
    timeout_s = reader.session.remote.timeout_s
    monkeypatch.setattr(
        reader.session.remote, "timeout_s", lambda size: asked.append(size) or timeout_s(size)
    )
    assert reader.get("k") is None
    assert max(asked) <= CLAIMED_BYTES_MAX


def test_blocks_for_connectors_are_not_made_room_for_on_a_records_word(
    reader: Client, writer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = list(range(512))
    assert all(writer.put_blocks(tokens, [os.urandom(1000)] * 2))
    keys = writer.namespace.block_keys(tokens, 256)
    found = reader.session.match(keys)
    (at,) = {unpack_record(one.key, one.record) for one in found[:1]}
    assert at is not None
    false = found[0]._replace(record=pack_record(keys[0], at._replace(length=HUGE)))
    room: list[int] = []
    real = bytearray
    monkeypatch.setattr(
        fetching, "bytearray", lambda size: room.append(size) or real(size), raising=False
    )
    first, second = reader.session.views([false, found[1]], None)
    assert first is None
    assert second is not None
    assert second.valid()
    assert sum(room) < CLAIMED_BYTES_MAX


def test_large_values_that_are_really_there_are_read(reader: Client, writer: Client) -> None:
    values = {f"k{i}": os.urandom(4) * (MIB + i) for i in range(8)}
    assert sum(map(len, values.values())) > CLAIMED_BYTES_MAX
    assert all(writer.put_many(values))
    assert reader.get_many([*values, "absent"]) == [*values.values(), None]


def test_what_the_nodes_are_asked_before_is_part_of_the_same_deadline(
    reader: Client, writer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {f"k{i}": os.urandom(4) * MIB for i in range(6)}
    assert all(writer.put_many(values))
    remote = reader.session.remote
    told: list[float] = []
    there, read = remote.there, remote.read

    def slow_there(
        blocks: Sequence[tuple[bytes, Location]], deadline: float | None = None
    ) -> list[bool]:
        answer = there(blocks, deadline)
        told.append(time.monotonic())
        time.sleep(0.3)
        return answer

    def seen_read(wanted: Sequence[Wanted], deadline: float | None = None) -> list[Outcome]:
        assert deadline is not None
        told.append(deadline)
        return read(wanted, deadline)

    monkeypatch.setattr(remote, "there", slow_there)
    monkeypatch.setattr(remote, "read", seen_read)
    assert reader.get_many(list(values)) == list(values.values())
    answered_at, deadline = told
    assert deadline <= answered_at + remote.timeout_s(sum(map(len, values.values())))
