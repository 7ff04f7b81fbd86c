"""What a peer may make this process unpack, and what the project's own messages need."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgpack
import pytest

from kvstore.limits import BATCH_KEYS_MAX, LIST_ROWS_MAX, RESET_NAMESPACES_MAX
from kvstore.protocol import stream as sw
from kvstore.protocol.control import PROTOCOL_VERSION, Op, packed
from kvstore.protocol.unpacking import (
    ANSWER_LISTS_MAX,
    REQUEST_ITEMS_MAX,
    REQUEST_LISTS_MAX,
    CountingUnpacker,
    answers_unpacker,
    readers_unpacker,
)
from kvstore.types import KEY_BYTES

KEYS = bytes(BATCH_KEYS_MAX * KEY_BYTES)
UNPACKERS = [(readers_unpacker, REQUEST_LISTS_MAX), (answers_unpacker, ANSWER_LISTS_MAX)]
ITEMS = [(readers_unpacker, REQUEST_ITEMS_MAX), (answers_unpacker, ANSWER_LISTS_MAX)]


def lists(count: int, one: bytes = b"\x90") -> bytes:
    """A list of so many empty ones."""
    return b"\xdd" + struct.pack(">I", count) + one * count


def deep(count: int) -> bytes:
    """As many, in lists of two."""
    message = b"\x90"
    for _ in range(count.bit_length()):
        message = b"\x92" + message * 2
    return message


@pytest.mark.parametrize(("make", "most"), UNPACKERS)
@pytest.mark.parametrize("message", [lists, deep, lambda n: lists(n, b"\x80")])
def test_lists_and_maps_beyond_the_most_are_not_made(
    make: Callable[[], CountingUnpacker],
    most: int,
    message: Callable[[int], bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unpacker = make()
    unpacker.feed(message(4 * most))
    with pytest.raises((ValueError, msgpack.UnpackException)):
        list(unpacker)
    assert unpacker._counted.left >= -1


@pytest.mark.parametrize(("make", "most"), ITEMS)
def test_items_beyond_the_most_are_refused_at_the_head_of_their_list(
    make: Callable[[], CountingUnpacker], most: int
) -> None:
    unpacker = make()
    unpacker.feed(b"\xdd" + struct.pack(">I", most + 1))
    with pytest.raises(ValueError, match="exceeds"):
        next(unpacker)


@pytest.mark.parametrize(
    "message",
    [
        [Op.HELLO, 1, PROTOCOL_VERSION, "0" * 32, [], []],
        [Op.TOUCH, 0, KEYS],
        [Op.EXPLAIN, 2, KEYS],
        [Op.SUSPECT, 0, KEYS],
        [Op.LIST, 3, bytes(KEY_BYTES), LIST_ROWS_MAX],
        [Op.STAT, 4],
    ],
)
def test_what_a_reader_says_is_read_however_much_comes_at_once(message: list[object]) -> None:
    unpacker = readers_unpacker()
    many = packed(message) * 100
    read = []
    for start in range(0, len(many), 1 << 18):
        unpacker.feed(many[start : start + (1 << 18)])
        read += list(unpacker)
    assert read == [message] * 100


def test_a_reader_that_leaves_off_within_a_message_longer_than_any_is_not_listened_to() -> None:
    """What came of it is kept for as long as its connection lasts, and there are hundreds."""
    keys = packed([KEYS])[1:]
    unpacker = readers_unpacker()
    whole = packed([Op.TOUCH, 0, KEYS])
    for cut in (1, 100_000, len(whole) - 1):
        unpacker.feed(whole + whole[:cut])
        assert list(unpacker) == [[Op.TOUCH, 0, KEYS]]
        unpacker.feed(whole[cut:])
        assert list(unpacker) == [[Op.TOUCH, 0, KEYS]]
    unpacker.feed(b"\x9f" + keys)
    assert list(unpacker) == []
    unpacker.feed(keys)
    with pytest.raises(ValueError, match="not whole"):
        next(unpacker)


def test_what_nodes_answer_is_read() -> None:
    longest = [
        [1, True, [[1, 2, 3]] * BATCH_KEYS_MAX],
        [2, True, [[[0, 0.0]] * BATCH_KEYS_MAX, None, [[1, 2, b"{}"]] * BATCH_KEYS_MAX]],
        [3, True, [[bytes(KEY_BYTES), *range(8)]] * LIST_ROWS_MAX],
        [4, True, {"blocks": 1}],
    ]
    unpacker = answers_unpacker()
    unpacker.feed(b"".join(map(packed, longest)))
    assert list(unpacker) == longest
    for answer in longest:
        assert sw.unpack_answers(sw.pack_answers(answer)[1]) == answer


def test_a_stream_counts_lists_both_ways() -> None:
    reset = [Op.RESET, 1, 5, list(range(RESET_NAMESPACES_MAX))]
    assert sw.unpack_control(sw.pack_control(reset)[1]) == reset
    assert sw.unpack_control(sw.pack_control([Op.DROP, 1, KEYS])[1]) == [Op.DROP, 1, KEYS]
    for unpack, most in (
        (sw.unpack_control, REQUEST_LISTS_MAX),
        (sw.unpack_answers, ANSWER_LISTS_MAX),
    ):
        unpack(lists(most - 1))
        for body in (lists(most), deep(2 * most)):
            with pytest.raises(sw.WireError, match="cannot be read"):
                unpack(body)


@pytest.mark.parametrize("make", [readers_unpacker, answers_unpacker])
def test_neither_extensions_nor_keys_that_are_no_text_are_read(
    make: Callable[[], CountingUnpacker],
) -> None:
    for said in ([msgpack.ExtType(1, b"x")], {1: 2}):
        unpacker = make()
        unpacker.feed(msgpack.packb(said))
        with pytest.raises((ValueError, msgpack.UnpackException)):
            next(unpacker)


def test_a_reader_says_no_maps() -> None:
    unpacker = readers_unpacker()
    unpacker.feed(msgpack.packb([Op.STAT, 1, {"a": 1}]))
    with pytest.raises(ValueError, match="exceeds"):
        next(unpacker)
