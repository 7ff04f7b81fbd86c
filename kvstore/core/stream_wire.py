"""What a node and a client on another host say to each other, as bytes and back. Pure.

A connection begins with a handshake in which both sides prove that they know the
same secret (HMAC-SHA256 over both sides' nonces; the secret itself never travels):

    client -> node   magic, whether it has a secret, nonce
    node -> client   magic, whether it has a secret, node id, epoch, nonce
    client -> node   proof over both messages
    node -> client   verdict, proof over both messages

Then the client asks, one request at a time, in frames: type, length, body,
CRC.

    READ     which blocks; answered by heads, payloads and tails (stream_reply.py)
    PUT      which blocks the client has; answered by ANSWERS. The node then takes the
             payload of each one it granted, in order, and says ANSWERS again
    CONTROL  one message of core/wire.py; answered by ANSWERS
    NIXL     the way into the node's memory (nixl_wire.py); answered by ANSWERS

Whatever breaks these rules is a `WireError`, and the connection ends.
"""

from __future__ import annotations

import enum
import hmac
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

import msgpack

from kvstore.errors import PeerError
from kvstore.limits import (
    META_BYTES_MAX,
    NAMESPACE_BYTES_MAX,
    STREAM_BLOCKS_MAX,
    STREAM_FRAME_BYTES_MAX,
)
from kvstore.types import Key, Kind, Location

KINDS = frozenset(int(kind) for kind in Kind)


class WireError(PeerError):
    """The other side does not speak this protocol, or not with our secret."""


# --- handshake -------------------------------------------------------------------

NONCE_BYTES = 32
PROOF_BYTES = 32
_MAGIC = b"kvstream2"
_CLIENT_HELLO = struct.Struct(f"<9sB{NONCE_BYTES}s")
_NODE_HELLO = struct.Struct(f"<9sBQI{NONCE_BYTES}s")
CLIENT_HELLO_BYTES = _CLIENT_HELLO.size
NODE_HELLO_BYTES = _NODE_HELLO.size
VERDICT_BYTES = 1 + PROOF_BYTES
ACCEPTED = 1


def _proof(secret: bytes | None, who: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret or b"", b"kvstore stream 2 " + who + transcript, "sha256")


class ClientHandshake:
    """The client's side: `hello`, then `prove`, then `check`. `nonce` is fresh and random."""

    def __init__(self, secret: bytes | None, nonce: bytes, node: tuple[int, int]) -> None:
        """`node` is the (node id, epoch) that must answer: a restarted node is another one."""
        self._secret = secret
        self._node = node
        self.hello = _CLIENT_HELLO.pack(_MAGIC, secret is not None, nonce)
        self._transcript = b""

    def prove(self, node_hello: bytes) -> bytes:
        """The proof to send. Raises `WireError` when it is not the node that is wanted."""
        magic, has_secret, node_id, epoch, _ = _unpacked(_NODE_HELLO, node_hello)
        if magic != _MAGIC:
            raise WireError("no kvstore stream server answers there")
        if (node_id, epoch) != self._node:
            raise WireError("another node, or another start of it, answers there")
        if bool(has_secret) != (self._secret is not None):
            who = "no secret, the node one" if has_secret else "a secret, the node none"
            raise WireError(f"this client has {who} (KVSTORE_SECRET)")
        self._transcript = self.hello + node_hello
        return _proof(self._secret, b"client", self._transcript)

    def check(self, verdict: bytes) -> None:
        """Raises `WireError` unless the node accepts us and knows the secret too."""
        if len(verdict) != VERDICT_BYTES:
            raise WireError(f"a verdict of {len(verdict)} bytes")
        if verdict[0] != ACCEPTED:
            raise WireError("the node refuses this client: its secret is another one")
        if not hmac.compare_digest(verdict[1:], _proof(self._secret, b"node", self._transcript)):
            raise WireError("the node does not know the secret")


class NodeHandshake:
    """The node's side: `answer`, then `judge`. `nonce` is fresh and random."""

    def __init__(self, secret: bytes | None, nonce: bytes, node: tuple[int, int]) -> None:
        self._secret = secret
        self._nonce = nonce
        self._node = node
        self._transcript = b""

    def answer(self, client_hello: bytes) -> bytes:
        """What to send back. Raises `WireError` when no client of this protocol speaks."""
        magic, _, _ = _unpacked(_CLIENT_HELLO, client_hello)
        if magic != _MAGIC:
            raise WireError("no kvstore stream client")
        hello = _NODE_HELLO.pack(_MAGIC, self._secret is not None, *self._node, self._nonce)
        self._transcript = client_hello + hello
        return hello

    def judge(self, proof: bytes) -> tuple[bool, bytes]:
        """Whether the client knows the secret, and what to tell it."""
        expected = _proof(self._secret, b"client", self._transcript)
        if not hmac.compare_digest(proof, expected):
            return False, bytes(VERDICT_BYTES)
        return True, bytes([ACCEPTED]) + _proof(self._secret, b"node", self._transcript)


# --- frames ----------------------------------------------------------------------

_FRAME = struct.Struct("<BxxxI")
_CRC = struct.Struct("<I")
FRAME_HEAD_BYTES = _FRAME.size


class Frame(enum.IntEnum):
    READ = 1
    PUT = 2
    CONTROL = 3
    ANSWERS = 4
    NIXL = 5


def frame(kind: Frame, body: bytes) -> bytes:
    """A head, the body, and the CRC-32 of type and body."""
    crc = _CRC.pack(crc32(body, kind))
    return _FRAME.pack(kind, len(body) + _CRC.size) + body + crc


