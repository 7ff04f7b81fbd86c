"""The connection of a listener is known, and only that one is hung up on."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis_servers import wait_until

from kvstore.node.publishing import event_connections
from kvstore.node.publishing.event_connections import ListenerConnection, ListenerConnections


class Place:
    """Accepts connections at an endpoint, which it says in ZeroMQ's words."""

    def __init__(self, server: socket.socket, endpoint: str) -> None:
        self.server = server
        self.endpoint = endpoint

    @contextmanager
    def connection(self) -> Iterator[tuple[socket.socket, socket.socket]]:
        """The accepted end, and the listener's."""
        with socket.socket(self.server.family) as theirs:
            theirs.connect(self.server.getsockname())
            ours, _ = self.server.accept()
            with ours:
                yield ours, theirs


@pytest.fixture(params=["path", "abstract", "tcp4", "tcp6"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    kind = request.param
    if kind.startswith("tcp"):
        host, family = ("::1", socket.AF_INET6) if kind == "tcp6" else ("127.0.0.1", socket.AF_INET)
        try:
            server = socket.create_server((host, 0), family=family)
        except OSError as e:
            pytest.skip(f"{host} is not of this machine: {e}")
        endpoint = f"tcp://[{host}]:{server.getsockname()[1]}"
    else:
        server = socket.socket(socket.AF_UNIX)
        name = f"{tmp_path}/events" if kind == "path" else f"@events{os.getpid()}"
        server.bind(name.replace("@", "\0"))
        server.listen()
        endpoint = f"ipc://{name}"
    with server:
        yield Place(server, endpoint)


def is_open(theirs: socket.socket) -> bool:
    theirs.setblocking(False)
    try:
        return theirs.recv(1) != b""
    except BlockingIOError:
        return True


def test_it_is_there_until_it_is_closed(place: Place) -> None:
    with place.connection() as (ours, theirs):
        connection = ListenerConnection(ours.fileno(), place.endpoint)
        assert not connection.gone
        assert is_open(theirs)
        connection.hang_up()
        assert not is_open(theirs)
        ours.close()
        assert connection.gone
        connection.hang_up()


def test_what_came_under_the_same_number_since_is_left_alone(place: Place) -> None:
    with place.connection() as (ours, _), place.connection() as (other, its):
        fd = ours.fileno()
        connection = ListenerConnection(fd, place.endpoint)
        os.dup2(other.fileno(), fd)
        assert connection.gone
        connection.hang_up()
        assert is_open(its)


def test_what_was_not_accepted_there_is_left_alone(place: Place) -> None:
    """ZeroMQ had closed it before anybody looked, and something else had its number."""
    with place.connection() as (ours, theirs):
        ListenerConnection(ours.fileno(), place.endpoint[:-1] + "x").hang_up()
        assert is_open(theirs)


def test_a_descriptor_that_is_closed_already_is_gone(place: Place) -> None:
    with place.connection() as (ours, _):
        fd = ours.fileno()
        ours.close()
        connection = ListenerConnection(fd, place.endpoint)
        assert connection.gone
        connection.hang_up()


def test_what_is_not_known_is_never_gone() -> None:
    connection = ListenerConnection(None, "ipc://events")
    assert not connection.gone
    connection.hang_up()


def test_no_descriptor_is_left_open(place: Place) -> None:
    with place.connection() as (ours, _):
        before = len(list(Path("/proc/self/fd").iterdir()))
        for endpoint in (place.endpoint, "ipc://other"):
            ListenerConnection(ours.fileno(), endpoint).hang_up()
        assert len(list(Path("/proc/self/fd").iterdir())) == before


# --- as ZeroMQ tells of them ----------------------------------------------------------


GREETING_MS = 250


class Port:
    """A socket of ZeroMQ's, who is at it, and a thread that attends to them."""

    def __init__(self) -> None:
        self.zmq = pytest.importorskip("zmq")
        self.context = self.zmq.Context()
        listening = self.context.socket(self.zmq.PUB)
        connections = ListenerConnections(self.zmq)
        monitor = connections.watch(self.context, listening)
        listening.bind("tcp://127.0.0.1:*")
        self.at = listening.last_endpoint.decode()
        self.over = threading.Event()

        def attend() -> None:
            while not self.over.is_set():
                monitor.poll(20)
                connections.attend(time.monotonic())
                listening.send(b"news")

        self.thread = threading.Thread(target=attend)
        self.thread.start()

    def raw(self, source: str = "127.0.0.1") -> socket.socket:
        at = "127.0.0.1", int(self.at.rpartition(":")[2])
        return socket.create_connection(at, 10, source_address=(source, 0))

    def listener(self, source: str = "127.0.0.1") -> Any:
        one = self.context.socket(self.zmq.SUB)
        one.setsockopt(self.zmq.SUBSCRIBE, b"")
        one.setsockopt(self.zmq.RECONNECT_IVL, -1)  # else nobody would see that it was hung up on
        one.setsockopt(self.zmq.LINGER, 0)
        one.connect(f"tcp://{source}:0;{self.at.removeprefix('tcp://')}")
        assert one.poll(10_000), "it is served"
        return one

    def close(self) -> None:
        self.over.set()
        self.thread.join(10)
        self.context.destroy(0)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[Port]:
    monkeypatch.setattr(event_connections, "EVENT_CONNECTIONS_MAX", 4)
    monkeypatch.setattr(event_connections, "GREETING_MS", GREETING_MS)
    port = Port()
    yield port
    port.close()


def gone(one: socket.socket) -> bool:
    """Whether ZeroMQ has hung up, after its own greeting."""
    one.setblocking(False)
    try:
        while one.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def served(listener: Any) -> bool:
    """Whether it still hears what is published."""
    while listener.poll(0):
        listener.recv()
    return bool(listener.poll(500))


def test_who_does_not_greet_is_hung_up_on(port: Port) -> None:
    with port.raw() as silent:
        wait_until(lambda: gone(silent), "it is hung up on", 10)


def test_a_crowd_that_does_not_greet_pushes_out_its_own_and_nobody_who_listens(port: Port) -> None:
    listener = port.listener()
    time.sleep(2e-3 * GREETING_MS)  # until it counts as one that has greeted
    crowd = [port.raw() for _ in range(20)]
    wait_until(lambda: sum(gone(one) for one in crowd) >= 16, "all but few are hung up on", 10)
    assert served(listener)
    assert served(port.listener()), "and another comes in"
    for one in crowd:
        one.close()


def test_listeners_of_one_address_that_are_too_many_push_out_their_own(port: Port) -> None:
    other = port.listener("127.0.0.2")
    crowd = []
    for _ in range(6):
        crowd.append(port.listener())
        time.sleep(2e-3 * GREETING_MS)  # it has greeted
    assert served(other)
    assert [served(one) for one in crowd] == [False] * 3 + [True] * 3
