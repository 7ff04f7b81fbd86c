"""Reading from the nodes of other hosts: values, and blocks as connectors read them."""

import os
import signal
import time

import pytest
from redis_servers import wait_until
from stores import MIB, NodeProcess
from two_hosts import LISTEN, client_of, listening_node

from kvstore import Limits, MissReason, PutStatus, UsageError
from kvstore.record import pack_record, unpack_record
from kvstore.spi import Tier
from kvstore.transport.stream.security import StreamSecurity


@pytest.fixture
def mortal(redis_server):
    """One that may be killed."""
    with listening_node(redis_server) as process:
        yield process


@pytest.mark.parametrize("size", [0, 1, 100, 64 << 10, (64 << 10) + 1, MIB, 3 * MIB + 7, 4 * MIB])
def test_a_value_saved_on_one_host_is_read_on_another(writer, reader, size):
    value = os.urandom(size)
    assert writer.put("k", value).status is PutStatus.STORED
    assert reader.get("k") == value
    assert reader.stats()["transports"]["stream_hits"] == 1
    assert writer.stats()["transports"]["stream_hits"] == 0


def test_many_values_come_in_their_order_into_the_callers_memory(writer, reader):
    values = {f"k{i}": os.urandom(1 + i * 50_000) for i in range(20)}
    assert all(writer.put_many(values))
    keys = [*values, "absent"]
    assert reader.get_many(keys) == [*values.values(), None]
    out = [bytearray(len(value)) for value in values.values()]
    got = reader.get_many(list(values), out=out)
    assert out == list(values.values())
    assert [bytes(view) for view in got] == list(values.values())
    large = bytearray(2 * MIB)
    assert reader.get_many(["k3"], out=[large])[0] == values["k3"]
    assert bytes(large[len(values["k3"]) :]) == bytes(len(large) - len(values["k3"]))


def test_an_out_too_small_is_refused_and_left_unchanged(writer, reader):
    writer.put("k", bytes([7]) * 100_000)
    for size in (10, 99_999):
        out = bytearray(size)
        with pytest.raises(UsageError, match=rf"out='{size} bytes'"):
            reader.get("k", out=out)
        assert out == bytes(size)


@pytest.mark.parametrize("size", [3, 100_000])
def test_an_out_that_is_larger_keeps_what_is_behind_the_value(writer, reader, size):
    """On the way a description of the value is behind it."""
    numpy = pytest.importorskip("numpy")
    value = numpy.arange(size) % 251
    assert writer.put("k", value)
    out = bytearray(os.urandom(value.nbytes + 1000))
    behind = bytes(out[value.nbytes :])
    assert reader.get("k", out=out) == value.tobytes()
    assert bytes(out[: value.nbytes]) == value.tobytes()
    assert bytes(out[value.nbytes :]) == behind


def test_arrays_come_back_as_arrays(writer, reader):
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(100_000, dtype="float32").reshape(100, 1000)
    writer.put("a", array)
    assert numpy.array_equal(reader.get("a"), array)
    out = numpy.zeros_like(array)
    assert reader.get("a", out=out) is not None
    assert numpy.array_equal(out, array)


def test_blocks_match_and_load_across_hosts(writer, reader):
    tokens = list(range(1000))
    blocks = [os.urandom(50_000) for _ in range(3)]
    assert all(writer.put_blocks(tokens, blocks))
    assert reader.match_prefix(tokens).blocks == 3
    out = [bytearray(50_000) for _ in range(3)]
    assert reader.get_blocks(tokens, out) == 3
    assert out == blocks


def test_a_deleted_value_is_a_miss_and_so_is_an_evicted_one(writer, reader):
    writer.put("k", bytes(100_000))
    assert reader.exists("k")
    assert reader.get("k") is not None
    writer.delete("k")
    assert reader.get("k") is None
    writer.put("old", bytes(MIB))
    assert reader.get("old") is not None
    writer.put_many((f"new{i}", bytes(MIB)) for i in range(100))
    assert reader.get("old") is None


def test_two_hosts_read_from_one_another(redis_server, writer, far):
    with (
        listening_node(redis_server, key_prefix=far.key_prefix) as other,
        client_of(other) as neighbour,
    ):
        writer.put("here", b"1" * 100_000)
        neighbour.put("there", b"2" * 100_000)
        keys = ["here", "there", "here"]
        assert writer.get_many(keys) == [b"1" * 100_000, b"2" * 100_000, b"1" * 100_000]
        assert neighbour.get_many(keys) == [b"1" * 100_000, b"2" * 100_000, b"1" * 100_000]


