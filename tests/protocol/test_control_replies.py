"""A node's answers about blocks: codes, words, and what is neither."""

from functools import partial

import msgpack
import pytest
from each_input import each

from kvstore.core.answers import NOT_HELD, BlockRow, Grant
from kvstore.protocol import control
from kvstore.protocol import control_replies as replies
from kvstore.protocol.control_replies import (
    OUTCOMES,
    InvalidReplyError,
    encoded,
    encoded_outcome,
    outcome,
    outcomes,
)
from kvstore.record import RECORD_BYTES, SIGNED_RECORD_BYTES
from kvstore.types import EXISTS, STORED, PutStatus, Retained, rejected


@each("result", [*OUTCOMES, NOT_HELD])
def test_an_outcome_is_the_same_once_it_was_bytes(result):
    raw = control.packed([encoded_outcome(result)])
    (back,) = outcomes(1, msgpack.unpackb(raw))
    assert back == result
    assert (back is result) == (result in OUTCOMES)


def test_a_nodes_answers_are_the_same_once_they_were_bytes():
    answers = [Grant(1, 2, 3), EXISTS, rejected("too large")]
    raw = control.packed([encoded(answers)])
    assert replies.grants(3, msgpack.unpackb(raw)[0]) == [[1, 2, 3], *answers[1:]]
    raw = control.packed([encoded([Grant(1, 2, 3), Grant(4, 5, 6)])])
    assert replies.grants(2, msgpack.unpackb(raw)[0]) == [[1, 2, 3], [4, 5, 6]]


def test_words_are_why_a_block_was_rejected():
    assert outcome("too large").status is PutStatus.REJECTED
    assert outcome("too large").reason == "too large"


@each("answer", [4, -1, True, 1.0, None, b"x", [1]])
def test_what_is_neither_a_code_nor_words_is_an_invalid_reply(answer):
    with pytest.raises(ValueError, match="expected an outcome"):
        outcome(answer)


def test_there_is_one_outcome_for_each_block():
    assert outcomes(2, [0, "no"])[0] is STORED
    assert outcomes(2, [1, 0]) == [EXISTS, STORED]
    assert outcomes(0, []) == []
    for body in ([], [0], [0, 0, 0]):
        with pytest.raises(ValueError, match="expected 2 outcomes"):
            outcomes(2, body)


ROW = [bytes(32), 1, 2, 0, 0, 1.0, None, b""]
DECODERS = {
    "whole": replies.whole,
    "grants": partial(replies.grants, 1),
    "outcomes": partial(outcomes, 1),
    "counters": replies.counters,
    "flags": replies.flags,
    "pins": replies.pins,
    "retained": partial(replies.retained, 1),
    "block_rows": replies.block_rows,
    "namespaces": replies.namespaces,
    "explained": partial(replies.explained, 1),
    "reset_number": replies.reset_number,
}
RIGHT = {
    "whole": 7,
    "grants": [[1, 2, 3]],
    "outcomes": [0],
    "counters": {"a": 1},
    "flags": [True],
    "pins": [None, "no"],
    "retained": [int(Retained.OTHERS)],
    "block_rows": [ROW],
    "namespaces": [[], None, [[1, 2, b"{}"]]],
    "explained": [[[0, 1.0]], None, [[1, 2, b"{}"]]],
    "reset_number": [1, []],
}


def spoilt(value):
    """`value` with each of its parts replaced, left out or doubled."""
    yield from (None, True, -1, 2.5, "text", b"bytes", {}, {1: 2}, [], [[]], [None], 1 << 63)
    if isinstance(value, list):
        for i, part in enumerate(value):
            for other in spoilt(part):
                yield [*value[:i], other, *value[i + 1 :]]
            yield value[:i] + value[i + 1 :]
            yield [*value, part]


@each("name", DECODERS)
def test_whatever_a_node_says_is_an_answer_or_an_invalid_reply_and_no_other_error(name):
    """Nothing is caught on the way: what else is raised would be a bug of ours."""
    DECODERS[name](RIGHT[name])
    refused = 0
    for body in spoilt(RIGHT[name]):
        try:
            DECODERS[name](body)
        except InvalidReplyError:
            refused += 1
    assert refused > 5


PINS = [None, "no", bytes(RECORD_BYTES), bytes(SIGNED_RECORD_BYTES)]


@each(
    ("name", "body", "read"),
    [
        ("counters", {"a": 1, "b": 2.5}, {"a": 1, "b": 2.5}),
        ("flags", [True, False], [True, False]),
        ("pins", PINS, PINS),
        *(("retained", [int(answer)], [answer]) for answer in Retained),
        ("block_rows", [ROW, ROW], [BlockRow(*ROW)] * 2),
        ("block_rows", [[*ROW[:5], 1, 0, b"n"]], [BlockRow(*ROW[:5], 1.0, 0.0, b"n")]),
        ("namespaces", [[], None, [[1, 2, b"{}"], [3, 4, b""]]], {1: b"{}", 3: b""}),
        ("explained", [[[5, 1]], 2.5, [[1, 2, b"{}"]]], ([5], [1.0], 2.5, [(1, 2, b"{}")])),
        ("reset_number", [7, 3], 7),
    ],
)
def test_all_that_a_node_says_is_read(name, body, read):
    assert DECODERS[name](body) == read


@pytest.mark.parametrize("answer", [7, None, {"a": 1}, Grant(1, 2, 3)])
def test_what_is_no_list_is_said_as_it_is(answer):
    assert encoded(answer) is answer


@each(
    ("name", "body"),
    [
        ("whole", -1),
        ("grants", [[1, 2]]),
        ("grants", [[1, 2, 3, 4]]),
        ("grants", [[1, 2, -1]]),
        ("grants", [[1, 2, True]]),
        ("grants", [[1, 2, 3.0]]),
        ("outcomes", [-1]),
        ("outcomes", [len(OUTCOMES)]),
        ("outcomes", [False]),
        ("counters", {1: 1}),
        ("counters", {"a": "1"}),
        ("counters", {"a": True}),
        ("flags", [True, 1]),
        ("pins", [7]),
        ("pins", [bytes(RECORD_BYTES - 1)]),
        ("pins", [bytes(SIGNED_RECORD_BYTES + 1)]),
        ("retained", [max(Retained) + 1]),
        ("block_rows", [["key", *ROW[1:]]]),
        ("block_rows", [[*ROW[:-1], "name"]]),
    ],
)
def test_a_single_wrong_part_makes_an_answer_invalid(name, body):
    with pytest.raises(InvalidReplyError):
        DECODERS[name](body)


def nested(levels):
    """As deep as msgpack takes it; deeper than `repr` does."""
    return msgpack.unpackb(b"\x91" * levels + b"\x00")


@each("levels", [10, 1000])
@each("decode", [replies.outcome, replies.whole, replies.block_rows])
def test_an_answer_of_lists_in_lists_is_an_invalid_reply(decode, levels):
    """A node of another user, or on another host, may say anything."""
    with pytest.raises(InvalidReplyError, match="expected"):
        decode({"not": nested(levels)})
    with pytest.raises(InvalidReplyError, match="expected"):
        decode(nested(levels))
