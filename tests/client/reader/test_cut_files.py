"""Somebody of this user cuts the file of a segment: whoever notices in time is no bug of ours.

A process that touches what is gone ends by SIGBUS (docs/decisions/0103). What is mapped in one go,
before a large block is read or written, fails instead: it is a miss, or a rejected value.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from redis_servers import RedisServer, wait_until
from stores import MIB, NodeProcess, node_stats

from kvstore import Client, PutStatus
from kvstore.segment import attached

LARGE = b"x" * MIB


@pytest.fixture
def node(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeProcess]:
    """Nothing is mapped ahead by a thread: a block's pages are, when it is used."""
    monkeypatch.setattr(attached.AttachedShm, "populate_ahead", lambda _: None)
    with NodeProcess(redis_server, size=8 * MIB) as node:
        yield node


def cut(node: NodeProcess, size_bytes: int) -> None:
    data, _ = node.segment_files()
    os.truncate(data, size_bytes)


def test_a_value_whose_slot_is_gone_is_rejected_and_its_slot_given_back(node: NodeProcess) -> None:
    with Client(**node.client_options) as other:
        with Client(**node.client_options) as client:
            assert client.put("opens the link", b"small")
            assert node_stats(other)["reserved"] == 0
            cut(node, 0)
            for _ in range(20):
                result = client.put("k", LARGE)
                assert result.status is PutStatus.REJECTED
                assert "cut" in result.reason
            assert node_stats(other)["reserved"] <= 1, "until the client connects again"
        wait_until(lambda: node_stats(other)["reserved"] == 0, "the slot is given back")


def test_a_block_whose_bytes_are_gone_is_a_miss(node: NodeProcess) -> None:
    with Client(**node.client_options) as writer, Client(**node.client_options) as reader:
        assert writer.put("k", LARGE)
        assert reader.get("absent") is None
        assert not reader.pin("absent")
        cut(node, 0)
        assert reader.get("k") is None
        assert reader.get_many(["k", "absent"]) == [None, None]
        assert not reader.pin("k")


def test_what_lies_before_the_cut_is_there_as_before(node: NodeProcess) -> None:
    with Client(**node.client_options) as writer, Client(**node.client_options) as reader:
        assert all(writer.put(f"{i}", LARGE) for i in range(4))
        assert reader.get("absent") is None
        cut(node, 2 * MIB)
        assert sum(reader.get(f"{i}") == LARGE for i in range(4)) == 2
