"""Who is let in by a node that listens, and for how long; with TLS and without."""

import dataclasses
import socket
import threading

import pytest
from contract.transport import SECURITY, Place
from redis_servers import wait_until
from tls_certificate import certificate

from kvstore.errors import UsageError
from kvstore.node import stream_server
from kvstore.transport.base import Read
from kvstore.transport.stream import StreamTransport

FEW = 3
"""Connections that a node takes at a time, here."""


@pytest.fixture(scope="module")
def signed(tmp_path_factory):
    return certificate(tmp_path_factory.mktemp("tls"))


def place_with(tmp_path, files):
    """A node, and clients whose security fits it."""
    theirs, ours = SECURITY, SECURITY
    if files is not None:
        theirs = dataclasses.replace(SECURITY, tls_cert=files[0], tls_key=files[1])
        ours = dataclasses.replace(SECURITY, tls_ca=files[0])
    return Place(tmp_path, lambda place: StreamTransport(ours), security=theirs), ours


@pytest.fixture(params=["tcp", "tls"])
def served(request, tmp_path, monkeypatch):
    """A place whose node takes `FEW` connections, and a way to be one client more."""
    monkeypatch.setattr(stream_server, "STREAM_CONNECTIONS_MAX", FEW)
    files = request.getfixturevalue("signed") if request.param == "tls" else None
    place, security = place_with(tmp_path, files)
    others = []

    def another():
        others.append(StreamTransport(security))
        return others[-1]

    yield place, another
    for transport in others:
        transport.close()
    place.close()


def threads():
    return sum(thread.name == "kvstore-stream" for thread in threading.enumerate())


def read_by(place, transport, block):
    place.transport = transport
    (outcome,), _ = place.read(block)
    return outcome


def test_clients_that_have_gone_take_no_room(served):
    place, another = served
    block = place.save(b"1" * 1000)
    for _ in range(FEW + 2):
        transport = another()
        assert read_by(place, transport, block).read is Read.HIT
        transport.close()
        wait_until(lambda: threads() == 0, "its connection has ended at the node")


def test_a_node_that_is_full_hangs_up_on_whoever_has_asked_nothing_for_longest(served, monkeypatch):
    place, another = served
    monkeypatch.setattr(stream_server, "IDLE_MIN_S", 0.0)
    block = place.save(b"1" * 1000)
    clients = [another() for _ in range(FEW + 2)]
    for transport in clients:
        assert read_by(place, transport, block).read is Read.HIT
    wait_until(lambda: threads() == FEW, "no more than it takes")
    for transport in clients:  # those it hung up on connect again
        assert read_by(place, transport, block).read is Read.HIT


def test_clients_that_have_just_asked_are_not_hung_up_on(served, monkeypatch):
    place, another = served
    monkeypatch.setattr(stream_server, "IDLE_MIN_S", 600.0)
    block = place.save(b"1" * 1000)
    clients = [another() for _ in range(FEW)]
    for transport in clients:
        assert read_by(place, transport, block).read is Read.HIT
    assert read_by(place, another(), block).read is Read.FAILED
    assert [read_by(place, transport, block).read for transport in clients] == [Read.HIT] * FEW


def test_a_connection_for_which_there_is_no_thread_is_closed_and_the_next_one_served(
    served, monkeypatch
):
    place, another = served
    block = place.save(b"1" * 1000)
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "kvstore-stream":
            raise RuntimeError("can't start new thread")
        start(thread)

    for _ in range(FEW + 1):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            assert read_by(place, another(), block).read is Read.FAILED
    assert read_by(place, another(), block).read is Read.HIT


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "::1", "localhost"])
def test_a_node_is_reached_at_the_address_that_it_announces(tmp_path, host):
    if ":" in host and not ipv6():
        pytest.skip("no IPv6 on this machine")
    place = Place(tmp_path, lambda place: StreamTransport(SECURITY), listen=(host, 0))
    try:
        outcome = read_by(place, place.transport, place.save(b"1" * 1000))
        assert outcome.read is Read.HIT, outcome.reason
    finally:
        place.close()


def ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("listen", [("127.0.0.1", 70_000), ("127.0.0.1", -1), ("a\0b", 0)])
def test_an_address_that_can_be_none_keeps_a_node_from_starting(tmp_path, listen):
    with pytest.raises(UsageError, match="listen="):
        Place(tmp_path, lambda place: StreamTransport(SECURITY), listen=listen)
