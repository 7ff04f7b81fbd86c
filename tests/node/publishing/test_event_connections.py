"""The connection of a listener is known, and only that one is hung up on."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.node.publishing.event_connections import ListenerConnection


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
