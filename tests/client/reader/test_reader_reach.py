"""Which records a reader takes for those of blocks that it can read."""

from __future__ import annotations

from typing import Any

import pytest
from reader_parts import (
    AWAY,
    HERE,
    KEY,
    SIGNER,
    Nodes,
    ReaderOf,
    Remote,
    found_by,
    key_of,
    save,
)

from kvstore.client import reader as reader_module
from kvstore.client.nodes.fetch import RemoteBlock
from kvstore.index.memory import MemoryIndex
from kvstore.limits import VALUE_BYTES_MAX
from kvstore.record import pack_record
from kvstore.segment.shm import OwnedShm
from kvstore.types import Location

KEYS = [key_of(number) for number in range(5)]
ELSEWHERE = AWAY._replace(node_id=9)
"""On a host that cannot be reached."""


@pytest.mark.parametrize("size_bytes", [4 << 20, 2 * VALUE_BYTES_MAX])
def test_a_record_of_more_than_its_node_or_any_block_has_leads_nowhere(
    reader_of: ReaderOf, size_bytes: int
) -> None:
    reader = reader_of(MemoryIndex(), Remote(size_bytes=size_bytes))
    most = AWAY._replace(length=min(size_bytes, VALUE_BYTES_MAX))
    assert reader.resolve(KEY, pack_record(KEY, most)) == RemoteBlock(KEY, most)
    more = most._replace(length=most.length + 1)
    assert reader.resolve(KEY, pack_record(KEY, more)) is None


@pytest.mark.parametrize("signer", [None, SIGNER])
def test_the_location_on_another_host_is_that_of_a_whole_record_of_a_node_in_reach(
    nodes: Nodes, reader_of: ReaderOf, signer: Any
) -> None:
    remote = Remote()
    reader = reader_of(MemoryIndex(), remote, signer=signer)

    def located(location: Location, key: bytes = KEY) -> Location | None:
        record = pack_record(KEY, location)
        if signer is not None:
            record = signer.signed(key, record)
        return reader.remote_location(key, record)

    assert located(AWAY) == AWAY
    assert located(AWAY, key_of(1)) is None
    assert located(HERE) is None
    assert located(ELSEWHERE) is None
    remote.reached = False
    assert located(AWAY) is None
    assert reader.miss_reasons == {}


def test_what_is_in_a_mapped_segment_is_no_block_of_another_host(
    nodes: Nodes, reader_of: ReaderOf
) -> None:
    """Its header has the last word, whatever is announced of its node."""

    class Both(Remote):
        def node(self, node_id: int, epoch: int, now: float) -> Any:
            return self.word

    reader = reader_of(MemoryIndex(), Both())
    assert reader.remote_location(KEY, pack_record(KEY, HERE)) is None
    assert reader.resolve(KEY, pack_record(KEY, HERE)) is None
    assert reader.remote_location(KEY, pack_record(KEY, AWAY)) == AWAY


def test_blocks_of_other_hosts_are_read_in_one_batch_and_the_others_left_as_they_are(
    owned: OwnedShm, reader_of: ReaderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(owned)
    asked: list[Any] = []

    def fetched(
        remote: object, blocks: dict[int, RemoteBlock], into: Any, deadline: Any, rooms: Any
    ) -> Any:
        asked.append((sorted(blocks), into, deadline, rooms))
        return {3: "the block"}

    monkeypatch.setattr(reader_module, "fetch", fetched)
    reader = reader_of(MemoryIndex())
    place, away = found_by(reader), RemoteBlock(KEY, AWAY)
    into = [None] * 4
    assert reader.read([place, away, None, away], into, 5.0) == [place, None, None, "the block"]
    assert asked == [([1, 3], into, 5.0, None)]
    assert reader.read([place, None]) == [place, None]
    assert len(asked) == 1
