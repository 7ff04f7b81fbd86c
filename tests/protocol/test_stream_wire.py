"""The stream's protocol as bytes: what goes in comes out, and from garbage only `WireError`."""

import contextlib
import os

import msgpack
import pytest
from each_input import each
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.limits import (
    META_BYTES_MAX,
    NAMESPACE_BYTES_MAX,
    STREAM_BLOCKS_MAX,
    STREAM_FRAME_BYTES_MAX,
)
from kvstore.protocol import stream as sw
from kvstore.protocol.stream import Frame, SaveOffer, WireError
from kvstore.protocol.stream_seal import PLAIN, TAG_BYTES
from kvstore.types import Location

NODE = (0x1234567890ABCDEF, 77)
LOCATION = Location(NODE[0], NODE[1], 0, 5, 9, 3, 1000, 0xFFFFFFFFFFFFFFFF)


def framed(message):
    return sw.frame(message, PLAIN)


def body_of(raw, kind):
    assert sw.frame_head(raw[: sw.FRAME_HEAD_BYTES]) == (kind, len(raw) - sw.FRAME_HEAD_BYTES)
    return sw.frame_body(kind, raw[sw.FRAME_HEAD_BYTES :], PLAIN)


def test_a_read_request_comes_out_as_it_went_in():
    asked = [(os.urandom(32), LOCATION._replace(slot=i)) for i in range(3)]
    body = body_of(framed(sw.pack_read(asked, 1.5)), Frame.READ)
    assert sw.unpack_read(body, NODE[0]) == (1.5, asked)


def test_a_put_request_comes_out_as_it_went_in():
    offers = [SaveOffer(os.urandom(32), 1000 + i, 1, 7, 1 << 63) for i in range(3)]
    body = body_of(framed(sw.pack_put(offers, 9, b"{}", 2.0)), Frame.PUT)
    assert sw.unpack_put(body) == (2.0, 9, b"{}", offers)


def test_the_largest_requests_fit_a_frame():
    asked = [(bytes(32), LOCATION)] * STREAM_BLOCKS_MAX
    offers = [SaveOffer(bytes(32), 1, 0, 0, 0)] * STREAM_BLOCKS_MAX
    for message in (sw.pack_read(asked, 1.0), sw.pack_put(offers, 1, bytes(4096), 1.0)):
        assert len(framed(message)) < STREAM_FRAME_BYTES_MAX
    with pytest.raises(WireError, match="blocks"):
        sw.unpack_read(sw.pack_read([*asked, asked[0]], 1.0)[1], 1)


def test_a_request_has_from_one_block_to_as_many_as_are_allowed():
    asked = [(bytes([i % 256]) * 32, LOCATION) for i in range(STREAM_BLOCKS_MAX)]
    assert sw.unpack_read(sw.pack_read(asked, 1.0)[1], NODE[0])[1] == asked
    with pytest.raises(WireError, match="0 bytes of blocks"):
        sw.unpack_read(sw.pack_read([], 1.0)[1], NODE[0])


@pytest.mark.parametrize("size_bytes", [TAG_BYTES, STREAM_FRAME_BYTES_MAX])
def test_a_frame_is_as_small_as_its_tag_and_as_large_as_the_limit(size_bytes):
    packed = sw._FRAME.pack
    head = packed(Frame.LOOK, size_bytes)
    assert sw.frame_head(head) == (Frame.LOOK, size_bytes)
    beyond = size_bytes - 1 if size_bytes == TAG_BYTES else size_bytes + 1
    with pytest.raises(WireError, match=f"a frame of {beyond} bytes"):
        sw.frame_head(packed(Frame.LOOK, beyond))


@each(
    ("timeout_s", "said_ms"),
    [(-1.0, 1), (0.0, 1), (0.001, 1), (0.0025, 2), (1.5, 1500), (5e6, (1 << 32) - 1)],
)
def test_time_is_told_in_whole_milliseconds_from_one_to_what_fits(timeout_s, said_ms):
    _, body = sw.pack_read([(bytes(32), LOCATION)], timeout_s)
    assert sw.unpack_read(body, NODE[0])[0] == said_ms / 1000


def test_a_namespace_has_as_many_bytes_as_the_limit_and_no_more():
    offers = [SaveOffer(bytes(32), 1, 0, 0, 0)]
    fields = bytes(NAMESPACE_BYTES_MAX)
    assert sw.unpack_put(sw.pack_put(offers, 1, fields, 1.0)[1])[2] == fields
    with pytest.raises(WireError, match="a namespace of"):
        sw.unpack_put(sw.pack_put(offers, 1, fields + b"x", 1.0)[1])


@pytest.mark.parametrize("size_bytes", [5, 1 << 20])
def test_an_offers_kind_is_known_and_its_meta_fits_the_block_and_the_limit(size_bytes):
    meta = min(size_bytes, META_BYTES_MAX, 255)
    fits = SaveOffer(bytes(32), size_bytes, 1, meta, 0)
    assert sw.unpack_put(sw.pack_put([fits], 1, b"", 1.0)[1])[3] == [fits]
    refused = [fits._replace(kind=77), fits._replace(kind=77, meta_length=0)]
    if meta < 255:
        refused.append(fits._replace(meta_length=meta + 1))
    for offer in refused:
        with pytest.raises(WireError, match="bytes of meta"):
            sw.unpack_put(sw.pack_put([offer], 1, b"", 1.0)[1])


def test_answers_are_a_list_of_whatever_the_caller_checks():
    answers = [1, "no", [2], {3: 4}, None]
    assert sw.unpack_answers(sw.pack_answers(answers)[1]) == answers
    for body in (b"\x01", msgpack.packb({1: 2}), msgpack.packb([msgpack.ExtType(1, b"x")])):
        with pytest.raises(WireError, match="answers that"):
            sw.unpack_answers(body)


def test_a_frame_with_one_bit_changed_is_refused():
    raw = framed(sw.pack_answers([1, "no"]))
    kind, size = sw.frame_head(raw[: sw.FRAME_HEAD_BYTES])
    for bit in range(size * 8):
        rest = bytearray(raw[sw.FRAME_HEAD_BYTES :])
        rest[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError, match="damaged"):
            sw.frame_body(kind, bytes(rest), PLAIN)


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_garbage_is_a_wire_error_for_every_parser(raw):
    for parse in (
        sw.frame_head,
        lambda raw: sw.frame_body(Frame.READ, raw, PLAIN),
        lambda raw: sw.unpack_read(raw, 1),
        sw.unpack_put,
        sw.unpack_answers,
    ):
        with contextlib.suppress(WireError):
            parse(raw)


@settings(max_examples=300)
@given(st.data())
def test_damaged_requests_are_read_or_refused(data):
    offers = [SaveOffer(bytes([i]) * 32, 1000, 1, 7, 5) for i in range(3)]
    for (_, raw), parse in (
        (sw.pack_read([(bytes(32), LOCATION)] * 3, 1.0), lambda b: sw.unpack_read(b, 1)),
        (sw.pack_put(offers, 9, b"{}", 1.0), sw.unpack_put),
        (sw.pack_answers([1, "no", 255]), sw.unpack_answers),
    ):
        body = bytearray(raw)
        for _ in range(data.draw(st.integers(1, 4))):
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
        with contextlib.suppress(WireError):
            parse(bytes(body[: data.draw(st.integers(0, len(body)))]))
