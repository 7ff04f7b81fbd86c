"""An answer to READ as bytes: what it says of each block, and nothing beyond what was asked."""

import pytest
import xxhash
from each_input import each
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.limits import META_BYTES_MAX
from kvstore.protocol import stream_reply as sr
from kvstore.protocol.stream import WireError
from kvstore.protocol.stream_reply import BlockReply, Head, ReadReply, Sent, Tail
from kvstore.protocol.stream_seal import PLAIN, TAG_BYTES, Mac, keyed


def heads(*heads):
    return sr.pack_heads([Head(*head) for head in heads], PLAIN)


def tails(*tails):
    return sr.pack_tails([Tail(*tail) for tail in tails], PLAIN)


GOOD, MISS = (Sent.GOOD,), (Sent.MISS,)


def test_a_reply_says_what_comes_and_what_came():
    reply = ReadReply([10, 20, 30, 40])
    assert reply.heads(heads((Sent.GOOD, 2, 3), MISS, GOOD, GOOD), PLAIN) == [[0, 2, 3]]
    assert reply.replies == [None, BlockReply(good=False), None, None]
    assert None in reply.replies
    reply.tails(tails((Sent.GOOD, 5), (Sent.MISS, 7), (Sent.GOOD, 6)), PLAIN)
    assert None not in reply.replies
    assert reply.replies == [
        BlockReply(True, 2, 3, 5),
        BlockReply(good=False),
        BlockReply(good=False),
        BlockReply(True, 0, 0, 6),
    ]


def test_a_reply_of_misses_is_done_with_its_heads():
    reply = ReadReply([10, 20])
    assert reply.heads(heads(MISS, MISS), PLAIN) == []
    assert None not in reply.replies


def test_blocks_are_judged_group_by_group():
    half = sr.GROUP_BYTES // 2
    reply = ReadReply([half, half, 1])
    assert reply.heads(heads(GOOD, GOOD, GOOD), PLAIN) == [[0, 1], [2]]
    reply.tails(tails((Sent.GOOD, 5), (Sent.GOOD, 6)), PLAIN)
    assert [r is not None for r in reply.replies] == [True, True, False]
    reply.tails(tails((Sent.GOOD, 7)), PLAIN)
    assert None not in reply.replies


@given(st.integers(0, 300))
def test_heads_and_tails_take_whole_cache_lines_just_enough_for_them_and_their_tags(blocks):
    head, tail = sr._HEAD.size, sr._TAIL.size
    for size, need in (
        (sr.heads_bytes(blocks), blocks * head + TAG_BYTES),
        (sr.tails_bytes(blocks), blocks * tail + 2 * TAG_BYTES),
    ):
        assert size % 64 == 0
        assert need <= size < need + 64
    assert len(heads(*[GOOD] * blocks)) == sr.heads_bytes(blocks)
    assert len(tails(*[(Sent.GOOD, 1)] * blocks)) == sr.tails_bytes(blocks)


