"""Connections to one node, and signal handlers that raise where it is least convenient."""

import socket
import time

import pytest

from kvstore.errors import DeadlineError
from kvstore.limits import STREAM_CONNECTIONS_PER_NODE
from kvstore.transport.stream.channel import Channel
from kvstore.transport.stream.transport import Pool


@pytest.fixture
def pool():
    peers: list[socket.socket] = []

    def connect(_: float) -> Channel:
        ours, theirs = socket.socketpair()
        peers.append(theirs)
        return Channel(ours)

    pool = Pool(connect)
    yield pool
    pool.close()
    for peer in peers:
        peer.close()


def raising_after(call):
    def interrupted(*args):
        call(*args)
        raise KeyboardInterrupt

    return interrupted


@pytest.mark.filterwarnings("ignore:unclosed")
@pytest.mark.parametrize("point", ["_kept", "_connect", "_leave", "take"])
def test_who_is_interrupted_while_it_takes_a_connection_keeps_no_place(pool, point, monkeypatch):
    now = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(pool, point, raising_after(getattr(pool, point)))
        for _ in range(2 * STREAM_CONNECTIONS_PER_NODE):
            with pytest.raises(KeyboardInterrupt):
                pool.give(pool.take(now + 60), in_step=True)
    taken = [pool.take(now) for _ in range(STREAM_CONNECTIONS_PER_NODE)]
    with pytest.raises(DeadlineError, match="in use"):
        pool.take(now)
    for channel in taken:
        pool.give(channel, in_step=True)
    assert pool.take(now) in taken


def test_a_child_may_give_back_what_its_parent_took(pool):
    channel = pool.take(time.monotonic())
    pool.abandon()
    pool.give(channel, in_step=False)
