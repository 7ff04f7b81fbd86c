"""The stream's protocol as bytes: what goes in comes out, and from garbage only `WireError`."""

import contextlib
import os

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.limits import (
    META_BYTES_MAX,
    NAMESPACE_BYTES_MAX,
    STREAM_BLOCKS_MAX,
    STREAM_FRAME_BYTES_MAX,
)
from kvstore.protocol import stream as sw
from kvstore.protocol.stream import ClientHandshake, Frame, NodeHandshake, SaveOffer, WireError
from kvstore.protocol.stream_seal import (
    PLAIN,
    TAG_BYTES,
    Blake3Seal,
    GmacSeal,
    Mac,
    PlainSeal,
)
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


def sealed(client_macs, node_macs, *, client_tls=False, node_tls=False, secret=SECRET):
    """Seals of both ends of one handshake."""
    client = ClientHandshake(secret, nonce(), NODE, protected=client_tls, macs=client_macs)
    server = NodeHandshake(secret, nonce(), NODE, protected=node_tls, macs=node_macs)
    _, verdict = server.judge(client.prove(server.answer(client.hello)))
    return client.check(verdict), server.seals()


ALL = frozenset(Mac)
ONLY = frozenset({Mac.BLAKE3})


@pytest.mark.parametrize(
    ("ours", "theirs", "kind"),
    [(ALL, ALL, GmacSeal), (ALL, ONLY, Blake3Seal), (ONLY, ALL, Blake3Seal)],
)
def test_with_a_secret_both_ends_seal_with_the_best_that_both_can(ours, theirs, kind):
    client, node = sealed(ours, theirs)
    assert {type(seal) for seal in (*client, *node)} == {kind}
    for sent, received in ((client.sent, node.received), (node.sent, client.received)):
        assert sent.tag(b"x") == received.tag(b"x")


def test_keys_are_of_one_connection_and_one_direction():
    both = [end for _ in range(2) for end in sealed(ALL, ALL)]
    assert len({seals.sent.tag(b"x") for seals in both}) == 4


def test_nothing_is_paid_twice_under_tls_nor_at_all_without_a_secret():
    for seals in (
        *sealed(ALL, ALL, client_tls=True, node_tls=True),
        *sealed(ALL, ALL, secret=None),
    ):
        assert {type(seal) for seal in seals} == {PlainSeal}


def test_nobody_is_talked_out_of_seals():
    """One end behind TLS that somebody else has ended, and the other in the clear."""
    for tls in ({"client_tls": True}, {"node_tls": True}):
        with pytest.raises(WireError, match="seal"):
            sealed(ALL, ALL, **tls)
    with pytest.raises(WireError, match="seal"):
        sealed(frozenset(), ALL)
    with pytest.raises(WireError, match="seal"):
        sealed(ONLY, frozenset({Mac.GMAC}))


def test_a_node_seals_with_one_of_the_macs_that_were_offered_and_no_other():
    client = ClientHandshake(SECRET, nonce(), NODE, macs=ONLY)
    server = NodeHandshake(SECRET, nonce(), NODE, macs=ALL)
    hello = bytearray(server.answer(client.hello))
    hello[len(b"kvstream3")] = 1 | 1 << Mac.GMAC
    with pytest.raises(WireError, match="would not seal"):
        client.prove(bytes(hello))


def test_without_a_secret_a_hello_offers_nothing_and_a_node_chooses_nothing():
    client = ClientHandshake(None, nonce(), NODE)
    assert client.hello[len(b"kvstream3")] == 0
    offering = bytearray(client.hello)
    offering[len(b"kvstream3")] = 1 << Mac.BLAKE3
    server = NodeHandshake(None, nonce(), NODE)
    assert server.answer(bytes(offering))[len(b"kvstream3")] == 0


def test_what_is_no_stream_at_all_is_asked_for_its_address():
    server = NodeHandshake(SECRET, nonce(), NODE)
    with pytest.raises(WireError, match="is the address right"):
        server.answer(b"GET / HTTP/1.1\r\n".ljust(sw.CLIENT_HELLO_BYTES, b" "))


def test_abilities_that_were_changed_on_the_way_fail_the_proof():
    client = ClientHandshake(SECRET, nonce(), NODE)
    server = NodeHandshake(SECRET, nonce(), NODE)
    fewer = ClientHandshake(SECRET, nonce(), NODE, macs=ONLY).hello[:10] + client.hello[10:]
    proof = client.prove(server.answer(fewer))
    assert server.judge(proof) == (False, bytes(sw.VERDICT_BYTES))


def test_a_peer_of_another_version_is_told_so():
    client = ClientHandshake(SECRET, nonce(), NODE)
    server = NodeHandshake(SECRET, nonce(), NODE)
    with pytest.raises(WireError, match=r"version 2 .* version 3: run the same release"):
        server.answer(b"kvstream2" + client.hello[9:])
    with pytest.raises(WireError, match=r"version 4 .* version 3: run the same release"):
        client.prove(b"kvstream4" + server.hello()[9:])


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


def transcript():
    """A node that waits for a proof, and what both have said until then."""
    client = ClientHandshake(SECRET, nonce(), NODE)
    server = NodeHandshake(SECRET, nonce(), NODE)
    hello = server.answer(client.hello)
    return client, server, client.hello + hello, client.prove(hello)


def test_every_byte_of_a_proof_counts():
    client, server, _, proof = transcript()
    _, verdict = server.judge(proof)
    for at in range(sw.PROOF_BYTES):
        changed = proof[:at] + bytes([proof[at] ^ 1]) + proof[at + 1 :]
        assert server.judge(changed) == (False, bytes(sw.VERDICT_BYTES))
        lie = bytearray(verdict)
        lie[1 + at] ^= 1
        with pytest.raises(WireError, match="does not know the secret"):
            client.check(bytes(lie))
    assert not server.judge(proof[:-1])[0]
    assert not server.judge(b"")[0]


def test_a_nodes_own_proof_does_not_prove_a_client():
    """Somebody could have it from the node by a connection in the other direction."""
    _, server, said, proof = transcript()
    assert server.judge(proof)[0]
    assert not server.judge(sw._proof(SECRET, b"node", said))[0]
    assert not server.judge(server.judge(proof)[1][1:])[0]


def test_the_secret_never_travels():
    client = ClientHandshake(SECRET, nonce(), NODE)
    server = NodeHandshake(SECRET, nonce(), NODE)
    hello = server.answer(client.hello)
    proof = client.prove(hello)
    _, verdict = server.judge(proof)
    assert SECRET not in client.hello + hello + proof + verdict


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
    head = sw._FRAME.pack(Frame.LOOK, size_bytes)
    assert sw.frame_head(head) == (Frame.LOOK, size_bytes)
    beyond = size_bytes - 1 if size_bytes == TAG_BYTES else size_bytes + 1
    with pytest.raises(WireError, match=f"a frame of {beyond} bytes"):
        sw.frame_head(sw._FRAME.pack(Frame.LOOK, beyond))


@pytest.mark.parametrize(
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
        NodeHandshake(SECRET, nonce(), NODE).answer,
        ClientHandshake(SECRET, nonce(), NODE).prove,
        ClientHandshake(SECRET, nonce(), NODE).check,
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
