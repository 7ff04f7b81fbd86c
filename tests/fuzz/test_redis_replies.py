"""Whatever a peer at the Redis port says, an index call answers or raises one error, in time."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from contract.index import every_call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.errors import IndexUnavailableError
from kvstore.index.base import KeyRecord
from kvstore.index.redis.index import open_index

KEYS = [bytes([i]) * 32 for i in range(3)]
RECORDS = [KeyRecord(key, b"r") for key in KEYS]
TIMEOUT_S = 0.05


class Peer:
    """Says the same bytes to everyone who connects, after the first byte it hears."""

    def __init__(self) -> None:
        self.says = b""
        self.hangs_up = True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer:
                try:
                    peer.settimeout(1)
                    peer.recv(1 << 16)
                    peer.sendall(self.says)
                    if not self.hangs_up:
                        peer.recv(1 << 16)
                except OSError:
                    continue

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def peer():
    peer = Peer()
    yield peer
    peer.close()


scalars = st.one_of(
    st.binary(max_size=50).map(lambda b: b"$%d\r\n%s\r\n" % (len(b), b)),
    st.sampled_from([b"$-1\r\n", b"*-1\r\n", b"*0\r\n", b":1\r\n", b"+OK\r\n", b"-ERR x\r\n"]),
    st.sampled_from([b"-MOVED 1 a:b\r\n", b"-ASK\r\n", b"-NOSCRIPT\r\n", b"-NOPERM x\r\n"]),
    st.sampled_from(
        [b"_\r\n", b"#t\r\n", b",1.5\r\n", b"(99\r\n", b">1\r\n+x\r\n", b"%1\r\n:1\r\n"]
    ),
    st.sampled_from([b"$99999999999\r\n", b"*1000000\r\n", b"-\xff\xfe\r\n", b"$-2\r\n"]),
)
replies = st.one_of(
    st.binary(max_size=80),
    st.lists(scalars, max_size=6).map(b"".join),
    st.lists(scalars, max_size=4).map(lambda items: b"*%d\r\n%s" % (len(items), b"".join(items))),
    st.binary(max_size=30).map(lambda b: b"*3\r\n$1\r\na\r\n$1\r\nb\r\n" + b),
)


NAMES = sorted(every_call(open_index("redis://127.0.0.1:1"), RECORDS))


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(
    says=replies,
    name=st.sampled_from(NAMES),
    scheme=st.sampled_from(["redis://", "redis://", "redis+cluster://"]),
)
def test_any_bytes_are_an_answer_or_an_unavailable_index(peer: Peer, says, name, scheme) -> None:
    peer.says, peer.hangs_up = says, True
    index = open_index(
        f"{scheme}127.0.0.1:{peer.port}", timeout_s=TIMEOUT_S, publish_timeout_s=TIMEOUT_S
    )
    try:
        answer = every_call(index, RECORDS)[name]()
    except IndexUnavailableError:
        return
    finally:
        index.close()
    if name in ("match", "lookup"):
        assert all(record is None or type(record) is bytes for record in answer)
        assert len(answer) == 3 or name == "match"
    elif name == "remove":
        assert type(answer) is int


def test_a_peer_that_sends_a_byte_now_and_then_does_not_stretch_the_time_out() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    done = threading.Event()

    def drip() -> None:
        peer, _ = listener.accept()
        with peer:
            peer.recv(1 << 16)
            for byte in b"*3\r\n$30\r\n" + b"x" * 60:
                if done.wait(0.1):
                    return
                peer.sendall(bytes([byte]))

    threading.Thread(target=drip, daemon=True).start()
    index = open_index(f"redis://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.4)
    begun = time.monotonic()
    with pytest.raises(IndexUnavailableError, match="within 400 ms"):
        index.match(KEYS)
    took_s = time.monotonic() - begun
    done.set()
    listener.close()
    assert took_s < 1.0


def test_more_replies_than_requests_end_the_connection(peer: Peer) -> None:
    peer.says, peer.hangs_up = b"+PONG\r\n+PONG\r\n", False
    index = open_index(f"redis://127.0.0.1:{peer.port}", timeout_s=1)
    with pytest.raises(IndexUnavailableError, match="more replies than requests"):
        index.ping()
    index.close()