def frame_body(kind: Frame, rest: bytes) -> bytes:
    """The body in what follows a head. Raises `WireError` when it is damaged."""
    body, crc = rest[: -_CRC.size], rest[-_CRC.size :]
    if crc != _CRC.pack(crc32(body, kind)):
        raise WireError("a frame that is damaged")
    return body


def frame_head(raw: bytes) -> tuple[Frame, int]:
    """(type, bytes that follow) of the frame that begins with `raw`."""
    kind, size_bytes = _unpacked(_FRAME, raw)
    if size_bytes > STREAM_FRAME_BYTES_MAX:
        raise WireError(f"a frame of {size_bytes} bytes, at most {STREAM_FRAME_BYTES_MAX}")
    try:
        return Frame(kind), size_bytes
    except ValueError as e:
        raise WireError(f"frame type {kind}") from e


def _unpacked(layout: struct.Struct, raw: bytes) -> tuple[Any, ...]:
    if len(raw) != layout.size:
        raise WireError(f"{len(raw)} bytes where {layout.size} were due")
    return layout.unpack(raw)


def _items(layout: struct.Struct, raw: bytes) -> list[tuple[Any, ...]]:
    count, rest = divmod(len(raw), layout.size)
    if rest or not 0 < count <= STREAM_BLOCKS_MAX:
        raise WireError(f"{len(raw)} bytes of blocks, at most {STREAM_BLOCKS_MAX} blocks a batch")
    return list(layout.iter_unpack(raw))


# --- reading ---------------------------------------------------------------------

_READ = struct.Struct("<I")
_ASKED = struct.Struct("<32sIHIQBIQ")


class Asked(NamedTuple):
    """One block that a client wants to read; the location without the node's id."""

    key: Key
    location: Location


def pack_read(asked: Sequence[tuple[Key, Location]], timeout_s: float) -> bytes:
    """A READ frame. `timeout_s` is how long the client will wait for all of it."""
    body = [_READ.pack(_milliseconds(timeout_s))]
    body += [_ASKED.pack(key, *location[1:]) for key, location in asked]
    return frame(Frame.READ, b"".join(body))


def unpack_read(body: bytes, node_id: int) -> tuple[float, list[Asked]]:
    """(timeout in seconds, blocks) of a READ frame's body."""
    timeout_s = _seconds(body)
    asked = [
        Asked(key, Location(node_id, *fields))
        for key, *fields in _items(_ASKED, body[_READ.size :])
    ]
    return timeout_s, asked


def _milliseconds(timeout_s: float) -> int:
    return min(max(int(timeout_s * 1000), 1), (1 << 32) - 1)


def _seconds(body: bytes) -> float:
    return int(_unpacked(_READ, body[: _READ.size])[0]) / 1000


# --- saving ----------------------------------------------------------------------

_PUT = struct.Struct("<IIH")
_OFFER = struct.Struct("<32sIBBQ")


class Offer(NamedTuple):
    """One block that a client has for the node."""

    key: Key
    size_bytes: int
    kind: int
    meta_length: int
    checksum: int
    """xxh3-64 of the payload: what the node will have read must have it."""


def pack_put(offers: Sequence[Offer], namespace_id: int, fields: bytes, timeout_s: float) -> bytes:
    """A PUT frame; `fields` are the namespace's, as JSON, or empty."""
    head = _PUT.pack(_milliseconds(timeout_s), namespace_id, len(fields))
    return frame(Frame.PUT, head + fields + b"".join(_OFFER.pack(*offer) for offer in offers))


def unpack_put(body: bytes) -> tuple[float, int, bytes, list[Offer]]:
    """(timeout in seconds, namespace id, its fields, offers) of a PUT frame's body."""
    timeout_ms, namespace_id, fields_bytes = _unpacked(_PUT, body[: _PUT.size])
    if fields_bytes > NAMESPACE_BYTES_MAX:
        raise WireError(f"a namespace of {fields_bytes} bytes, at most {NAMESPACE_BYTES_MAX}")
    start = _PUT.size + fields_bytes
    offers = [Offer(*item) for item in _items(_OFFER, body[start:])]
    for offer in offers:
        if offer.kind not in KINDS or offer.meta_length > min(offer.size_bytes, META_BYTES_MAX):
            raise WireError(f"kind {offer.kind} with {offer.meta_length} bytes of meta")
    return timeout_ms / 1000, namespace_id, body[_PUT.size : start], offers


GRANTED = 255
"""Among the answers to PUT: the node will take this payload. Others are codes of core/node.py
or a reason."""


def pack_answers(answers: Sequence[Any]) -> bytes:
    raw: bytes = msgpack.packb(list(answers))
    return frame(Frame.ANSWERS, raw)


def pack_control(message: Sequence[Any]) -> bytes:
    """A CONTROL frame around one message of core/wire.py."""
    raw: bytes = msgpack.packb(list(message))
    return frame(Frame.CONTROL, raw)


def unpack_answers(body: bytes) -> list[Any]:
    """The list in an ANSWERS or CONTROL frame's body; its items are for the caller to check."""
    try:
        answers = msgpack.unpackb(body, use_list=True, max_ext_len=0, strict_map_key=False)
    except (msgpack.UnpackException, ValueError, TypeError, RecursionError) as e:
        raise WireError(f"answers that cannot be read: {e}") from e
    if not isinstance(answers, list):
        raise WireError(f"answers that are a {type(answers).__name__}")
    return answers
