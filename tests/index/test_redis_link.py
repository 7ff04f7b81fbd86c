"""One connection: what is sent a second time, and what is not."""

import socket
import time

import pytest

from kvstore.index.redis_link import Link


class Server:
    """Connections that the test answers by hand."""

    def __init__(self) -> None:
        self.peers: list[socket.socket] = []

    def dial(self, deadline: float):
        ours, theirs = socket.socketpair()
        self.peers.append(theirs)
        return Connection(ours), b"", 0


class Connection:
    """What of redis-py's connection is used."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def disconnect(self) -> None:
        self._sock.close()


@pytest.fixture
def server():
    server = Server()
    yield server
    for peer in server.peers:
        peer.close()


@pytest.fixture
def kept(server):
    """A connection that has answered once."""
    link = Link(server.dial, 0.05)
    link.send(b"PING\r\n", time.monotonic() + 5)
    server.peers[0].sendall(b"+PONG\r\n")
    assert link.receive(1, time.monotonic() + 5) == [b"PONG"]
    server.peers[0].recv(100)
    yield link
    link.drop()


CALLS = {
    "run": lambda link, deadline: link.run(b"PING\r\n", 1, deadline),
    "run_each": lambda link, deadline: link.run_each(iter([b"PING\r\n"]), deadline),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_timed_out_is_not_sent_again_however_much_time_is_left(kept, server, call):
    """The server has the request already, and is slow: another one makes it slower."""
    deadline = time.monotonic() + (60 if call is CALLS["run"] else 0.05)
    with pytest.raises(TimeoutError):
        call(kept, deadline)
    assert server.peers[0].recv(100) == b"PING\r\n"
    assert len(server.peers) == 1


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_a_closed_connection_did_not_answer_is_sent_once_more_on_a_new_one(kept, server, call):
    server.peers[0].close()
    dial = server.dial

    def answered(deadline: float):
        made = dial(deadline)
        server.peers[-1].sendall(b"+PONG\r\n")
        return made

    kept._dial = answered
    assert call(kept, time.monotonic() + 5) == [b"PONG"]
    assert len(server.peers) == 2
    assert server.peers[1].recv(100) == b"PING\r\n"


def test_a_new_connection_that_is_closed_at_once_is_not_tried_again(server):
    link = Link(server.dial, 5.0)
    dial = server.dial

    def closed(deadline: float):
        made = dial(deadline)
        server.peers[-1].close()
        return made

    link._dial = closed
    with pytest.raises(ConnectionError):
        link.run(b"PING\r\n", 1, time.monotonic() + 5)
    assert len(server.peers) == 1
