"""What a reader believes, and in which batches it asks the index."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reader_parts import AWAY, HERE, KEY, SIGNER, Counting, ReaderOf, save
from stores import announcement

from kvstore.client.block_lookup import BlockLookup, found_here
from kvstore.client.nodes.directory import NodeDirectory
from kvstore.index.base import KeyRecord
from kvstore.index.memory import MemoryIndex
from kvstore.limits import BATCH_KEYS_MAX
from kvstore.nodedir import NodeDir
from kvstore.record import pack_record
from kvstore.segment.shm import OwnedShm
from kvstore.system.filelock import try_lock
from kvstore.types import Key


def many() -> tuple[list[Key], MemoryIndex]:
    """More keys than one batch, and an index that has all of them on another host."""
    keys = [i.to_bytes(32, "little") for i in range(2 * BATCH_KEYS_MAX + 3)]
    index = Counting()
    for start in range(0, len(keys), BATCH_KEYS_MAX):
        batch = keys[start : start + BATCH_KEYS_MAX]
        index.publish([KeyRecord(key, pack_record(key, AWAY)) for key in batch])
    return keys, index


def test_each_key_of_a_long_search_is_looked_up_once(reader_of: ReaderOf) -> None:
    keys, index = many()
    found = reader_of(index).search(keys)
    assert None not in found
    assert isinstance(index, Counting)
    assert [key for batch in index.asked for key in batch] == keys


@pytest.mark.parametrize("hole", [0, BATCH_KEYS_MAX - 1, BATCH_KEYS_MAX, 2 * BATCH_KEYS_MAX])
def test_a_run_ends_at_its_first_hole_wherever_that_is(reader_of: ReaderOf, hole: int) -> None:
    keys, index = many()
    index.remove([KeyRecord(keys[hole], pack_record(keys[hole], AWAY))])
    lookup = BlockLookup(index, reader_of(index), None, 1.0)
    assert len(lookup.match(keys, None)) == hole


def test_a_remembered_place_ends_with_its_node(
    owned: OwnedShm, nodes: Any, reader_of: ReaderOf
) -> None:
    save(owned)
    (place,) = reader_of(MemoryIndex()).search([KEY])
    assert place is not None
    assert place.valid()
    nodes.attached.gone = True
    assert not place.valid()


def test_a_record_that_is_not_signed_as_it_must_be_names_no_place(
    owned: OwnedShm, reader_of: ReaderOf
) -> None:
    save(owned)
    reader = reader_of(MemoryIndex(), signer=SIGNER)
    here, away = pack_record(KEY, HERE), pack_record(KEY, AWAY)
    assert reader.place(KEY, SIGNER.signed(KEY, here)) is not None
    assert reader.remote_location(KEY, SIGNER.signed(KEY, away)) == AWAY
    for wrong in (
        lambda record: record,
        lambda record: SIGNER.signed(KEY[::-1][:31] + b"x", record),
    ):
        assert reader.place(KEY, wrong(here)) is None
        assert reader.remote_location(KEY, wrong(away)) is None


@pytest.mark.parametrize(("granule", "found"), [(0, True), (4, False), (255, False)])
def test_a_header_that_leads_out_of_its_segment_is_not_found_here(
    owned: OwnedShm, nodes: Any, granule: int, found: bool
) -> None:
    save(owned, granule)
    (one,) = found_here(nodes, None, [KEY], float("inf"))
    assert (one is not None) is found


# --- nodes of this host -----------------------------------------------------


@pytest.fixture
def living(tmp_path: Path, owned: OwnedShm) -> Iterator[NodeDir]:
    """The directory of a node that lives, and has announced start 1."""
    directory = NodeDir(tmp_path, "n")
    directory.path.mkdir(parents=True)
    lock = try_lock(directory.lock)
    assert lock is not None
    word = announcement(
        node_id=7,
        epoch=1,
        data_path=str(owned.data_path),
        head_path=str(owned.head_path),
        control_path=str(directory.socket),
    )
    directory.announcement_path.write_bytes(word.pack())
    yield directory
    lock.release()


def test_a_segment_of_another_start_than_its_node_announces_is_not_mapped(
    tmp_path: Path, living: NodeDir
) -> None:
    def mapped(node_id: int, epoch: int) -> bool:
        word = living.announcement()
        assert word is not None
        living.announce(dataclasses.replace(word, node_id=node_id, epoch=epoch))
        nodes = NodeDirectory(tmp_path, MemoryIndex(), "kv:t")
        return nodes.segment(node_id, epoch, 0.0) is not None

    assert mapped(7, 1)
    assert not mapped(7, 2)
    assert not mapped(8, 1)


def test_only_a_node_that_the_index_knows_is_written_to(tmp_path: Path, living: NodeDir) -> None:
    index = MemoryIndex()
    nodes = NodeDirectory(tmp_path, index, "kv:t")
    assert nodes.writables() == []
    index.announce(7, b"{}", 60.0)
    assert [directory.name for _, directory in nodes.writables()] == ["n"]
    assert NodeDirectory(tmp_path, index, "kv:another").writables() == []
