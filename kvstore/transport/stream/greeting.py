"""Makes the handshake of a client with a node, and reports why it was refused."""

from __future__ import annotations

import secrets
import ssl

from kvstore.errors import NodeUnavailableError
from kvstore.protocol import stream_seal
from kvstore.protocol.stream import WireError
from kvstore.protocol.stream_handshake import (
    NODE_HELLO_BYTES,
    NONCE_BYTES,
    VERDICT_BYTES,
    ClientHandshake,
)
from kvstore.system.fork import no_forks
from kvstore.transport.stream.channel import Channel


def shake_hands(
    channel: Channel, secret: bytes | None, node: tuple[int, int], deadline: float
) -> None:
    """Prove to `node`, its id and epoch, that both know the secret. Raises `PeerError`, and
    `SSLError` for a certificate that the node does not accept."""
    # A probe's thread may be the first that imports `cryptography`: a child forked meanwhile
    # would wait for the import's lock for ever.
    with no_forks:
        stream_seal.available()
    nonce = secrets.token_bytes(NONCE_BYTES)
    shake = ClientHandshake(secret, nonce, node, protected=channel.encrypted)
    proof = b""
    try:
        channel.send([shake.hello], deadline)
        proof = shake.prove(channel.receive_bytes(NODE_HELLO_BYTES, deadline))
        channel.send([proof], deadline)
        channel.seals = shake.check(channel.receive_bytes(VERDICT_BYTES, deadline))
    except NodeUnavailableError as e:
        if channel.encrypted and not proof:
            # With TLS 1.3 it is said after the handshake, if that arrives at all.
            why = "the node does not accept this client's certificate, or its lack of one"
            raise ssl.SSLError(1, f"{why} (KVSTORE_TLS_CERT): {e}") from e
        raise WireError(f"the node hung up unasked, as one without room does: {e}") from e
