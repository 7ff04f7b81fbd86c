"""Who is let in by a node that listens, and for how long; with TLS and without."""

import dataclasses
import errno
import os
import socket
import threading
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from contract.transport import SECURITY, Place, far
from redis_servers import wait_until
from stores import announcement
from tls_certificate import certificate

from kvstore.errors import NodeUnavailableError, UsageError
from kvstore.limits import Limits
from kvstore.node import NodeConfig
from kvstore.node.stream import server, service, unproven
from kvstore.protocol import stream_handshake as sh
from kvstore.protocol.stream import SaveOffer, pack_put
from kvstore.transport.base import Read
from kvstore.transport.stream.address import parse
from kvstore.transport.stream.channel import Channel
from kvstore.transport.stream.transport import StreamTransport

FEW = 3
"""Connections that a node takes at a time, here."""


def stream_of(place: Any) -> Any:
    return place.node._stream


def unproven_of(place: Any) -> Any:
    return stream_of(place)._unproven


@pytest.fixture(scope="module")
def signed(tmp_path_factory):
    return certificate(tmp_path_factory.mktemp("tls"))


def place_with(tmp_path, files, **config):
    """A node, and clients whose security fits it."""
    theirs, ours = SECURITY, SECURITY
    if files is not None:
        theirs = dataclasses.replace(SECURITY, tls_cert=files[0], tls_key=files[1])
        ours = dataclasses.replace(SECURITY, tls_ca=files[0])
    return Place(tmp_path, lambda place: StreamTransport(ours), security=theirs, **config), ours


@pytest.fixture(params=["tcp", "tls"])
def served(request, tmp_path):
    """A place whose node takes `FEW` connections, and a way to be one client more."""
    files = request.getfixturevalue("signed") if request.param == "tls" else None
    limits = Limits(stream_connections_max=FEW)
    place, security = place_with(tmp_path, files, limits=limits)
    others = []

    def another(**changes):
        others.append(StreamTransport(dataclasses.replace(security, **changes)))
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
    monkeypatch.setattr(server, "IDLE_MIN_S", 0.0)
    block = place.save(b"1" * 1000)
    clients = [another() for _ in range(FEW + 2)]
    for transport in clients:
        assert read_by(place, transport, block).read is Read.HIT
    wait_until(lambda: threads() == FEW, "no more than it takes")
    for transport in clients:  # those it hung up on connect again
        assert read_by(place, transport, block).read is Read.HIT


def test_clients_that_have_just_asked_are_not_hung_up_on(served, monkeypatch):
    place, another = served
    monkeypatch.setattr(server, "IDLE_MIN_S", 600.0)
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


@pytest.mark.parametrize("threads_to_give", [True, False])
def test_a_node_that_is_stopped_while_a_connection_comes_in_ends_in_order(
    served, monkeypatch, threads_to_give
):
    """What it waits for has begun: Python refuses to wait for a thread that has not."""
    place, _ = served
    stream = stream_of(place)
    coming, stopped, ended = (threading.Event() for _ in range(3))
    start = threading.Thread.start

    def late(thread):
        if thread.name != "kvstore-stream":
            return start(thread)
        coming.set()
        stopped.wait(0.3)
        try:
            if not threads_to_give:
                raise RuntimeError("can't start new thread")
            start(thread)
        finally:
            ended.set()

    monkeypatch.setattr(threading.Thread, "start", late)
    (guest,) = silent(place, 1)
    guest.sendall(b"k")
    assert coming.wait(20)
    stream.stop()
    stopped.set()
    assert ended.wait(20)
    assert hung_up(guest)
    guest.close()
    wait_until(lambda: threads() == 0, "its thread has ended")
    assert not stream._threads


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "::1", "localhost"])
def test_a_node_is_reached_at_the_address_that_it_announces(tmp_path, host):
    if ":" in host and not ipv6():
        pytest.skip("no IPv6 on this machine")
    with closing(
        Place(tmp_path, lambda place: StreamTransport(SECURITY), listen=(host, 0))
    ) as place:
        outcome = read_by(place, place.transport, place.save(b"1" * 1000))
        assert outcome.read is Read.HIT, outcome.reason


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "[::1]:{}"])
def test_another_port_is_announced_where_one_is_advertised(tmp_path, address):
    """Behind a port that is mapped, as containers have it."""
    if "[" in address and not ipv6():
        pytest.skip("no IPv6 on this machine")
    with socket.create_server(("127.0.0.1", 0)) as mapped:
        port = mapped.getsockname()[1]
    with closing(
        Place(
            tmp_path,
            lambda place: StreamTransport(SECURITY),
            listen=("", 0),
            advertise=address.format(port),
        )
    ) as place:
        announced = place.word.transports["stream"]
        assert announced == f"tcp://{address.format(port)}"
        assert str(parse(announced)) == announced


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_node_that_names_no_host_is_reached_by_ipv4_and_ipv6(tmp_path, address):
    if ":" in address and not ipv6():
        pytest.skip("no IPv6 on this machine")
    with closing(
        Place(tmp_path, lambda place: StreamTransport(SECURITY), listen=("", 0), advertise=address)
    ) as place:
        outcome = read_by(place, place.transport, place.save(b"1" * 1000))
        assert outcome.read is Read.HIT, outcome.reason
        (guest,) = stream_of(place)._guests
        assert guest.address == address, "as the limits for one address count it"


