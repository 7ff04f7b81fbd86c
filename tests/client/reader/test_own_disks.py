"""What lies on the disks of a node of this host is found and read without asking anybody."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from disks import DiskNode
from redis_servers import wait_until

from kvstore import Client, MissReason
from kvstore.client.base import BlockRef
from kvstore.client.session import BlockSession
from kvstore.record import pack_record
from kvstore.transport.registry import TRANSPORTS
from kvstore.types import Key, Kind, Tier

if TYPE_CHECKING:
    from redis_servers import RedisServer

KIB = 1 << 10
NOWHERE = "redis://127.0.0.1:1"
"""No index is there."""


@pytest.fixture
def node(redis_server: RedisServer, tmp_path: Path) -> Iterator[DiskNode]:
    with DiskNode(redis_server, tmp_path, size_bytes=4 << 20) as node:
        yield node


@pytest.fixture
def session(node: DiskNode) -> Iterator[BlockSession]:
    yield from session_of(node)


def session_of(node: DiskNode, **changes: Any) -> Iterator[BlockSession]:
    made = BlockSession(**{**node.client_options, **changes})
    yield made
    made.close()


def in_memory(session: BlockSession, payload: bytes) -> Key:
    key = os.urandom(32)
    (slot,) = session.reserve([key], len(payload), 7)
    slot.buffer[:] = payload  # type: ignore[union-attr]
    assert all(session.commit([slot]))  # type: ignore[list-item]
    return key


def read(session: BlockSession, found: list[BlockRef]) -> list[bytes | None]:
    """The payloads of what was found, of which those that travel come into a staging."""
    staging = memoryview(bytearray(4 << 20))
    views = session.views(found, staging)
    return [None if view is None else bytes(view.buffer) for view in views]


def on_disks(node: DiskNode, count: int, size_bytes: int = 20 * KIB) -> dict[Key, bytes]:
    """Payloads that the node has on its disks in turn, by key. None fills its last page."""
    payloads = [os.urandom(size_bytes + 1 + i) for i in range(count)]
    disks = node.disks
    return {disks[i % len(disks)].save(raw).key: raw for i, raw in enumerate(payloads)}


def test_a_run_goes_on_from_memory_to_disks_and_says_which_is_where(
    node: DiskNode, session: BlockSession
) -> None:
    near, payloads = in_memory(session, b"m" * 9000), on_disks(node, 5)
    keys = [near, *payloads, os.urandom(32), *on_disks(node, 1)]
    run = session.match(keys)
    assert (len(run), run.short) == (6, MissReason.ABSENT)
    assert session.tiers(run) == [Tier.HOST, *[Tier.DISK] * 5]
    assert read(session, run) == [b"m" * 9000, *payloads.values()]
    found = session.lookup(keys)
    assert [one is not None for one in found] == [True] * 6 + [False, True]


def test_memory_is_nearer_than_a_disk(node: DiskNode, session: BlockSession) -> None:
    key = in_memory(session, b"m" * 9000)
    node.disks[0].save(b"m" * 9000, key)
    (found,) = session.match([key])
    assert session.tiers([found]) == [Tier.HOST]
    assert read(session, [found]) == [b"m" * 9000]


@pytest.mark.parametrize("options", [{"url": NOWHERE}, {"verify": "always"}], ids=str)
def test_disks_are_read_without_an_index_and_by_who_verifies_all(
    node: DiskNode, options: dict[str, Any]
) -> None:
    payloads = on_disks(node, 3)
    for session in session_of(node, **options):
        found = session.match([*payloads])
        assert session.tiers(found) == [Tier.DISK] * 3
        assert read(session, found) == [*payloads.values()]


def test_without_the_transport_nothing_is_found_on_disks(node: DiskNode) -> None:
    payloads = on_disks(node, 1)
    others = [name for name in TRANSPORTS if name != "disk"]
    for session in session_of(node, transports=others):
        assert session.match([*payloads]).short is MissReason.ABSENT
        (key,) = payloads
        ref = BlockRef(key, pack_record(key, node.location(key)))
        assert read(session, [ref]) == [None]
        assert session.reader.miss_reasons == {"unreadable-disk": 1}


def test_values_on_disks_are_values_again(node: DiskNode) -> None:
    with Client(**node.client_options) as client:
        (raw_key,) = client.namespace.value_keys(("k",))
        assert client.get("k") is None
        node.disks[1].save(b"v" * 50_001, raw_key, Kind.BYTES)
        assert client.exists("k")
        out = bytearray(60_000)
        assert client.get("k") == b"v" * 50_001
        client.get("k", out=out)
        assert out[:50_001] == b"v" * 50_001
        counts = client.stats()["transports"]
        assert (counts["disk_hits"], counts["disk_bytes"]) == (2, 100_002)
        assert counts["shm_hits"] == 0
        assert client.session.read_bytes()["disk"] == 100_002


def test_a_block_that_left_between_find_and_read_is_a_miss(
    node: DiskNode, session: BlockSession
) -> None:
    """Its region was begun anew: other bytes, of the same length, may be where it was."""
    (old, kept), disk = list(on_disks(node, 2)), node.disks[0]
    found = session.match([old, kept])
    where = node.location(old).slot
    disk.drop(old)
    other = os.urandom(20 * KIB + 1)
    there = disk.save(other)
    assert there.place.page == where
    first, second = read(session, found)
    assert first is None
    assert second is not None
    assert read(session, session.match([there.key])) == [other]


def test_a_damaged_block_is_a_miss_and_its_node_is_told(
    node: DiskNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, Key]] = []
    monkeypatch.setattr(
        "kvstore.client.nodes.corruption_reporter.CorruptionReporter.report",
        lambda self, directory, word, key: told.append((word.name, key)),
    )
    (key, raw), (good, right) = on_disks(node, 2).items()
    node.disks[0].write(node.location(key).slot, bytes([raw[0] ^ 1]) + raw[1:])
    for session in session_of(node):
        assert read(session, session.match([key, good])) == [None, right]
        assert session.remote.counts["disk_checksum"] == 1
    assert told == [(node.name, key)]


def test_dropping_what_lies_on_a_disk_asks_no_other_host(node: DiskNode) -> None:
    payloads = on_disks(node, 2)
    for session in session_of(node):
        assert session.reader.search([*payloads]).remote == {}
        assert session.drop([*payloads]) == [False, False], "this node does not know its disks"


def test_the_disks_of_a_node_that_has_ended_are_not_read(
    node: DiskNode, session: BlockSession
) -> None:
    payloads = on_disks(node, 1)
    found = session.match([*payloads])
    node.stop()
    session.nodes.check(session.machine.monotonic() + 60)
    assert read(session, found) == [None]


def test_a_node_whose_table_is_not_there_is_read_in_memory_alone(
    node: DiskNode, caplog: pytest.LogCaptureFixture
) -> None:
    payloads = on_disks(node, 1)
    node.table.path.unlink()
    for session in session_of(node):
        near = in_memory(session, b"m")
        assert len(session.match([near, *payloads])) == 1
    assert caplog.text.count("has on disk cannot be read") == 1


def found_on(session: BlockSession, payloads: dict[Key, bytes]) -> list[bool]:
    return [one is not None for one in session.lookup(list(payloads))]


def test_blocks_of_a_disk_that_this_process_does_not_see_are_not_found(
    node: DiskNode, session: BlockSession, caplog: pytest.LogCaptureFixture
) -> None:
    """A container that has the host's /dev/shm, and not the volume of the disk."""
    payloads = on_disks(node, 4)
    node.disks[0].path.rename(node.disks[0].path.with_suffix(".elsewhere"))
    assert found_on(session, payloads) == [False, True, False, True]
    assert str(node.disks[0].path) in caplog.text


def test_blocks_of_a_disk_that_its_node_closes_are_not_found_any_more(
    node: DiskNode, session: BlockSession
) -> None:
    payloads = on_disks(node, 4)
    assert found_on(session, payloads) == [True] * 4
    node.table.device_closed(1)
    assert found_on(session, payloads) == [True, False, True, False]


def test_blocks_of_a_disk_that_could_not_be_read_are_not_found_until_it_is_tried_again(
    node: DiskNode, session: BlockSession
) -> None:
    payloads = on_disks(node, 4)
    good = node.disks[0].path.read_bytes()[:8192]
    node.disks[0].write(0, bytes(8192))
    run = session.match(list(payloads))
    assert [one is None for one in read(session, list(run))] == [True, False, True, False]
    assert found_on(session, payloads) == [False, True, False, True]
    node.disks[0].write(0, good)
    wait_until(lambda: found_on(session, payloads) == [True] * 4, "it is tried again", 10)
    assert read(session, list(session.match(list(payloads)))) == list(payloads.values())
