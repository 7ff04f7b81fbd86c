"""The stream's protocol as bytes: what goes in comes out, and from garbage only `WireError`."""

import contextlib
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core import stream_wire as sw
from kvstore.core.stream_wire import (
    ClientHandshake,
    Frame,
    NodeHandshake,
    Offer,
    WireError,
)
from kvstore.limits import STREAM_BLOCKS_MAX, STREAM_FRAME_BYTES_MAX
from kvstore.types import Location

NODE = (0x1234567890ABCDEF, 77)
SECRET, OTHER_SECRET = b"s" * 16, b"t" * 16
LOCATION = Location(NODE[0], NODE[1], 0, 5, 9, 3, 1000, 0xFFFFFFFFFFFFFFFF)


def nonce():
    return os.urandom(sw.NONCE_BYTES)


def shake(client_secret, node_secret, node=NODE):
    """Both verdicts of one handshake."""
    client = ClientHandshake(client_secret, nonce(), NODE)
    server = NodeHandshake(node_secret, nonce(), node)
    welcome, verdict = server.judge(client.prove(server.answer(client.hello)))
    client.check(verdict)
    return welcome


@pytest.mark.parametrize("secret", [SECRET, None])
def test_two_that_know_the_same_secret_trust_each_other(secret):
    assert shake(secret, secret)


def test_without_the_same_secret_there_is_no_connection():
    for ours, theirs in ((SECRET, OTHER_SECRET), (SECRET, None), (None, SECRET)):
        with pytest.raises(WireError, match="secret"):
            shake(ours, theirs)


@pytest.mark.parametrize("node", [(1, 77), (NODE[0], 78)])
def test_another_node_or_another_start_of_it_is_refused(node):
    with pytest.raises(WireError, match="another start"):
        shake(SECRET, SECRET, node)


def test_a_proof_is_good_for_one_connection_only():
    client = ClientHandshake(SECRET, nonce(), NODE)
    first = NodeHandshake(SECRET, nonce(), NODE)
    proof = client.prove(first.answer(client.hello))
    assert first.judge(proof)[0]
    second = NodeHandshake(SECRET, nonce(), NODE)
    second.answer(client.hello)  # the same words again, but a nonce of its own
    assert second.judge(proof) == (False, bytes(sw.VERDICT_BYTES))


def test_a_clients_own_proof_does_not_prove_the_node():
    client = ClientHandshake(SECRET, nonce(), NODE)
    proof = client.prove(NodeHandshake(SECRET, nonce(), NODE).answer(client.hello))
    with pytest.raises(WireError, match="does not know the secret"):
        client.check(bytes([sw.ACCEPTED]) + proof)


def test_the_secret_never_travels():
    client = ClientHandshake(SECRET, nonce(), NODE)
    server = NodeHandshake(SECRET, nonce(), NODE)
    hello = server.answer(client.hello)
    proof = client.prove(hello)
    _, verdict = server.judge(proof)
    assert SECRET not in client.hello + hello + proof + verdict


def body_of(raw, kind):
    assert sw.frame_head(raw[: sw.FRAME_HEAD_BYTES]) == (kind, len(raw) - sw.FRAME_HEAD_BYTES)
    return sw.frame_body(kind, raw[sw.FRAME_HEAD_BYTES :])


def test_a_read_request_comes_out_as_it_went_in():
    asked = [(os.urandom(32), LOCATION._replace(slot=i)) for i in range(3)]
    body = body_of(sw.pack_read(asked, 1.5), Frame.READ)
    assert sw.unpack_read(body, NODE[0]) == (1.5, asked)


def test_a_put_request_comes_out_as_it_went_in():
    offers = [Offer(os.urandom(32), 1000 + i, 1, 7, 1 << 63) for i in range(3)]
    body = body_of(sw.pack_put(offers, 9, b"{}", 2.0), Frame.PUT)
    assert sw.unpack_put(body) == (2.0, 9, b"{}", offers)


def test_the_largest_requests_fit_a_frame():
    asked = [(bytes(32), LOCATION)] * STREAM_BLOCKS_MAX
    offers = [Offer(bytes(32), 1, 0, 0, 0)] * STREAM_BLOCKS_MAX
    for raw in (sw.pack_read(asked, 1.0), sw.pack_put(offers, 1, bytes(4096), 1.0)):
        assert len(raw) < STREAM_FRAME_BYTES_MAX
    with pytest.raises(WireError, match="blocks"):
        sw.unpack_read(body_of(sw.pack_read([*asked, asked[0]], 1.0), Frame.READ), 1)


def test_a_frame_with_one_bit_changed_is_refused():
    raw = sw.pack_answers([1, "no"])
    kind, size = sw.frame_head(raw[: sw.FRAME_HEAD_BYTES])
    for bit in range(size * 8):
        rest = bytearray(raw[sw.FRAME_HEAD_BYTES :])
        rest[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError, match="damaged"):
            sw.frame_body(kind, bytes(rest))


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_garbage_is_a_wire_error_for_every_parser(raw):
    for parse in (
        sw.frame_head,
        lambda raw: sw.frame_body(Frame.READ, raw),
        lambda raw: sw.unpack_read(raw, 1),
        sw.unpack_put,
        sw.unpack_answers,
        NodeHandshake(SECRET, nonce(), NODE).answer,
        ClientHandshake(SECRET, nonce(), NODE).prove,
        ClientHandshake(SECRET, nonce(), NODE).check,
    ):
        with contextlib.suppress(WireError):
            parse(raw)


@settings(max_examples=300)
@given(st.data())
def test_damaged_requests_are_read_or_refused(data):
    offers = [Offer(bytes([i]) * 32, 1000, 1, 7, 5) for i in range(3)]
    for raw, parse in (
        (sw.pack_read([(bytes(32), LOCATION)] * 3, 1.0), lambda b: sw.unpack_read(b, 1)),
        (sw.pack_put(offers, 9, b"{}", 1.0), sw.unpack_put),
        (sw.pack_answers([1, "no", 255]), sw.unpack_answers),
    ):
        body = bytearray(raw[sw.FRAME_HEAD_BYTES : -4])
        for _ in range(data.draw(st.integers(1, 4))):
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
        with contextlib.suppress(WireError):
            parse(bytes(body[: data.draw(st.integers(0, len(body)))]))
