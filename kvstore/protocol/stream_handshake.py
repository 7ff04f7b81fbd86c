"""Decides whether client and node of a stream let each other in, and derives its seals. Pure.

Both sides prove that they know the same secret (HMAC-SHA256 over both sides' nonces; the secret
itself never travels):

    client -> node   magic, version, whether it has a secret, the MACs it can do, nonce
    node -> client   magic, version, whether it has a secret, the MAC to use, node id, epoch, nonce
    client -> node   proof over both messages
    node -> client   verdict, proof over both messages

Of the secret and both messages are made two keys, one for each direction: with them all that
follows is sealed (stream_seal.py), unless TLS does that already or there is no secret.

    greeted    each side has the other's nonce; nothing but proofs is taken
    proven     each has seen that the other knows the secret, or that neither has one: the
               seals exist, and the client may ask (stream.py)

Must never happen: a client that is let in, or a node that is believed, before its proof was right.
Whatever breaks these rules is a `WireError`, and the connection ends.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence

from kvstore.protocol.stream import WireError, unpacked
from kvstore.protocol.stream_seal import (
    PLAIN_SEALS,
    Mac,
    Seals,
    available,
    best,
    keyed,
    matches,
)

NONCE_BYTES = 32
PROOF_BYTES = 32
VERSION = 3
_FAMILY = b"kvstream"
_MAGIC = _FAMILY + b"%d" % VERSION
_CLIENT_HELLO = struct.Struct(f"<9sB{NONCE_BYTES}s")
_NODE_HELLO = struct.Struct(f"<9sBQI{NONCE_BYTES}s")
CLIENT_HELLO_BYTES = _CLIENT_HELLO.size
NODE_HELLO_BYTES = _NODE_HELLO.size
VERDICT_BYTES = 1 + PROOF_BYTES
ACCEPTED = 1
_HAS_SECRET = 1
"""A bit of the second field of a hello; the bits above it are MACs."""


class SecretError(WireError):
    """Raised when the two sides do not know the same secret."""


def _proof(secret: bytes | None, who: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret or b"", b"kvstore stream 3 " + who + transcript, "sha256")


def _key(secret: bytes, sender: bytes, transcript: bytes) -> bytes:
    """Return the key of what `sender` sends on this connection: both nonces, the node and the MAC
    are in it."""
    return hmac.digest(secret, b"kvstore stream 3 seals of the " + sender + transcript, "sha256")


def _abilities(has_secret: bool, macs: frozenset[Mac]) -> int:
    return has_secret * _HAS_SECRET | sum(1 << mac for mac in macs)


def _macs(abilities: int) -> frozenset[Mac]:
    return frozenset(mac for mac in Mac if abilities >> mac & 1)


def _check_magic(magic: bytes, who: str) -> None:
    if magic == _MAGIC:
        return
    if magic.startswith(_FAMILY):
        version = magic.removeprefix(_FAMILY).decode("ascii", "replace")
        raise WireError(
            f"the {who} speaks version {version} of the stream's protocol, this side version "
            f"{VERSION}: run the same release of kvstore on both"
        )
    raise WireError(f"the other side is not a kvstore stream {who}: is the address right?")


class _Side:
    """Holds what either side knows of the handshake."""

    def __init__(
        self,
        secret: bytes | None,
        nonce: bytes,
        node: tuple[int, int],
        accepted: Sequence[bytes] = (),
        *,
        protected: bool = False,
        macs: frozenset[Mac] | None = None,
    ) -> None:
        """`nonce` is fresh and random. `node` is the (node id, epoch) of the node that answers, or
        must answer: a restarted node is another one. `accepted`: secrets that let a client in, too.

        `protected`: TLS keeps the bytes, so that they need no seals. `macs`: those that this side
        can make, by default all that are `available`.
        """
        self._secret = secret
        self._accepted = accepted
        self._nonce = nonce
        self._node = node
        self._sealed = secret is not None and not protected
        self._macs = frozenset[Mac]()
        """MACs that may seal the stream; none when it needs no seals."""
        if self._sealed:
            self._macs = available() if macs is None else macs
        self._transcript = b""
        self._mac: Mac | None = None

    def _seals(self, ours: bytes, theirs: bytes) -> Seals:
        if self._secret is None or self._mac is None:
            return PLAIN_SEALS
        ours_key = _key(self._secret, ours, self._transcript)
        return keyed(self._mac, ours_key, _key(self._secret, theirs, self._transcript))


class ClientHandshake(_Side):
    """Lets a client in: `hello`, then `prove`, then `check`."""

    @property
    def hello(self) -> bytes:
        """Return the message to send first."""
        abilities = _abilities(self._secret is not None, self._macs)
        return _CLIENT_HELLO.pack(_MAGIC, abilities, self._nonce)

    def prove(self, node_hello: bytes) -> bytes:
        """Return the proof to send. Raises `WireError` when it is not the node that is wanted."""
        magic, abilities, node_id, epoch, _ = unpacked(_NODE_HELLO, node_hello)
        _check_magic(magic, "server")
        if (node_id, epoch) != self._node:
            raise WireError("another node, or another start of it, answers there")
        has_secret = bool(abilities & _HAS_SECRET)
        if has_secret != (self._secret is not None):
            who = "no secret, the node one" if has_secret else "a secret, the node none"
            raise SecretError(f"this client has {who} (KVSTORE_SECRET)")
        macs = _macs(abilities)
        if len(macs) != bool(self._macs) or not macs <= self._macs:
            raise WireError("the node would not seal the stream as this client asks for")
        self._mac = best(macs)
        self._transcript = self.hello + node_hello
        return _proof(self._secret, b"client", self._transcript)

    def check(self, verdict: bytes) -> Seals:
        """Return the seals of this connection. Raises `WireError` unless the node accepts us and
        knows the secret too."""
        if len(verdict) != VERDICT_BYTES:
            raise WireError(f"a verdict of {len(verdict)} bytes")
        if verdict[0] != ACCEPTED:
            raise SecretError(
                "the node refuses this client: its secret is another one (KVSTORE_SECRET)"
            )
        if not matches(_proof(self._secret, b"node", self._transcript), verdict[1:]):
            raise SecretError("the node does not know the secret (KVSTORE_SECRET)")
        return self._seals(b"client", b"node")


class NodeHandshake(_Side):
    """Decides for a node whom it lets in: `answer`, then `judge`, then `seals`, which are of the
    secret that the client has proved."""

    def hello(self) -> bytes:
        """Return what to send to a client: also to one of another version, which then can say
        so."""
        chosen = frozenset() if self._mac is None else frozenset({self._mac})
        abilities = _abilities(self._secret is not None, chosen)
        return _NODE_HELLO.pack(_MAGIC, abilities, *self._node, self._nonce)

    def answer(self, client_hello: bytes) -> bytes:
        """Return the message to send back. Raises `WireError` unless a client of this protocol
        speaks."""
        magic, abilities, _ = unpacked(_CLIENT_HELLO, client_hello)
        _check_magic(magic, "client")
        if self._sealed:
            self._mac = best(_macs(abilities) & self._macs)
            if self._mac is None and abilities & _HAS_SECRET:
                raise WireError("it can seal the stream in no way that this node can")
        hello = self.hello()
        self._transcript = client_hello + hello
        return hello

    def judge(self, proof: bytes) -> tuple[bool, bytes]:
        """Return whether the client knows the secret, and what to tell it."""
        for secret in (self._secret, *self._accepted):
            if matches(_proof(secret, b"client", self._transcript), proof):
                self._secret = secret
                return True, bytes([ACCEPTED]) + _proof(secret, b"node", self._transcript)
        return False, bytes(VERDICT_BYTES)

    def seals(self) -> Seals:
        """Return the seals of this connection, once the client is known to know the secret."""
        return self._seals(b"node", b"client")
