"""A put under a key that exists: the same value, another one, and in its place."""

from types import SimpleNamespace

import pytest
from stores import NodeProcess
from two_hosts import client_of

from kvstore import PutStatus, UsageError
from kvstore.client.payloads.tensors import Payload
from kvstore.client.reader import Search
from kvstore.client.values import existing
from kvstore.client.values.saving import ValueSaver
from kvstore.transport.base import Outcome, Read
from kvstore.types import EXISTS, Kind, Location

numpy = pytest.importorskip("numpy")
MIB = 1 << 20

OTHERS = {
    "another length": (b"one", b"three"),
    "other bytes": (b"one", b"two"),
    "one byte of many": (bytes(MIB), bytes(MIB - 1) + b"1"),
    "another dtype": (numpy.zeros(4, "<f4"), numpy.zeros(4, "<i4")),
    "another shape": (numpy.zeros((2, 3), "<f4"), numpy.zeros((3, 2), "<f4")),
    "an array of the bytes": (b"\0\0", numpy.zeros(2, "u1")),
    "nothing": (b"x", b""),
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_value_under_a_key_is_said_and_the_first_one_stays(client, case):
    one, other = OTHERS[case]
    assert client.put("k", one).status is PutStatus.STORED
    assert client.put("k", one).status is PutStatus.EXISTS
    result = client.put("k", other)
    assert result.status is PutStatus.DIFFERS
    assert not result
    assert "another value" in result.reason
    assert "replace=True" in result.reason
    assert numpy.array_equal(client.get("k"), one) or client.get("k") == one
    same, differs, new = client.put_many([("k", one), ("k", other), ("new", other)])
    assert (same.status, differs.status, new.status) == ("exists", "differs", "stored")


def test_what_goes_while_it_is_compared_is_not_called_another(client, monkeypatch):
    """Its slot has other bytes by then (rule 4): nobody can tell, and the put had found it."""
    assert client.put("k", bytes(1000))
    digest, gone = existing.xxhash.xxh3_64_intdigest, []

    def late(data):
        if not gone:
            gone.append(client.delete("k"))
            assert client.put("another", b"a" * 1000)
            assert bytes(data) == b"a" * 1000
        return digest(data)

    monkeypatch.setattr(existing, "xxhash", SimpleNamespace(xxh3_64_intdigest=late))
    assert client.put("k", bytes(1000)).status is PutStatus.EXISTS
    assert gone == [True]


@pytest.mark.parametrize("case", OTHERS)
def test_replace_puts_it_in_its_place(client, case):
    one, other = OTHERS[case]
    client.put("k", one)
    assert client.put("k", other, replace=True).status is PutStatus.STORED
    assert client.put("k", other).status is PutStatus.EXISTS
    assert client.put("k", other, replace=True).status is PutStatus.EXISTS
    got = client.get("k")
    assert type(got) is type(other)
    assert numpy.array_equal(got, other) or got == other


def test_replace_takes_the_last_value_of_each_key(client):
    client.put("a", b"old")
    pairs = [("a", b"1"), ("b", b"2"), ("a", b"3"), ("a", b"4")]
    assert all(client.put_many(pairs, replace=True))
    assert client.get_many(["a", "b"]) == [b"4", b"2"]


def test_what_is_pinned_keeps_its_bytes_when_it_is_replaced(client):
    client.put("k", b"1" * 1000)
    with client.pin("k") as pin:
        assert client.put("k", b"2" * 1000, replace=True)
        assert pin.buffer == b"1" * 1000
        assert client.get("k") == b"2" * 1000


@pytest.mark.parametrize("case", OTHERS)
def test_another_value_on_another_host_is_said_and_replaced(writer, reader, case):
    """`reader` has no node of its own: it saves to that of another host."""
    one, other = OTHERS[case]
    writer.put("k", one)
    assert reader.put("k", one).status is PutStatus.EXISTS
    assert reader.put("k", other).status is PutStatus.DIFFERS
    assert reader.put("k", other, replace=True).status is PutStatus.STORED
    for client in (writer, reader):
        got = client.get("k")
        assert type(got) is type(other)
        assert numpy.array_equal(got, other) or got == other


def test_a_value_of_another_host_is_deleted_there(writer, reader):
    writer.put("k", b"v" * 1000)
    assert reader.get("k") == b"v" * 1000
    assert reader.delete("k")
    assert writer.get("k") is None
    assert reader.get("k") is None


def test_a_pin_of_a_value_of_another_host_says_where_it_is(writer, reader):
    writer.put("k", b"v" * 1000)
    with pytest.raises(UsageError, match=r"^key='k': is on node node of .*: only `get`"):
        reader.pin("k")
    assert reader.get("k") == b"v" * 1000


def test_a_node_of_its_own_beside_it_changes_nothing(redis_server, far):
    """A host with a node, and a value that only another host's node has."""
    prefix = far.key_prefix
    with client_of(far) as writer:
        writer.put("k", b"v" * 1000)
        with NodeProcess(redis_server, key_prefix=prefix) as own, client_of(own) as client:
            assert client.put("mine", b"1")
            with pytest.raises(UsageError, match="is on node"):
                client.pin("k")
            assert client.put("k", b"w" * 1000, replace=True).status is PutStatus.STORED
            assert writer.get("k") is None
            assert client.get("k") == b"w" * 1000
            assert client.delete("k")
            assert client.get("k") is None


def test_to_compare_takes_what_is_left_of_the_time_of_the_put():
    """Values of other hosts without a checksum are read: that began a deadline of its own."""
    now, asked = [100.0], {}
    key, value = b"k" * 32, b"v" * 10
    there = Location(1, 1, 0, 0, 1, 0, len(value), 0)

    def save(keys, payloads):
        now[0] += 1.9
        return [EXISTS]

    def search(keys, *, give_up_at):
        asked["index"] = give_up_at
        return SimpleNamespace(places=[None], fetched={0: there})

    def read(wanted, deadline):
        asked["other host"] = deadline
        return [Outcome(Read.FAILED)]

    session = SimpleNamespace(
        machine=SimpleNamespace(monotonic=lambda: now[0]),
        reader=SimpleNamespace(search=search),
        writer=SimpleNamespace(timeout_s=2.0),
        remote=SimpleNamespace(timeout_s=lambda size_bytes: 1.0, read=read),
    )
    saver = ValueSaver(session, 1)
    saver.save = save
    assert saver.put([key], [Payload(memoryview(value), b"", Kind.BYTES)]) == [EXISTS]
    assert asked == {"index": 102.0, "other host": 102.0}


def test_once_the_time_of_a_put_is_over_the_index_is_not_asked(client, monkeypatch):
    reader, asked = client.session.reader, []
    monkeypatch.setattr(reader._index, "match", asked.append)
    assert reader.search([b"k" * 32], give_up_at=0.0) == [None]
    assert asked == []


def test_places_of_what_exists_are_listed_once_however_many_there_are(client, monkeypatch):
    """Once for each value took 24 s for 16,000 of them."""
    listed = []

    def places(found):
        listed.append(len(found))
        return list(found)

    items = [(f"many/{i}", b"v") for i in range(500)]
    assert {result.status for result in client.put_many(items)} == {PutStatus.STORED}
    monkeypatch.setattr(Search, "places", property(places))
    assert {result.status for result in client.put_many(items)} == {PutStatus.EXISTS}
    assert sum(listed) == 500
