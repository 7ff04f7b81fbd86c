"""Connections by a deadline, though a name server hangs: `getaddrinfo` is the one that waits."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from each_input import each
from own_python import holds_in_child
from redis_servers import RedisServer, free_port, wait_until
from stores import announcement

from kvstore.errors import IndexDeadlineError, IndexUnavailableError
from kvstore.index.open import open_guarded
from kvstore.index.redis.index import open_index
from kvstore.limits import NAMES_LOOKED_UP_MAX, Limits
from kvstore.system import tcp
from kvstore.transport.base import Read, Wanted
from kvstore.transport.stream.security import StreamSecurity
from kvstore.transport.stream.transport import NAME as STREAM
from kvstore.transport.stream.transport import StreamTransport
from kvstore.types import Location

HANGS_S = 60.0
"""How long a look-up takes that is not let go: no test waits for it."""


class NameServer:
    """Answers every name with loopback, once it is let."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers = threading.Event()
        self._real = socket.getaddrinfo

    def __call__(self, host: str, port: int, *args: Any, **options: Any) -> Any:
        self.asked.append(host)
        if not self.answers.wait(HANGS_S):
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        if host.startswith("no-such"):
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return self._real("127.0.0.1", port, *args, **options)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer()
    monkeypatch.setattr(tcp, "_names", tcp._Names())
    monkeypatch.setattr(socket, "getaddrinfo", server)
    yield server
    server.answers.set()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def port_of(listening: socket.socket) -> int:
    return int(listening.getsockname()[1])


def soon(seconds: float = 0.05) -> float:
    return time.monotonic() + seconds


def far() -> float:
    return soon(20.0)


def look_ups() -> int:
    return sum(thread.name == "kvstore-name" for thread in threading.enumerate())


def late(call: Callable[[], object], error: type[Exception] = TimeoutError) -> None:
    """It ends by its deadline, of a fraction of a second."""
    began = time.monotonic()
    with pytest.raises(error):
        call()
    assert time.monotonic() - began < HANGS_S / 4


def test_a_name_that_is_not_looked_up_in_time_fails_at_the_deadline(names: NameServer) -> None:
    late(lambda: tcp.connect("slow.example", 1, soon()))


def test_an_answer_that_comes_too_late_serves_the_next_caller(
    names: NameServer, listener: socket.socket
) -> None:
    port = port_of(listener)
    late(lambda: tcp.connect("slow.example", port, soon()))
    names.answers.set()
    with tcp.connect("slow.example", port, far()) as connection:
        assert connection.getpeername() == listener.getsockname()
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert names.asked == ["slow.example"]


def test_callers_of_one_name_wait_for_one_thread(names: NameServer) -> None:
    for _ in range(3):
        late(lambda: tcp.connect("slow.example", 1, soon()))
    assert names.asked == ["slow.example"]


def test_threads_that_hang_are_few_and_one_name_more_fails_at_once(names: NameServer) -> None:
    for i in range(NAMES_LOOKED_UP_MAX):
        late(lambda i=i: tcp.connect(f"slow{i}.example", 1, soon(0.01)))
    late(lambda: tcp.connect("one-more.example", 1, far()))
    assert len(names.asked) == look_ups() == NAMES_LOOKED_UP_MAX
    names.answers.set()
    wait_until(lambda: look_ups() == 0, "they end when they are answered")
    late(lambda: tcp.connect("no-such.example", 1, far()), socket.gaierror)


def test_a_name_that_there_is_not_is_asked_for_again(names: NameServer) -> None:
    names.answers.set()
    for _ in range(2):
        late(lambda: tcp.connect("no-such.example", 1, far()), socket.gaierror)
    late(lambda: tcp.connect("x" * 64 + ".example", 1, far()), OSError)
    assert names.asked[:2] == ["no-such.example"] * 2


