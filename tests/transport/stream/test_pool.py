"""Connections to one node, and signal handlers that raise where it is least convenient."""

import dataclasses
import socket
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
from contract.transport import SECURITY

from kvstore.errors import DeadlineError
from kvstore.limits import STREAM_CONNECTIONS_PER_NODE, STREAM_IDLE_TIMEOUT_S
from kvstore.nodedir import Announcement
from kvstore.transport.stream import transport
from kvstore.transport.stream.channel import Channel
from kvstore.transport.stream.transport import NAME, Pool, StreamTransport


@pytest.fixture
def peers():
    """The other ends of a pool's connections."""
    peers: list[socket.socket] = []
    yield peers
    for peer in peers:
        peer.close()


@pytest.fixture
def pool(peers):
    def connect(_: float) -> Channel:
        ours, theirs = socket.socketpair()
        peers.append(theirs)
        return Channel(ours)

    pool = Pool(connect)
    yield pool
    pool.close()


def node_at(number: int, address: str) -> Announcement:
    return Announcement(
        node_id=number,
        epoch=1,
        name="far",
        host="far",
        pid=1,
        key_prefix="kv",
        data_path="",
        head_path="",
        control_path="",
        size_bytes=1,
        inline_bytes=0,
        transports={NAME: address},
    )


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


@pytest.fixture
def clock(monkeypatch):
    """The time that pools go by."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def given_back(pool, clock):
    channel = pool.take(clock.now + 60)
    pool.give(channel, in_step=True)
    return channel


def is_closed(channel):
    return channel._socket.fileno() < 0


def test_a_pool_whose_node_has_hung_up_is_of_no_use_after_a_while(clock, pool, peers):
    channel = given_back(pool, clock)
    clock.now += transport.UNUSED_S
    assert not pool.retired(), "its connection is good"
    peers[0].close()
    clock.now -= 1.0
    assert not pool.retired(), "it was used just now"
    clock.now += 1.0
    assert pool.retired()
    assert is_closed(channel)
    assert is_closed(given_back(pool, clock)), "it goes on, and keeps nothing"


def test_a_pool_that_nobody_used_for_as_long_as_a_node_waits_is_of_no_use(clock, pool):
    channel = given_back(pool, clock)
    clock.now += STREAM_IDLE_TIMEOUT_S - 1.0
    assert not pool.retired()
    clock.now += 1.0
    assert pool.retired()
    assert is_closed(channel)


def test_a_pool_that_is_in_use_stays(clock, pool):
    channel = pool.take(clock.now + 60)
    clock.now += 2 * STREAM_IDLE_TIMEOUT_S
    assert not pool.retired()
    pool.give(channel, in_step=True)
    assert pool.take(clock.now + 60) is channel


def test_nodes_that_are_gone_leave_nothing_behind(clock):
    """Hosts that come and go under names of their own: each had a pool for ever."""
    stream = StreamTransport(SECURITY)
    for number in range(10):
        with closing(socket.create_server(("127.0.0.1", 0))) as nobody:
            address = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        stream.pool(node_at(number, address))
        clock.now += transport.UNUSED_S
    assert len(stream._pools) == 1
    stream.close()


def test_a_child_may_give_back_what_its_parent_took(pool):
    channel = pool.take(time.monotonic())
    pool.abandon()
    pool.give(channel, in_step=False)


def test_a_nodes_next_start_takes_the_place_of_its_former_one(clock):
    stream = StreamTransport(SECURITY)
    node = node_at(1, "tcp://127.0.0.1:1")
    former = stream.pool(node)
    later = stream.pool(dataclasses.replace(node, epoch=2))
    assert later is not former
    assert list(stream._pools.values()) == [later]
    stream.close()
