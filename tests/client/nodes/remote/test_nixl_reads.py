"""A client on another host than the node's: which way it reads, and when that way fails."""

import os
import signal
import tempfile
from pathlib import Path

import pytest
from nixl_places import needs_nixl, same_host
from redis_servers import wait_until
from stores import MIB
from two_hosts import PATIENT, SECRET, client_of, listening_node

from kvstore import Client
from kvstore.client.nodes import remote
from kvstore.protocol.control import Op
from kvstore.transport.stream.security import StreamSecurity

pytestmark = needs_nixl
LONG_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def on_same_host():
    with same_host():
        yield


@pytest.fixture(scope="module")
def node(redis_server, on_same_host):
    with listening_node(redis_server, "--nixl") as node:
        yield node


@pytest.fixture(scope="module")
def writer(node):
    with Client(**node.client_options, verify="always") as client:
        yield client


@pytest.fixture(scope="module")
def reader(node):
    """On another host: nothing of the node's run directory is there."""
    with (
        tempfile.TemporaryDirectory(prefix="kve-") as elsewhere,
        client_of(node, Path(elsewhere)) as client,
    ):
        yield client


def counts(client):
    return client.stats()["transports"]


def read_through_nixl(reader, key, value):
    """Read until it comes that way, which is first tried in the background."""
    before = counts(reader)["nixl_hits"]

    def read():
        assert reader.get(key) == value, "whichever way"
        return counts(reader)["nixl_hits"] > before

    wait_until(read, "a read through NIXL", LONG_S)


def sidecar_of(node):
    """The process beside the node, when there is one."""
    threads = Path(f"/proc/{node.process.pid}/task").glob("*/children")
    children = [int(pid) for thread in threads for pid in thread.read_text().split()]
    return children[0] if children else None


def test_reads_go_by_stream_until_nixl_has_proved_itself(writer, reader):
    value = os.urandom(MIB)
    assert writer.put("k", value)
    assert reader.get("k") == value
    assert counts(reader)["stream_hits"] == 1
    read_through_nixl(reader, "k", value)
    assert writer.get("k") == value
    assert counts(writer)["shm_hits"] == 1
    assert counts(writer)["shm_bytes"] == MIB


def test_what_has_no_checksum_goes_by_stream_or_not_at_all(node, writer, reader, monkeypatch):
    """Rule 4: where bytes cross a host, a checksum says that they are the right ones."""
    writer.put("checked", b"c" * 1000)
    with Client(**node.client_options) as careless:
        assert careless.put("unchecked", b"u" * 1000)
    read_through_nixl(reader, "checked", b"c" * 1000)
    before = counts(reader)
    both = reader.get_many(["unchecked", "checked"])
    assert both == [b"u" * 1000, b"c" * 1000]
    after = counts(reader)
    assert after["stream_hits"] - before["stream_hits"] == 1
    assert after["nixl_hits"] - before["nixl_hits"] == 1
    (known, _), *_ = reader.session.nodes.all()
    alone = [way for way in known.offered if way.name == "nixl"]
    monkeypatch.setattr(known, "offered", alone)
    assert reader.get_many(["unchecked", "checked"]) == [None, b"c" * 1000]


def test_it_can_be_forced_and_left_out(node, writer, monkeypatch):
    assert writer.put("f", b"v" * 1000)
    with tempfile.TemporaryDirectory(prefix="kve-") as elsewhere:
        options = {**node.client_options, "run_dir": Path(elsewhere), "limits": PATIENT}
        options["security"] = StreamSecurity(secret=SECRET.encode())
        monkeypatch.setenv("KVSTORE_TRANSPORTS", "nixl")
        with Client(**options) as forced:
            wait_until(lambda: forced.get("f") == b"v" * 1000, "a read through NIXL", LONG_S)
            assert counts(forced)["nixl_hits"] == 1
            assert counts(forced)["stream_hits"] == 0
        monkeypatch.setenv("KVSTORE_TRANSPORTS", "stream")
        with Client(**options) as without:
            assert without.get("f") == b"v" * 1000
            assert without.session.remote.transports.names == ["stream"]


@pytest.mark.parametrize("size", [0, 1, 100_000, 4 * MIB])
def test_values_of_every_size_come_whole(writer, reader, size):
    value = os.urandom(size)
    assert writer.put(f"s{size}", value)
    read_through_nixl(reader, f"s{size}", value)


def test_the_node_hears_what_was_read(writer, reader, monkeypatch):
    """Otherwise it would evict what is read most."""
    told = []
    real = remote.tell
    monkeypatch.setattr(remote, "tell", lambda *a: told.append(a[2]) or real(*a))
    writer.put("used", b"v" * 1000)
    read_through_nixl(reader, "used", b"v" * 1000)
    key = reader.namespace.value_key("used")
    assert [Op.TOUCH, 0, key] in told


def test_when_the_sidecar_dies_reads_go_by_stream(node, writer, reader):
    value = os.urandom(MIB)
    assert writer.put("kept", value)
    read_through_nixl(reader, "kept", value)
    os.kill(sidecar_of(node), signal.SIGKILL)
    for _ in range(5):
        assert reader.get("kept") == value
    assert node.process.poll() is None


def test_a_node_killed_is_a_miss_and_its_sidecar_ends(node, writer, reader):
    value = os.urandom(MIB)
    assert writer.put("gone", value)
    wait_until(lambda: reader.get("gone") == value, "it is there")
    wait_until(lambda: sidecar_of(node), "there is a sidecar", LONG_S)
    pid = sidecar_of(node)
    node.kill()
    assert reader.get("gone") is None
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "its sidecar ends with it")
    node.start()  # takes its memory over
    wait_until(lambda: reader.get("gone") == value, "the new start is read", LONG_S)