def test_what_is_kept_of_names_ages(
    names: NameServer, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    names.answers.set()
    port = port_of(listener)
    tcp.connect("a.example", port, far()).close()
    tcp.connect("a.example", port, far()).close()
    assert names.asked == ["a.example"]
    monkeypatch.setattr(tcp, "NAME_KEPT_S", 0.0)
    tcp.connect("b.example", port, far()).close()
    tcp.connect("b.example", port, far()).close()
    assert names.asked == ["a.example", "b.example", "b.example"]


def test_addresses_need_no_name_server(names: NameServer, listener: socket.socket) -> None:
    names.answers.set()  # it is only called, in this thread, to make a sockaddr
    tcp.connect("127.0.0.1", port_of(listener), far()).close()
    assert look_ups() == 0
    with pytest.raises(OSError, match=r"refused|assign|family"):
        tcp.connect("::1", free_port(), far())


@each("host", ["a\0b", "\ud800", "a..b", "x" * 64, ""])
def test_what_can_be_no_name_fails_like_one_that_there_is_not(host: str) -> None:
    with pytest.raises(OSError, match=r"host name|known|refused|address"):
        tcp.connect(host, free_port(), far())


def test_a_host_without_threads_to_give_cannot_look_a_name_up(
    names: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    names.answers.set()
    for _ in range(NAMES_LOOKED_UP_MAX + 1):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            late(lambda: tcp.connect("a.example", 1, far()), OSError)
    late(lambda: tcp.connect("a.example", free_port(), far()), ConnectionRefusedError)


def test_an_address_that_does_not_answer_leaves_time_for_the_next(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a host with IPv6 in its name's entry and none on the way."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
        socket.create_connection(full.getsockname()),  # its queue takes one, and answers no other
    ):
        found = [
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", end.getsockname())
            for end in (full, listener)
        ]
        monkeypatch.setattr(tcp, "addresses", lambda *_: found)
        with tcp.connect("both.example", 1, soon(2.0)) as connection:
            assert connection.getpeername() == listener.getsockname()


def test_a_child_process_asks_for_itself(names: NameServer, listener: socket.socket) -> None:
    late(lambda: tcp.connect("slow.example", 1, soon()))

    def connected() -> bool:
        names.answers.set()
        tcp.connect("slow.example", port_of(listener), far()).close()
        return True

    assert holds_in_child(connected)  # the thread that hangs is the parent's


# --- by those who connect ------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "redis://redis.example:6379",
        "rediss://redis.example:6379",
        "redis+cluster://redis.example:6379",
        "redis+sentinel://redis.example:26379/main",
    ],
)
def test_a_call_of_the_index_keeps_its_deadline_while_names_are_not_answered(
    names: NameServer, url: str
) -> None:
    index = open_index(url, timeout_s=0.05, publish_timeout_s=0.05)
    late(lambda: index.match([b"k" * 32]), IndexUnavailableError)
    late(lambda: index.incarnation(), IndexUnavailableError)
    index.close()


def test_a_hanging_name_server_opens_the_breaker_and_redis_is_found_once_it_answers(
    names: NameServer,
) -> None:
    with RedisServer(port=free_port()) as server:
        limits = Limits(redis_timeout_s=0.2)
        url = f"redis://redis.example:{server.port}"
        index = open_guarded(url, key_prefix="kv:t", run_dir=server.directory, limits=limits).index
        late(lambda: index.match([b"k" * 32]), IndexDeadlineError)
        late(lambda: index.match([b"k" * 32]), IndexUnavailableError)
        names.answers.set()

        def answers() -> bool:
            try:
                return index.match([b"k" * 32]) == []
            except IndexUnavailableError:
                return False

        wait_until(answers, "the breaker closes")
        index.close()


def test_a_read_from_another_host_keeps_its_deadline_while_names_are_not_answered(
    names: NameServer,
) -> None:
    word = announcement(transports={STREAM: "tcp://node.example:4000"})
    transport = StreamTransport(StreamSecurity(secret=b"a secret that both know"))
    wanted = Wanted(b"k" * 32, Location(1, 1, 0, 0, 1, 0, 8, 0), (memoryview(bytearray(8)),))
    began = time.monotonic()
    (outcome,) = transport.read(word, [wanted], soon())
    assert outcome.read is Read.FAILED
    assert time.monotonic() - began < HANGS_S / 4
    transport.close()