def test_a_machine_whose_ipv6_is_turned_off_is_reached_by_ipv4(tmp_path, monkeypatch):
    create_server = socket.create_server

    def none_of_ipv6(address, *, family, **options):
        if family == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return create_server(address, family=family, **options)

    monkeypatch.setattr(socket, "create_server", none_of_ipv6)
    with closing(Place(tmp_path, lambda place: StreamTransport(SECURITY), listen=("", 0))) as place:
        outcome = read_by(place, place.transport, place.save(b"1" * 1000))
        assert outcome.read is Read.HIT, outcome.reason


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


# --- connections that prove nothing ------------------------------------------------

HERE, THERE = "127.0.0.1", "127.0.0.2"
"""Addresses of two client hosts."""


def silent(place, count, source=HERE):
    """Connections that say nothing."""
    host, port = place.node.config.listen[0], int(port_of(place))
    return [
        socket.create_connection((host, port), source_address=(source, 0)) for _ in range(count)
    ]


def port_of(place):
    return place.word.transports["stream"].rpartition(":")[2]


def hung_up(connection):
    connection.settimeout(20)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.fixture
def patient_unproven(monkeypatch):
    """Nobody goes because of the time."""
    monkeypatch.setattr(server, "STREAM_HANDSHAKE_TIMEOUT_S", 600.0)


def test_who_says_nothing_takes_no_thread_and_no_room_from_clients(
    served, patient_unproven, monkeypatch
):
    monkeypatch.setattr(server, "IDLE_MIN_S", 0.0)
    place, another = served
    block = place.save(b"1" * 1000)
    clients = [another() for _ in range(FEW)]
    for transport in clients:
        assert read_by(place, transport, block).read is Read.HIT
    crowd = silent(place, 300)
    assert not any(transport.hung_up(place.word) for transport in clients)
    assert threads() == FEW
    for transport in clients:
        assert read_by(place, transport, block).read is Read.HIT
    assert read_by(place, another(), block).read is Read.HIT, "and another client comes in"
    assert len(unproven_of(place)) <= unproven.STREAM_UNPROVEN_MAX
    for connection in crowd:
        connection.close()


def test_the_crowd_of_one_address_pushes_out_its_own(served, patient_unproven):
    place, _ = served
    (mine,) = silent(place, 1, THERE)
    mine.sendall(b"")
    crowd = silent(place, 2 * unproven.STREAM_UNPROVEN_MAX)
    assert hung_up(crowd[0])
    assert not hung_up_now(mine)
    for connection in (mine, *crowd):
        connection.close()


def hung_up_now(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


def test_who_says_nothing_or_not_enough_is_hung_up_on_soon(served, monkeypatch):
    monkeypatch.setattr(server, "STREAM_HANDSHAKE_TIMEOUT_S", 0.2)
    place, _ = served
    says_nothing, begins = silent(place, 2)
    begins.sendall(b"k")
    assert hung_up(says_nothing)
    assert hung_up(begins)
    wait_until(lambda: threads() == 0, "its thread has ended")
    assert not len(unproven_of(place))


def test_a_client_that_knows_the_secret_is_no_longer_unproven(served):
    place, another = served
    transport = another()
    assert read_by(place, transport, place.save(b"1" * 1000)).read is Read.HIT
    assert not len(unproven_of(place))


# --- a share for each client -----------------------------------------------------------


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path, lambda place: StreamTransport(SECURITY))
    yield place
    place.close()