def test_a_stream_can_be_forced_on_the_nodes_own_host(far, writer):
    writer.put("k", b"v" * 1000)
    with client_of(far, transports=("stream",)) as client:
        assert client.get("k") == b"v" * 1000
        assert client.stats()["transports"]["stream_hits"] == 1
    with client_of(far, transports=("shm",)) as client:
        assert client.get("k") == b"v" * 1000
        assert client.stats()["transports"]["stream_hits"] == 0


def test_without_streams_another_hosts_blocks_are_misses(far, writer, elsewhere):
    writer.put("k", b"v" * 1000)
    with client_of(far, elsewhere, transports=("shm",)) as client:
        assert client.get("k") is None
        assert not client.exists("k")


@pytest.mark.parametrize("names", [(), ("rdma",), "shm", ("shm", "pigeon")])
def test_transports_that_there_are_not_are_refused(far, names):
    with pytest.raises(UsageError, match="transports="):
        client_of(far, transports=names)


@pytest.mark.parametrize("secret", [None, b"another secret altogether"])
def test_without_the_secret_everything_is_a_miss(far, writer, elsewhere, secret):
    writer.put("k", b"v" * 1000)
    with client_of(far, elsewhere, security=StreamSecurity(secret=secret)) as client:
        assert client.get("k") is None
        assert client.stats()["transports"]["stream_failed"] == 1


@pytest.mark.parametrize("secret", [None, b"another secret altogether"])
def test_a_client_that_is_refused_does_not_tell_others_that_the_node_is_silent(
    far, writer, elsewhere, secret
):
    writer.put("k", b"v" * 1000)
    with client_of(far, elsewhere, security=StreamSecurity(secret=secret)) as refused:
        for _ in range(4):
            assert refused.get("k") is None
            assert not refused.put("other", b"1")
        with client_of(far, elsewhere) as client:
            assert client.get("k") == b"v" * 1000
            assert client.put("mine", b"1")


def test_an_open_node_serves_clients_without_a_secret_and_no_others(redis_server, elsewhere):
    with NodeProcess(redis_server, options=(*LISTEN, "--open")) as node:
        with client_of(node) as writer:
            writer.put("k", b"v" * 1000)
        with client_of(node, elsewhere, security=StreamSecurity()) as client:
            assert client.get("k") == b"v" * 1000
        with client_of(node, elsewhere) as client:
            assert client.get("k") is None, "it could be anyone's node"


def test_a_killed_node_is_a_miss_at_once_and_its_next_start_serves_again(mortal, elsewhere):
    with client_of(mortal, elsewhere) as reader:
        with client_of(mortal) as writer:
            writer.put("k", b"v" * 100_000)
            assert reader.get("k") is not None
            mortal.kill()
            assert reader.get("k") is None
        mortal.start()
        with client_of(mortal) as writer:
            writer.put("k2", b"w" * 100_000)
            wait_until(lambda: reader.get("k2") == b"w" * 100_000, "the new start is reached")


def test_a_stopped_node_costs_one_deadline_and_then_nothing(far, writer, elsewhere):
    quick = Limits(redis_timeout_s=5.0, request_timeout_s=10.0, stream_timeout_s=2.0)
    writer.put("k", b"v" * 100_000)
    with client_of(far, elsewhere, limits=quick) as reader:
        assert reader.get("k") is not None
        far.signal(signal.SIGSTOP)
        try:
            assert reader.get("k") is None
            failed = reader.stats()["transports"]["stream_failed"]
            assert failed == 1
            reads = reader.session.remote.stream.read
            asked = []
            reader.session.remote.stream.read = lambda *a: asked.append(a) or reads(*a)
            began = time.monotonic()
            assert reader.get("k") is None
            if time.monotonic() - began < 0.2:  # not so slow that it was time to try again
                assert asked == []
                assert not reader.exists("k")
        finally:
            far.signal(signal.SIGCONT)
        wait_until(lambda: reader.get("k") == b"v" * 100_000, "the node is back")


# --- blocks, as connectors read them ------------------------------------------------


def saved_blocks(writer, count, size=100_000):
    tokens = list(range(256 * count))
    blocks = [os.urandom(size) for _ in range(count)]
    assert all(writer.put_blocks(tokens, blocks))
    return blocks, writer.namespace.block_keys(tokens, 256)


