"""What a node reads from its disks for other hosts: how much of it one of them may have, and what
is asked for otherwise."""

import time

import pytest
from disk_nodes import KEYS, SIZE_BYTES, DiskNode, config, payload_of

from kvstore.errors import DeadlineError
from kvstore.node.stream import disk_reads as module
from kvstore.node.stream.disk_reads import DiskReads
from kvstore.protocol.stream import Asked
from kvstore.record import disk_location
from kvstore.transport.base import Read


def far():
    return time.monotonic() + 20


@pytest.fixture
def node(tmp_path):
    with DiskNode(config(tmp_path)) as node:
        node.fill(KEYS[:40])
        yield node


@pytest.fixture
def reads(node, monkeypatch):
    monkeypatch.setattr(module, "DISK_STAGING_BYTES", 3 * SIZE_BYTES * module.CLIENTS_SHARE)
    reads = DiskReads(node.node.announcement)
    yield reads
    reads.close()


def on_disk(node, count):
    core = node.node.core
    blocks = [block for block in map(node.on_disk, KEYS) if block is not None][:count]
    assert len(blocks) == count
    return [Asked(block.key, disk_location(core.node_id, core.epoch, block)) for block in blocks]


def test_blocks_are_read_for_one_host_as_far_as_its_share_goes(node, reads):
    asked = on_disk(node, 4)
    with reads.read("a", asked[:3], far()) as (payloads, outcomes):
        assert [one.read for one in outcomes] == [Read.HIT] * 3
        assert [bytes(payload) for payload in payloads] == [payload_of(k) for k, _ in asked[:3]]
        with (
            pytest.raises(DeadlineError, match="of a take all of its share"),
            reads.read("a", asked[3:], time.monotonic() + 0.1),
        ):
            pass
        with reads.read("b", asked, far()) as (_, outcomes):
            assert [one.read for one in outcomes] == [Read.HIT] * 4, "more than its share, alone"
    with reads.read("a", asked[3:], far()) as (_, outcomes):
        assert [one.read for one in outcomes] == [Read.HIT]


@pytest.mark.parametrize("field", ["epoch", "segment", "slot", "generation", "length", "checksum"])
def test_only_what_is_where_its_location_says_is_there(node, reads, field):
    ((key, at),) = on_disk(node, 1)
    assert reads.find(key, at).key == key
    wrong = at._replace(**{field: getattr(at, field) + 1})
    assert reads.find(key, wrong) is None
    with reads.read("a", [Asked(key, wrong)], far()) as (_, outcomes):
        assert outcomes[0].read is Read.MISS
    assert reads.find(KEYS[399], at) is None