def proven_from(place, source):
    """A channel of a client at that address."""
    node = (place.word.node_id, place.word.epoch)
    shake = sh.ClientHandshake(SECURITY.secret, os.urandom(32), node)
    channel = Channel(silent(place, 1, source)[0])
    channel.send([shake.hello], far())
    channel.send([shake.prove(channel.receive_bytes(sh.NODE_HELLO_BYTES, far()))], far())
    channel.seals = shake.check(channel.receive_bytes(sh.VERDICT_BYTES, far()))
    return channel


def offer_and_stall(place, source):
    """A save of nearly a quarter of the node whose bytes never come."""
    channel = proven_from(place, source)
    offers = [SaveOffer(os.urandom(32), 1_000_000, 0, 0, 1) for _ in range(3)]
    channel.send_frame(pack_put(offers, 7, b"", 60.0), far())
    return channel


def reserved(place):
    return place.writer.stats()["reserved"]


def test_a_client_host_holds_only_its_share_and_others_save_meanwhile(place):
    crowd = [offer_and_stall(place, THERE) for _ in range(5)]
    wait_until(lambda: reserved(place) == 3, "the first has its slots")
    other = offer_and_stall(place, HERE)
    wait_until(lambda: reserved(place) == 6, "another host has its own")
    for channel in (*crowd, other):
        channel.close()
    wait_until(lambda: reserved(place) == 0, "nothing is left")


def test_slots_are_reserved_for_little_longer_than_their_bytes_take(place, monkeypatch):
    """However long the client says that it will wait."""
    monkeypatch.setattr(service, "RESERVED_TIMEOUT_S", 0.2)
    channel = offer_and_stall(place, HERE)
    wait_until(lambda: reserved(place) == 3, "it has its slots")
    wait_until(lambda: reserved(place) == 0, "they are free again")
    channel.receive_rest(*channel.receive_head(far()), far())  # what it may send
    with pytest.raises(NodeUnavailableError):
        channel.receive_bytes(1, far())


def test_the_limits_of_who_proves_nothing_are_small():
    """A handshake takes milliseconds; who takes longer is not worth a place."""
    assert server.STREAM_HANDSHAKE_TIMEOUT_S <= 2.0
    assert unproven.STREAM_UNPROVEN_MAX <= 100


def test_crowds_of_many_addresses_have_one_pool(served, patient_unproven):
    place, _ = served
    room = unproven.STREAM_UNPROVEN_MAX // 2
    crowds = [silent(place, room, f"127.0.0.{10 + i}") for i in range(4)]
    assert hung_up(crowds[0][0])
    assert len(unproven_of(place)) <= unproven.STREAM_UNPROVEN_MAX
    assert not hung_up_now(crowds[-1][-1])
    for connection in [one for crowd in crowds for one in crowd]:
        connection.close()


def test_who_does_not_know_the_secret_pushes_nobody_out(served, monkeypatch):
    monkeypatch.setattr(server, "IDLE_MIN_S", 0.0)
    place, another = served
    block = place.save(b"1" * 1000)
    clients = [another() for _ in range(FEW)]
    for transport in clients:
        assert read_by(place, transport, block).read is Read.HIT
    for _ in range(FEW):
        stranger = another(secret=b"another secret, as long")
        assert "secret" in read_by(place, stranger, block).reason
    assert not any(transport.hung_up(place.word) for transport in clients)


def test_a_node_whose_certificate_cannot_be_used_lets_go_of_its_segment(tmp_path):
    """A second mapping of VRAM would stay for as long as the process."""
    files = tmp_path / "cert.pem", tmp_path / "key.pem"
    security = dataclasses.replace(SECURITY, tls_cert=files[0], tls_key=files[1])
    config = NodeConfig(run_dir=tmp_path, listen=("127.0.0.1", 0), security=security)
    closed = []
    segment = SimpleNamespace(close=lambda: closed.append(True))
    with pytest.raises(UsageError, match="tls"):
        server.StreamServer(config, announcement(), None, segment, None)
    assert closed == [True]
