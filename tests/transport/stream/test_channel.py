"""How a channel divides buffers among system calls, and that each ends by its deadline."""

from __future__ import annotations

import itertools
import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tls_certificate import tls_contexts

from kvstore.errors import DeadlineError, NodeUnavailableError, PeerError
from kvstore.transport.stream.channel import IOV_MAX, Channel, advance, first

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=2 * IOV_MAX)


def _buffers(sizes: list[int]) -> list[memoryview]:
    count = itertools.count()
    return [memoryview(bytes(next(count) % 251 for _ in range(size))) for size in sizes]


@given(sizes=SIZES, size_bytes=st.integers(1, 400))
def test_calls_of_limited_size_move_every_byte_once_and_in_order(
    sizes: list[int], size_bytes: int
) -> None:
    left = _buffers(sizes)
    whole = b"".join(left)
    moved = b""
    while left:
        some = first(left, size_bytes)
        assert 0 < sum(view.nbytes for view in some) <= size_bytes
        assert len(some) <= IOV_MAX
        moved += b"".join(some)
        advance(left, sum(view.nbytes for view in some))
    assert moved == whole


@given(sizes=SIZES, size_bytes=st.integers(1, 400))
def test_a_call_takes_all_that_it_may(sizes: list[int], size_bytes: int) -> None:
    buffers = _buffers(sizes)
    taken = sum(view.nbytes for view in first(buffers, size_bytes))
    assert taken == min(size_bytes, sum(sizes[:IOV_MAX]))


def test_buffers_larger_and_smaller_than_a_call_arrive_as_they_were_sent() -> None:
    sizes = [3 << 20, 1, 700_000, 0, 5, (768 << 10) + 1]
    sent = [bytes([i + 1]) * size for i, size in enumerate(sizes)]
    deadline = time.monotonic() + 20
    near, far = (Channel(end) for end in socket.socketpair())
    sender = threading.Thread(target=near.send, args=(sent, deadline))
    sender.start()
    arrived = [bytearray(size) for size in (2 << 20, 1 << 20, 700_006, (768 << 10) + 1)]
    far.receive([memoryview(part) for part in arrived], deadline)
    sender.join()
    assert b"".join(arrived) == b"".join(sent)
    assert far.quiet()
    near.close()
    far.close()


# --- with TLS, and between threads ---------------------------------------------------


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    return tls_contexts(tmp_path_factory.mktemp("tls"))


