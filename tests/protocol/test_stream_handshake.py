"""The handshake of a stream: who is let in, who is believed, and with what all else is sealed."""

import contextlib
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.protocol import stream_handshake as sh
from kvstore.protocol.stream import WireError
from kvstore.protocol.stream_handshake import ClientHandshake, NodeHandshake
from kvstore.protocol.stream_seal import Blake3Seal, GmacSeal, Mac, PlainSeal

NODE = (0x1234567890ABCDEF, 77)
SECRET, OTHER_SECRET = b"s" * 16, b"t" * 16


def nonce():
    return os.urandom(sh.NONCE_BYTES)


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
        server.answer(b"GET / HTTP/1.1\r\n".ljust(sh.CLIENT_HELLO_BYTES, b" "))


def test_abilities_that_were_changed_on_the_way_fail_the_proof():
    client = ClientHandshake(SECRET, nonce(), NODE)
    server = NodeHandshake(SECRET, nonce(), NODE)
    fewer = ClientHandshake(SECRET, nonce(), NODE, macs=ONLY).hello[:10] + client.hello[10:]
    proof = client.prove(server.answer(fewer))
    assert server.judge(proof) == (False, bytes(sh.VERDICT_BYTES))


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
    assert second.judge(proof) == (False, bytes(sh.VERDICT_BYTES))


def test_a_clients_own_proof_does_not_prove_the_node():
    client = ClientHandshake(SECRET, nonce(), NODE)
    proof = client.prove(NodeHandshake(SECRET, nonce(), NODE).answer(client.hello))
    with pytest.raises(WireError, match="does not know the secret"):
        client.check(bytes([sh.ACCEPTED]) + proof)


def transcript():
    """A node that waits for a proof, and what both have said until then."""
    client = ClientHandshake(SECRET, nonce(), NODE)
    server = NodeHandshake(SECRET, nonce(), NODE)
    hello = server.answer(client.hello)
    return client, server, client.hello + hello, client.prove(hello)


def test_every_byte_of_a_proof_counts():
    client, server, _, proof = transcript()
    _, verdict = server.judge(proof)
    for at in range(sh.PROOF_BYTES):
        changed = proof[:at] + bytes([proof[at] ^ 1]) + proof[at + 1 :]
        assert server.judge(changed) == (False, bytes(sh.VERDICT_BYTES))
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
    assert not server.judge(sh._proof(SECRET, b"node", said))[0]
    assert not server.judge(server.judge(proof)[1][1:])[0]


def test_the_secret_never_travels():
    client = ClientHandshake(SECRET, nonce(), NODE)
    server = NodeHandshake(SECRET, nonce(), NODE)
    hello = server.answer(client.hello)
    proof = client.prove(hello)
    _, verdict = server.judge(proof)
    assert SECRET not in client.hello + hello + proof + verdict


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_garbage_is_a_wire_error_at_every_step(raw):
    for step in (
        NodeHandshake(SECRET, nonce(), NODE).answer,
        ClientHandshake(SECRET, nonce(), NODE).prove,
        ClientHandshake(SECRET, nonce(), NODE).check,
    ):
        with contextlib.suppress(WireError):
            step(raw)
