"""Nodes' events are vLLM's, to the byte; what no node sends is refused."""

import contextlib
import os

import pytest
from each_input import each
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import PeerError, UsageError
from kvstore.protocol.block_events import (
    BlockChanges,
    Source,
    endpoints_of,
    pack_changes,
    pack_snapshot,
    sequence_bytes,
    sequence_of,
    source_of,
    topic_of,
    unpack_changes,
)

keys = st.lists(st.binary(min_size=32, max_size=32), max_size=5)


def key(i):
    return i.to_bytes(32, "big")


@given(st.booleans(), keys, keys)
def test_what_was_packed_comes_back_in_order(cleared, removed, stored):
    raw = pack_changes(1.5, BlockChanges(cleared, removed, stored), "CPU")
    parts = unpack_changes(raw)
    assert any(change.cleared for change in parts) == cleared
    assert [k for change in parts for k in change.removed] == removed
    assert [k for change in parts for k in change.stored] == stored
    order = [(not change.cleared, bool(change.stored)) for change in parts]
    assert order == sorted(order)


def test_a_snapshot_begins_anew_and_has_every_key_in_messages_of_bounded_size():
    wanted = [key(i) for i in range(10_000)]
    messages = [unpack_changes(raw) for raw in pack_snapshot(1.0, wanted, "CPU")]
    assert [change.cleared for change in messages[0]] == [True, False]
    assert not any(change.cleared for parts in messages[1:] for change in parts)
    assert [k for parts in messages for change in parts for k in change.stored] == wanted
    assert [unpack_changes(raw)[0] for raw in pack_snapshot(1.0, [], "CPU")] == [
        BlockChanges(True, [], [])
    ]


@pytest.mark.vllm
@pytest.mark.timeout(600)  # vLLM's import, on a busy machine
def test_the_bytes_are_those_of_vllms_own_encoder_and_its_decoder_reads_them():
    pytest.importorskip("vllm", exc_type=ImportError)
    import msgspec
    from vllm.distributed import kv_events as theirs

    stored, removed = [key(1), key(2)], [key(3)]
    ours = pack_changes(12.25, BlockChanges(True, removed, stored), theirs.MEDIUM_CPU)
    batch = theirs.KVEventBatch(
        ts=12.25,
        events=[
            theirs.AllBlocksCleared(),
            theirs.BlockRemoved(block_hashes=removed, medium="CPU"),
            theirs.BlockStored(
                block_hashes=stored,
                parent_block_hash=None,
                token_ids=[],
                block_size=0,
                lora_id=None,
                medium="CPU",
                lora_name=None,
            ),
        ],
    )
    assert ours == msgspec.msgpack.encode(batch)
    assert msgspec.msgpack.Decoder(type=theirs.KVEventBatch).decode(ours) == batch
    alive = pack_changes(1.0, BlockChanges(False, [], []), "CPU")
    assert alive == msgspec.msgpack.encode(theirs.KVEventBatch(ts=1.0, events=[]))


def test_a_topic_says_which_start_of_which_node_speaks():
    source = Source("host-1.example", "node-2", 17)
    assert source_of(topic_of(source)) == source


@each(
    "topic",
    [b"", b"kv@h@n@1", b"kvstore@h@n", b"kvstore@h@n@x", b"kvstore@\xff@n@1", b"kvstore@" * 999],
)
def test_a_topic_of_something_else_is_refused(topic):
    with pytest.raises(PeerError, match="topic"):
        source_of(topic)


def test_a_sequence_number_has_eight_bytes():
    assert sequence_of(sequence_bytes(7)) == 7
    with pytest.raises(PeerError, match="7 bytes"):
        sequence_of(b"1234567")


@given(st.binary(max_size=200))
def test_bytes_of_anybody_are_events_or_one_of_our_errors(raw):
    with contextlib.suppress(PeerError):
        assert isinstance(unpack_changes(raw), list)


@each(
    "raw",
    [
        b"\x92\x01\x91\x81\xa4type\xa1x",
        b"\x92\x01\x91\x82\xa4type\xacBlockRemoved\xacblock_hashes\x91\xa3abc",
        b"\x92\x01\x91\x82\xa4type\xacBlockRemoved\xacblock_hashes\x05",
        b"\x91" * 5000,
        os.urandom(1 << 21),
    ],
)
def test_events_of_another_kind_are_refused(raw):
    with pytest.raises(PeerError, match="none of a node's events"):
        unpack_changes(raw)


def test_a_port_is_of_this_host_alone_and_replays_come_from_the_next():
    assert endpoints_of("5557") == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
    assert endpoints_of("tcp://*:5557") == ("tcp://*:5557", "tcp://*:5558")
    assert endpoints_of("tcp://[::1]:80") == ("tcp://[::1]:80", "tcp://[::1]:81")
    assert endpoints_of("ipc:///run/x") == ("ipc:///run/x", "ipc:///run/x.replay")


@each("setting", ["x", "host:5557", "tcp://host", "tcp://:5", "0", "65535", "70000", "ipc://", "²"])
def test_what_is_no_endpoint_is_refused_by_name(setting):
    with pytest.raises(UsageError, match="events="):
        endpoints_of(setting)


def test_an_event_whose_type_is_lists_in_lists_is_refused():
    """As deep as msgpack takes it, which is deeper than `repr` does."""
    event = b"\x82\xactype".replace(b"\xac", b"\xa4") + b"\x91" * 1000 + b"\x00"
    event += b"\xacblock_hashes\x90"
    with pytest.raises(PeerError, match="type"):
        unpack_changes(b"\x93\x00\x91" + event + b"\xc0")