@pytest.mark.parametrize("staging", [None, 10 * MIB])
def test_blocks_of_another_host_are_viewed_together_in_one_batch(writer, reader, staging):
    blocks, keys = saved_blocks(writer, 8)
    session = reader.session
    found = session.match(keys)
    assert session.tiers(found) == [Tier.OTHER_HOST] * len(keys)
    batches = []
    read = session.remote.stream.read
    session.remote.stream.read = lambda *args: batches.append(args) or read(*args)
    room = None if staging is None else memoryview(bytearray(staging))
    views = list(session.views(found, room, 10.0))
    assert [bytes(view.buffer) for view in views] == blocks
    assert all(view.valid() and view.buffer.readonly for view in views)
    assert len(batches) == 1
    assert bytes(session.view(found[3]).buffer) == blocks[3]


def test_blocks_for_which_there_is_no_room_are_not_read(writer, reader):
    blocks, keys = saved_blocks(writer, 4)
    found = reader.session.match(keys)
    views = list(reader.session.views(found, memoryview(bytearray(250_000)), 10.0))
    assert [view and bytes(view.buffer) for view in views] == [*blocks[:2], None, None]


def test_views_mix_both_hosts_and_what_is_gone(redis_server, far, writer):
    blocks, keys = saved_blocks(writer, 6)
    with (
        listening_node(redis_server, key_prefix=far.key_prefix) as other,
        client_of(other) as neighbour,
    ):
        mine = {1: os.urandom(100_000), 4: os.urandom(100_000)}
        for i, block in mine.items():
            writer.session.writer.drop([keys[i]])
            (slot,) = neighbour.session.reserve([keys[i]], len(block), neighbour.namespace.id)
            slot.buffer[:] = block
            neighbour.session.commit([slot])
        found = neighbour.session.match(keys)
        assert len(found) == 6
        writer.session.writer.drop([keys[2]])
        views = list(neighbour.session.views(found, None, 10.0))
        expected = [mine.get(i, block) for i, block in enumerate(blocks)]
        expected[2] = None
        assert [view and bytes(view.buffer) for view in views] == expected


def test_explain_asks_nodes_of_other_hosts(writer, reader):
    writer.put("k", b"v" * 1000)
    assert reader.explain_key("k").first_missing is None
    writer.delete("k")
    missing = reader.explain_key("k").first_missing
    assert missing.reason is MissReason.DELETED
    assert missing.node == "node"
    assert reader.explain_key("never").reason is MissReason.NEVER_STORED


def test_a_block_read_once_is_read_again_without_the_index_and_a_moved_one_is_found(
    writer, reader, far
):
    writer.put("k", b"1" * 100_000)
    assert reader.get("k") is not None
    asked = []
    index = reader.session.index
    lookup, match = index.lookup, index.match
    reader.session.reader._index = type(
        "Counting",
        (),
        {
            "lookup": lambda self, keys: asked.append(keys) or lookup(keys),
            "match": lambda self, keys: asked.append(keys) or match(keys),
        },
    )()
    assert reader.get_many(["k", "k"]) == [b"1" * 100_000] * 2
    assert asked == []
    writer.delete("k")
    writer.put("other", b"3" * 100_000)
    writer.put("k", b"2" * 100_000)
    assert reader.get("k") == b"2" * 100_000
    assert len(asked) == 1
    writer.delete("k")
    writer.put("k", b"4" * 100)
    assert bytes(reader.get("k", out=bytearray(100))) == b"4" * 100


def test_what_is_read_a_second_time_comes_into_its_own_buffer(writer, reader):
    names = ["a", "b", "c"]
    assert all(writer.put_many([(name, name.encode() * 1000) for name in names]))
    assert reader.get_many(names) is not None
    writer.delete("c")
    assert writer.put("other", b"o" * 1000)
    assert writer.put("c", b"d" * 1000)
    out = [bytearray(1000) for _ in names]
    got = reader.get_many(names, out=out)
    assert out == [b"a" * 1000, b"b" * 1000, b"d" * 1000]
    assert [bytes(view) for view in got] == out


def test_a_record_of_a_block_that_no_segment_could_hold_is_a_miss(writer, reader, monkeypatch):
    """Memory would be made for it before anybody is asked."""
    assert writer.put("k", b"v" * 1000)
    index = reader.session.index
    told = index.match

    def lie(keys):
        (key,), (record,) = keys, told(keys)
        return [pack_record(key, unpack_record(key, record)._replace(length=(1 << 32) - 1))]

    monkeypatch.setattr(index, "match", lie)
    assert not reader.exists("k")
    assert reader.get("k") is None
    monkeypatch.undo()
    assert reader.get("k") == b"v" * 1000
