"""A node whose disks are encrypted: what it writes, reads back and refuses."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from disk_nodes import KEYS, NAMESPACE, SIZE_BYTES, DiskNode, config, payload_of
from redis_servers import wait_until

from kvstore.core.answers import Grant
from kvstore.core.events import Commit, Reserve

if TYPE_CHECKING:
    import pytest

OLD = {b"formerly": bytes(range(32))}
NEW = {b"the one ": bytes(32), **OLD}
COUNT = 60


def found(node: DiskNode) -> set[bytes]:
    """The keys that a disk has, each with the right bytes."""
    there = {key: node.read(key) for key in KEYS}
    right = {key for key, raw in there.items() if raw is not None}
    assert all(there[key] == payload_of(key) for key in right)
    return right


def test_what_is_encrypted_goes_round_and_is_there_again_with_a_new_key_in_front(
    tmp_path: Path,
) -> None:
    with DiskNode(config(tmp_path, disk_keys=OLD)) as node:
        node.fill(KEYS)  # more than the disk has room for: regions are begun again
        assert node.stats()["disk_regions_evicted"] > 0
        before = found(node)
        assert len(before) > COUNT
    with DiskNode(config(tmp_path, disk_keys=NEW)) as node:
        again = found(node)
        assert again >= before
        key = next(key for key in again if key not in node.node.core.blocks.by_key)
        node.touch(key)
        node.touch(key)
        wait_until(lambda: key in node.node.core.blocks.by_key, "it is read back", 10)
    raw = (tmp_path / "disk0" / "kvstore.disk").read_bytes()
    assert not any(payload_of(key)[:16] in raw for key in KEYS)


def test_a_node_whose_key_was_taken_away_says_what_it_drops(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with DiskNode(config(tmp_path, disk_keys=OLD)) as node:
        node.fill(KEYS[:COUNT])
        assert found(node)
    other = {b"another!": bytes(32)}
    with caplog.at_level(logging.WARNING), DiskNode(config(tmp_path, disk_keys=other)) as node:
        assert found(node) == set()
        node.fill(KEYS[:COUNT])
        assert found(node)
    said = f"they are of key {next(iter(OLD)).hex()}, which is missing"
    assert said in caplog.text


def test_what_changed_in_memory_since_it_was_saved_is_not_encrypted_but_dropped(
    tmp_path: Path,
) -> None:
    """Readers compare a tag, which would be right."""
    with DiskNode(config(tmp_path, disk_keys=OLD, disk_write="through")) as node:
        (key, *others) = KEYS[:3]
        (grant,) = node.ask(Reserve(0, 0, [key], [SIZE_BYTES], NAMESPACE.id, [0], [0], [None], [0]))
        assert isinstance(grant, Grant)
        node.ask(Commit(0, 0, [(grant.slot_id, grant.generation, 12345)]))
        wait_until(lambda: key not in node.node.core.blocks.by_key, "it is dropped", 10)
        node.save(*others)
        wait_until(lambda: found(node) == set(others), "others are written", 10)
        assert node.on_disk(key) is None