@pytest.fixture(params=["plain", "tls"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a connection, with buffers of the kernel as small as they can be."""
    with socket.socket() as listener:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        near = socket.socket()
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            near.setsockopt(socket.SOL_SOCKET, option, 1)
        near.connect(listener.getsockname())
        far, _ = listener.accept()
    if request.param == "tls":
        near, far = encrypted(near, far, request.getfixturevalue("contexts"))
    channels = Channel(near), Channel(far)
    yield channels
    for channel in channels:
        channel.close()


def encrypted(
    near: socket.socket, far: socket.socket, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    ours, theirs = contexts
    with ThreadPoolExecutor(1) as other:
        there = other.submit(theirs.wrap_socket, far, server_side=True)
        here = ours.wrap_socket(near, server_hostname="127.0.0.1")
        return here, there.result()


def test_a_send_to_a_peer_that_takes_little_at_a_time_ends_by_its_deadline(
    ends: tuple[Channel, Channel],
) -> None:
    """Each little is progress: the time is for all of it."""
    near, far = ends
    over = threading.Event()

    def take_little() -> None:
        with suppress(PeerError):
            while not over.wait(0.02):
                far.receive_some([memoryview(bytearray(16 << 10))], 20.0)

    taker = threading.Thread(target=take_little)
    taker.start()
    began = time.monotonic()
    with pytest.raises(DeadlineError):
        near.send([bytes(64 << 20)], began + 0.3)
    assert time.monotonic() - began < 5
    over.set()
    near.break_off()
    taker.join()


def test_a_receive_from_a_peer_that_gives_little_at_a_time_ends_by_its_deadline(
    ends: tuple[Channel, Channel],
) -> None:
    near, far = ends
    over = threading.Event()

    def give_little() -> None:
        while not over.wait(0.02):
            far.send([b"x"], time.monotonic() + 20)

    giver = threading.Thread(target=give_little)
    giver.start()
    began = time.monotonic()
    with pytest.raises(DeadlineError):
        near.receive_bytes(10_000, began + 0.3)
    assert time.monotonic() - began < 5
    over.set()
    giver.join()


def test_a_tls_handshake_whose_bytes_drip_ends_by_its_time(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    """As the node and its clients set it: Python counts it for all of a handshake."""
    near, far = socket.socketpair()
    over = threading.Event()

    def drip() -> None:
        near.sendall(b"\x16\x03\x01\x02\x00\x01")  # the record and message that it begins with
        with suppress(OSError):
            while not over.wait(0.05):
                near.sendall(b"\0")

    dripping = threading.Thread(target=drip)
    dripping.start()
    far.settimeout(0.3)
    began = time.monotonic()
    with far, pytest.raises(TimeoutError):
        contexts[1].wrap_socket(far, server_side=True)
    assert time.monotonic() - began < 5
    over.set()
    dripping.join()
    near.close()


def test_what_is_received_after_a_break_is_what_was_sent_or_nothing(
    ends: tuple[Channel, Channel],
) -> None:
    """Another thread may have broken it off just before: the bytes are here already."""
    near, far = ends
    far.send([b"x" * 1000], time.monotonic() + 20)
    time.sleep(0.05)
    near.break_off()
    room = bytearray(1000)
    with suppress(NodeUnavailableError):
        near.receive_some([memoryview(room)], 20.0)
        assert room == b"x" * 1000


def test_nothing_is_sent_after_a_break(ends: tuple[Channel, Channel]) -> None:
    near, _ = ends
    near.break_off()
    with pytest.raises(NodeUnavailableError):
        near.send([b"secret"], time.monotonic() + 20)


@pytest.fixture
def signals() -> Iterator[list[float]]:
    """When the main thread was interrupted, which is often; as by a profiler."""
    at: list[float] = []
    over = threading.Event()
    this = threading.get_ident()

    def interrupt() -> None:
        while not over.wait(0.02):
            signal.pthread_kill(this, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: at.append(time.monotonic()))
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    yield at
    over.set()
    interrupter.join()
    signal.signal(signal.SIGUSR1, before)


WAYS: dict[str, Callable[[Channel, float], object]] = {
    "send": lambda channel, deadline: channel.send([bytes(64 << 20)], deadline),
    "receive": lambda channel, deadline: channel.receive_bytes(10, deadline),
}


@pytest.mark.parametrize("way", WAYS)
def test_signals_do_not_make_a_deadline_later(
    ends: tuple[Channel, Channel], signals: list[float], way: str
) -> None:
    """A system call that was interrupted begins anew, and so would its time."""
    near, _ = ends
    began = time.monotonic()
    rescue = threading.Timer(20, near.break_off)
    rescue.start()
    with pytest.raises(DeadlineError):
        WAYS[way](near, began + 0.3)
    rescue.cancel()
    assert time.monotonic() - began < 5
    assert signals


def test_bytes_arrive_as_they_were_sent_while_signals_come(
    ends: tuple[Channel, Channel], signals: list[float]
) -> None:
    near, far = ends
    sent = [bytes([i]) * (1 << 20) for i in range(4)]
    room = bytearray(4 << 20)
    deadline = time.monotonic() + 60
    sender = threading.Thread(target=near.send, args=(sent, deadline))
    sender.start()
    far.receive([memoryview(room)], deadline)
    sender.join()
    assert room == b"".join(sent)


def left_in_the_kernel_s(end: socket.socket, option: int) -> float:
    seconds, microseconds = struct.unpack("@ll", end.getsockopt(socket.SOL_SOCKET, option, 16))
    return float(seconds + microseconds / 1e6)


def test_what_the_first_byte_took_is_not_there_for_the_rest() -> None:
    """A peer that says a part of its answer late and then nothing has one deadline, not two: the
    wait for the first byte, and that for the others."""
    near, far = socket.socketpair()
    channel = Channel(near)
    began = time.monotonic()

    def say_late() -> None:
        time.sleep(0.3)
        far.sendall(b"part")
        time.sleep(0.1)
        far.sendall(b" of it")

    sayer = threading.Thread(target=say_late, daemon=True)
    sayer.start()
    assert channel.receive_bytes(10, began + 20.0) == b"part of it"
    assert left_in_the_kernel_s(near, socket.SO_RCVTIMEO) <= 19.7
    sayer.join()
    channel.close()
    far.close()


def test_what_the_wait_for_room_took_is_not_there_for_the_rest() -> None:
    near, far = socket.socketpair()
    channel = Channel(near)
    room = bytearray(1 << 20)
    near.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            near.send(room)
    near.setblocking(True)
    began = time.monotonic()

    def take_late() -> None:
        time.sleep(0.3)
        with suppress(OSError):
            while far.recv_into(room):
                pass

    taker = threading.Thread(target=take_late, daemon=True)
    taker.start()
    channel.send([b"x"], began + 20.0)
    assert left_in_the_kernel_s(near, socket.SO_SNDTIMEO) <= 19.7
    channel.close()
    taker.join()
    far.close()


@pytest.mark.parametrize("option", [socket.SO_RCVTIMEO, socket.SO_SNDTIMEO])
def test_the_kernel_waits_for_parts_of_a_second_too(option: int) -> None:
    near, far = socket.socketpair()
    channel = Channel(near)
    channel._limit(option, time.monotonic() + 0.75)
    assert 0.5 < left_in_the_kernel_s(near, option) < 0.8
    channel.close()
    far.close()
