import ctypes
import threading
import time

import pytest
from each_input import each

from kvstore.segment.copying import GIL_FREE_BYTES, copy
from kvstore.system.memory_files import address_of


@each("size", [0, 1, 4096, GIL_FREE_BYTES - 1, GIL_FREE_BYTES, 3 << 20])
def test_a_copy_is_exact_whatever_its_size(size):
    source = bytes(i * 31 % 251 for i in range(min(size, 1000))) * (size // 1000 + 1)
    target = bytearray(size + 2)
    copy(memoryview(target)[1 : size + 1], memoryview(source)[:size])
    assert bytes(target) == b"\0" + source[:size] + b"\0"


@pytest.mark.parametrize("size", [100, GIL_FREE_BYTES])
def test_a_copy_between_unequal_sizes_is_refused(size):
    with pytest.raises(ValueError):
        copy(memoryview(bytearray(size - 1)), memoryview(bytes(size)))


@pytest.mark.parametrize("size", [100, GIL_FREE_BYTES])
def test_a_copy_into_read_only_memory_is_refused(size):
    with pytest.raises((ValueError, TypeError)):
        copy(memoryview(bytes(size)), memoryview(bytes(size)))


def test_a_large_copy_lets_other_threads_run():
    source, target = bytes(256 << 20), bytearray(256 << 20)
    ticks = []
    stop = threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    started = time.monotonic()
    copy(memoryview(target), memoryview(source))
    ended = time.monotonic()
    stop.set()
    thread.join()
    assert [t for t in ticks if started < t < ended]


def test_a_copy_keeps_hold_of_neither_buffer():
    source, destination = bytearray(GIL_FREE_BYTES), bytearray(GIL_FREE_BYTES)
    with memoryview(source) as from_, memoryview(destination) as to:
        copy(to, from_)
    source.clear()
    destination.clear()


def test_an_address_is_where_a_view_begins_and_keeps_hold_of_nothing():
    memory = bytearray(100)
    begins = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with memoryview(memory) as view:
        assert address_of(view) == begins
        with view[7:] as rest, view.toreadonly() as read_only:
            assert address_of(rest) == begins + 7
            assert address_of(read_only) == begins
    memory.clear()