@pytest.mark.parametrize("part", ["heads", "tails"])
def test_a_reply_with_one_bit_changed_is_refused(part):
    good = {"heads": heads(GOOD), "tails": tails((Sent.GOOD, 1))}
    for bit in range(len(good[part]) * 8):
        said = dict(good)
        raw = bytearray(said[part])
        raw[bit // 8] ^= 1 << bit % 8
        said[part] = bytes(raw)
        reply = ReadReply([10])
        if part == "tails":
            reply.heads(said["heads"], PLAIN)
        with pytest.raises(WireError, match="damaged"):
            getattr(reply, part)(said[part], PLAIN)


@pytest.mark.parametrize("length", [5, 1 << 20])
def test_meta_may_be_all_of_a_block_up_to_the_limit(length):
    meta = min(length, META_BYTES_MAX, 255)
    reply = ReadReply([length])
    assert reply.heads(heads((Sent.GOOD, 1, meta)), PLAIN) == [[0]]


def test_payloads_with_another_tag_are_no_blocks():
    """Nothing was called off: so somebody changed them."""
    ours, theirs = keyed(Mac.BLAKE3, b"1" * 32, b"2" * 32), keyed(Mac.BLAKE3, b"2" * 32, b"1" * 32)
    reply = ReadReply([10, 10])
    reply.heads(sr.pack_heads([Head(Sent.GOOD), Head(Sent.GOOD)], theirs.sent), ours.received)
    theirs.sent.update(memoryview(b"what was sent"))
    ours.received.update(memoryview(b"what arrived!"))
    raw = sr.pack_tails([Tail(Sent.GOOD, 1), Tail(Sent.GOOD, 2)], theirs.sent)
    reply.tails(raw, ours.received)
    assert reply.replies == [sr.BlockReply(False, damaged=True)] * 2


def test_a_block_of_no_bytes_begins_a_group_of_its_own_after_a_full_one():
    assert sr.grouped([(0, sr.GROUP_BYTES), (1, 0), (2, 1)]) == [[0, 1], [2]]
    assert sr.grouped([(0, 0)]) == [[0]]


@given(st.lists(st.integers(0, 2 * sr.GROUP_BYTES), max_size=20))
def test_every_block_is_in_one_group_in_its_order_and_only_a_single_one_is_larger(lengths):
    groups = sr.grouped(enumerate(lengths))
    assert [i for group in groups for i in group] == list(range(len(lengths)))
    for group in groups:
        assert group
        assert len(group) == 1 or sum(lengths[i] for i in group) <= sr.GROUP_BYTES


@each(
    "said",
    [
        [heads((0,))],
        [heads((7,))],
        [heads((Sent.GOOD, 9))],
        [heads((Sent.GOOD, 0, 11))],
        [heads(GOOD, GOOD)],
        [heads()],
        [b""],
        [bytes(7)],
        [bytes(8)],
        [heads(GOOD), tails((0, 0))],
        [heads(GOOD), tails((9, 0))],
        [heads(GOOD), tails((Sent.GOOD, 1), (Sent.GOOD, 1))],
        [heads(GOOD), tails()],
        [heads(GOOD), b""],
        [heads(GOOD), bytes(16)],
        [heads(MISS), tails((Sent.GOOD, 1))],
        [heads(GOOD), tails((Sent.GOOD, 1)), tails((Sent.GOOD, 1))],
    ],
    ids=range(17),
)
def test_a_reply_that_breaks_the_rules_is_refused(said):
    reply = ReadReply([10])
    takes = [reply.heads, reply.tails, reply.tails]
    for take, raw in zip(takes, said[:-1], strict=False):
        take(raw, PLAIN)
    with pytest.raises(WireError):
        takes[len(said) - 1](said[-1], PLAIN)


@settings(max_examples=300)
@given(st.lists(st.integers(1, 3 << 20), min_size=1, max_size=5), st.data())
def test_whatever_a_reply_says_it_stays_within_what_was_asked(lengths, data):
    reply = ReadReply(lengths)
    numbers = st.integers(0, 3)
    try:
        said = [Head(data.draw(numbers), data.draw(numbers), data.draw(numbers)) for _ in lengths]
        groups = reply.heads(sr.pack_heads(said, PLAIN), PLAIN)
        assert sorted(i for group in groups for i in group) == [
            i for i, head in enumerate(said) if head.follows == Sent.GOOD
        ]
        for group in groups:
            reply.tails(sr.pack_tails([Tail(data.draw(numbers), 0) for _ in group], PLAIN), PLAIN)
        assert None not in reply.replies
    except WireError:
        assert len(reply.replies) == len(lengths)


@pytest.mark.parametrize("said", [0, 1], ids=["its own checksum", "another"])
def test_it_is_read_without_io_straight_into_the_memory_of_the_blocks(said):
    first, second = bytearray(3), bytearray(2)
    checksum = xxhash.xxh3_64_intdigest(b"abc")
    judged = tails((Sent.GOOD, checksum + said), (Sent.GOOD, xxhash.xxh3_64_intdigest(b"de")))
    wire = heads(GOOD, GOOD) + b"abcde" + judged
    reply = ReadReply([3, 2])
    for part in reply.memory([[memoryview(first)], [memoryview(second)]], PLAIN):
        for piece in part:
            piece[:], wire = wire[: piece.nbytes], wire[piece.nbytes :]
    assert (wire, first, second) == (b"", b"abc", b"de")
    assert [one.good for one in reply.replies] == [not said, True]
    assert [one.damaged for one in reply.replies] == [bool(said), False]


def test_what_a_disk_did_not_give_is_told_from_what_is_not_there():
    reply = ReadReply([1, 1, 1])
    reply.heads(heads(GOOD, GOOD, GOOD), PLAIN)
    reply.tails(tails((Sent.FAILED, 5), (Sent.MISS, 7), (Sent.GOOD, 6)), PLAIN)
    told = [(one.good, one.failed, one.damaged) for one in reply.replies]
    assert told == [(False, True, False), (False, False, False), (True, False, False)]
