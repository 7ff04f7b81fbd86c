"""How a channel divides buffers among system calls."""

from __future__ import annotations

import itertools
import socket
import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from kvstore.transport.channel import IOV_MAX, Channel, advance, first

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
