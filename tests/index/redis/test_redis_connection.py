"""One connection: what is sent a second time, and what is not."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import hiredis
import pytest

from kvstore.errors import IndexDeadlineError
from kvstore.index.redis.connection import Link, Links
from kvstore.index.redis.index import open_index


class Server:
    """Connections that the test answers by hand."""

    def __init__(self) -> None:
        self.ours: list[socket.socket] = []
        self.peers: list[socket.socket] = []

    def dial(self, deadline: float):
        ours, theirs = socket.socketpair()
        self.ours.append(ours)
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
    link = Link(lambda deadline: server.dial(deadline), 0.05)
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


@pytest.mark.parametrize("kind", ["*", ">", "~", "%", "|"])
@pytest.mark.parametrize("cut", [0, 1, 5, 9], ids=lambda cut: f"cut at {cut}")
def test_a_reply_that_promises_more_than_any_has_is_refused_before_room_is_made(
    kept, server, kind, cut
):
    """hiredis makes a list of as many as it is told, and 16 GB take 16 s to let go. Here it is told
    the fewest that are too many: it has room for them, so that this test is what fails."""
    claim = f"{kind}1000000\r\n".encode()
    kept.send(b"PING\r\n", time.monotonic() + 5)

    def answer():
        peer = server.peers[0]
        peer.sendall(b"+1\r\n*3\r\n" + claim[:cut])
        time.sleep(0.05)
        with contextlib.suppress(OSError):  # it has seen enough
            peer.sendall(claim[cut:])

    thread = threading.Thread(target=answer)
    thread.start()
    error = error_of(lambda: kept.receive(2, time.monotonic() + 5))
    thread.join()
    assert isinstance(error, hiredis.ProtocolError), repr(error)
    assert "more items than any of ours" in str(error)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_timed_out_is_not_sent_again(kept, server, call):
    """The server has the request already, and is slow: another one makes it slower."""
    with pytest.raises(TimeoutError):
        call(kept, time.monotonic() + 0.05)
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

    server.dial = answered
    assert call(kept, time.monotonic() + 5) == [b"PONG"]
    assert len(server.peers) == 2
    assert server.peers[1].recv(100) == b"PING\r\n"


def test_a_new_connection_that_is_closed_at_once_is_not_tried_again(server):
    dial = server.dial

    def closed(deadline: float):
        made = dial(deadline)
        server.peers[-1].close()
        return made

    link = Link(closed, 5.0)
    with pytest.raises(ConnectionError):
        link.run(b"PING\r\n", 1, time.monotonic() + 5)
    assert len(server.peers) == 1


def test_a_server_that_never_ends_its_answer_is_left_at_the_deadline():
    """A time-out for each read would begin again with each byte."""
    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def drip() -> None:
        peer, _ = listener.accept()
        with peer, contextlib.suppress(OSError):
            while not ended.wait(0.05):
                peer.sendall(b"+")

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    port = listener.getsockname()[1]
    with listener, contextlib.closing(open_index(f"redis://127.0.0.1:{port}", timeout_s=0.2)) as i:
        asking = threading.Thread(target=lambda: outcome.append(error_of(i.ping)), daemon=True)
        outcome: list[BaseException | None] = []
        asking.start()
        asking.join(10)
        ended.set()
        thread.join(10)
    assert [type(error) for error in outcome] == [IndexDeadlineError]


def error_of(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except Exception as e:
        return e
    return None


@pytest.mark.parametrize("taken_by", ["run", "run_each"])
def test_who_is_interrupted_just_when_it_got_a_connection_costs_no_other_one(
    server, taken_by, monkeypatch
):
    """A handler of signals raised before the caller could note what it took."""
    links = Links(server.dial, "here", timeout_s=0.05, links_max=2)
    real = Links.take

    def interrupted(self, deadline):
        real(self, deadline)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Links, "take", interrupted)
        for _ in range(5):
            with pytest.raises((KeyboardInterrupt, IndexDeadlineError)):
                getattr(links, taken_by)(*([b""] if taken_by == "run" else [iter([b""])]))
    first, second = (links.take(time.monotonic()) for _ in range(2))
    with pytest.raises(IndexDeadlineError, match="all 2 connections"):
        links.take(time.monotonic())
    links.give(first)
    assert links.take(time.monotonic()) is first
    links.give(second)


def test_a_long_request_to_one_of_several_servers_waits_no_longer_than_all_may(server):
    """A server that hangs would keep those behind it waiting for a whole time-out each."""
    link = Link(server.dial, 60.0)
    link.send(b"short", time.monotonic() + 5)
    threading.Thread(target=drained, args=(server.peers[0],), daemon=True).start()
    link.send(bytes(1 << 20), time.monotonic() + 5)
    assert server.ours[-1].gettimeout() <= 5
    link.drop()


def drained(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while peer.recv(1 << 16):
            pass


class Silent:
    """A socket of a server that answers when it was waited for; notes what time it was given."""

    def __init__(self) -> None:
        self.timeout_s = 0.0
        self.waited_s: list[float] = []

    def settimeout(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def sendall(self, request: bytes) -> None:
        self.waited_s.append(self.timeout_s)

    def recv_into(self, buffer: bytearray) -> int:
        self.waited_s.append(self.timeout_s)
        buffer[:7] = b"+PONG\r\n"
        return 7

    def close(self) -> None:
        pass


@pytest.mark.parametrize("call", ["run", "run_here"])
def test_who_has_waited_for_a_connection_has_only_what_is_left(call):
    """All calls of the others before it were slow, and so is this one."""
    silent = Silent()
    link = Link(lambda deadline: (Connection(silent), b"", 0), 60.0)
    assert link.run(b"PING\r\n", 1, time.monotonic() + 60.0) == [b"PONG"]
    silent.waited_s.clear()
    assert getattr(link, call)(b"PING\r\n", 1, time.monotonic() + 30.0) == [b"PONG"]
    assert len(silent.waited_s) == 2
    assert max(silent.waited_s) <= 30.0
    silent.waited_s.clear()
    assert getattr(link, call)(b"PING\r\n", 1, time.monotonic() + 60.0) == [b"PONG"]
    assert silent.waited_s == [60.0, 60.0], "no call of the system for a time that is the usual one"


def test_a_connection_that_comes_back_to_a_closed_client_is_closed(server):
    links = Links(server.dial, "here", timeout_s=5.0, links_max=1)
    link = links.take(time.monotonic() + 5)
    link.send(b"PING\r\n", time.monotonic() + 5)
    (peer,) = server.peers
    assert peer.recv(100) == b"PING\r\n"
    links.close()
    links.give(link)
    peer.settimeout(5)
    assert peer.recv(100) == b"", "hung up"
