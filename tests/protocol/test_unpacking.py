"""What a peer may make this process unpack, and what the project's own messages need."""

from __future__ import annotations

import struct

import msgpack
import pytest
from each_input import each

from kvstore.client.nodes.control import RECV_BYTES
from kvstore.limits import (
    BATCH_KEYS_MAX,
    LIST_ROWS_MAX,
    NAME_BYTES_MAX,
    NAMESPACE_BYTES_MAX,
    NAMESPACES_MAX,
    RESET_NAMESPACES_MAX,
)
from kvstore.protocol import stream as sw
from kvstore.protocol.control import PROTOCOL_VERSION, Op, packed
from kvstore.protocol.unpacking import (
    ANSWER_LISTS_MAX,
    OTHERS_ANSWER_BYTES_MAX,
    READER_MESSAGE_BYTES_MAX,
    REQUEST_LISTS_MAX,
    ShortMessages,
)
from kvstore.types import KEY_BYTES

KEY = bytes(KEY_BYTES)
KEYS = bytes(BATCH_KEYS_MAX * KEY_BYTES)


def lists(count: int, one: bytes = b"\x90") -> bytes:
    """A list of so many empty ones."""
    return b"\xdd" + struct.pack(">I", count) + one * count


def deep(count: int) -> bytes:
    """As many, in lists of two."""
    message = b"\x90"
    for _ in range(count.bit_length()):
        message = b"\x92" + message * 2
    return message


@each(
    "message",
    [
        [Op.HELLO, 1, PROTOCOL_VERSION, "0" * 32, [], []],
        [Op.EXPLAIN, 2, KEY],
        [Op.LIST, 3, KEY, LIST_ROWS_MAX],
        [Op.STAT, 4],
        [Op.BYE, 0],
    ],
)
def test_what_another_user_asks_is_read_also_when_several_ask_at_once(
    message: list[object],
) -> None:
    messages = ShortMessages(READER_MESSAGE_BYTES_MAX)
    for _ in range(3):
        messages.feed(packed(message) * 30)
        assert list(messages) == [message] * 30


def taken_of(messages: ShortMessages, said: bytes, piece_bytes: int) -> int:
    """How much is taken of a message that comes in pieces, before it is refused."""
    try:
        for start in range(0, len(said), piece_bytes):
            messages.feed(said[start : start + piece_bytes])
            assert list(messages) == []
    except (ValueError, msgpack.UnpackException):
        return start
    return len(said)


@pytest.mark.parametrize(
    "bytes_max",
    [READER_MESSAGE_BYTES_MAX, pytest.param(OTHERS_ANSWER_BYTES_MAX, marks=pytest.mark.long)],
)
def test_another_user_has_no_more_lists_made_than_a_message_may_have_bytes(bytes_max: int) -> None:
    for message in (lists, deep, lambda n: lists(n, b"\x80")):
        said = b"\x92\xc0" + message(4 * bytes_max)
        for piece_bytes in (bytes_max // 4, bytes_max, 4 * bytes_max):
            assert taken_of(ShortMessages(bytes_max), said, piece_bytes) <= bytes_max


def test_what_came_before_counts_for_no_message() -> None:
    messages, message = ShortMessages(READER_MESSAGE_BYTES_MAX), packed([Op.EXPLAIN, 2, KEY])
    for _ in range(1000):
        messages.feed(message + message[:9])
        assert len(list(messages)) == 1
        messages.feed(message[9:])
        assert len(list(messages)) == 1


def test_what_another_users_node_answers_is_read() -> None:
    row = [KEY, 1 << 30, (1 << 32) - 1, 9, 1, 1e6, 1e6, bytes(NAME_BYTES_MAX)]
    fields = [[(1 << 32) - 1, 1 << 20, bytes(NAMESPACE_BYTES_MAX)]] * NAMESPACES_MAX
    for body in ([row] * LIST_ROWS_MAX, [[[0, 1.0]], 1.0, fields], {"blocks": 1}):
        messages, said = ShortMessages(OTHERS_ANSWER_BYTES_MAX), packed([1, True, body])
        read = []
        for start in range(0, len(said), RECV_BYTES):
            messages.feed(said[start : start + RECV_BYTES])
            read += list(messages)
        assert read == [[1, True, body]]


def test_what_nodes_answer_over_a_stream_is_read() -> None:
    longest = [
        [1, True, [[1, 2, 3]] * BATCH_KEYS_MAX],
        [2, True, [[[0, 0.0]] * BATCH_KEYS_MAX, None, [[1, 2, b"{}"]] * BATCH_KEYS_MAX]],
        [3, True, [[KEY, *range(8)]] * LIST_ROWS_MAX],
        [4, True, {"blocks": 1}],
    ]
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


def test_neither_extensions_nor_keys_that_are_no_text_are_read() -> None:
    for said in ([msgpack.ExtType(1, b"x")], {1: 2}):
        messages = ShortMessages(READER_MESSAGE_BYTES_MAX)
        messages.feed(msgpack.packb(said))
        with pytest.raises((ValueError, msgpack.UnpackException)):
            next(messages)
