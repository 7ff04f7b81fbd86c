"""Encodes what a node and a client on another host say to each other, and decodes it. Pure.

A connection begins with a handshake, which derives the seals of all that follows
(stream_handshake.py). Then the client asks, one request at a time, in frames: type, length, body,
tag.

    READ     which blocks; answered by heads, payloads and tails (stream_reply.py)
    LOOK     the same, answered by heads alone
    PUT      which blocks the client has; answered by ANSWERS. The node then takes the
             payload of each one it granted, in order, and a tag over them, and says ANSWERS again
    CONTROL  one message of protocol/control.py; answered by ANSWERS
    NIXL     the endpoint at which to read the node's memory (nixl.py); answered by ANSWERS

States of a connection, the same at both ends:

    greeted, proven  of the handshake: nothing is asked yet
    idle       between requests; only the client may begin
    asked      one request is under way; until its answer has come whole nothing else is sent
    ended      whatever broke a rule (`WireError`), came too late, or was given up in the middle.
               There is no way back from the middle of a message: the next needs a connection

A connection is used by one thread at a time at each end, which alone changes its state; the
seals count what went by, so a message that is lost, repeated or out of order is a wrong tag.

Must never happen: a request acted on before the client's proof was right; a byte of a payload
that counts before the tag over it and its block's tail were right (rule 4); a length that is
believed before it was held against its limit.

Whatever breaks these rules is a `WireError`, and the connection ends.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgpack

from kvstore.errors import PeerError
from kvstore.limits import (
    META_BYTES_MAX,
    NAMESPACE_BYTES_MAX,
    STREAM_BLOCKS_MAX,
    STREAM_FRAME_BYTES_MAX,
)
from kvstore.protocol.stream_seal import (
    TAG_BYTES,
    StreamSeal,
    matches,
)
from kvstore.protocol.unpacking import unpacked_answers, unpacked_request
from kvstore.types import Key, Kind, Location

KINDS = frozenset(int(kind) for kind in Kind)


class WireError(PeerError):
    """Raised when the other side does not speak this protocol, or not with our secret."""


# --- frames ----------------------------------------------------------------------

_FRAME = struct.Struct("<BxxxI")
FRAME_HEAD_BYTES = _FRAME.size


class Frame(enum.IntEnum):
    """Type of a frame; the head of this module says what each asks for."""

    READ = 1
    PUT = 2
    CONTROL = 3
    ANSWERS = 4
    NIXL = 5
    LOOK = 6


Message = tuple[Frame, bytes]
"""A frame's type and its body."""


def frame(message: Message, seal: StreamSeal) -> bytes:
    """Return a frame as bytes: a head, the body, and the tag of both."""
    kind, body = message
    raw = _FRAME.pack(kind, len(body) + TAG_BYTES) + body
    return raw + seal.tag(raw)


def frame_body(kind: Frame, rest: bytes, seal: StreamSeal) -> bytes:
    """Return the body in what follows a head. Raises `WireError` when it is not what was sent."""
    body, tag = rest[:-TAG_BYTES], rest[-TAG_BYTES:]
    if not matches(seal.tag(_FRAME.pack(kind, len(rest)) + body), tag):
        raise WireError("a frame that is damaged")
    return body


def frame_head(raw: bytes) -> tuple[Frame, int]:
    """Return (type, bytes that follow) of the frame that begins with `raw`."""
    kind, size_bytes = unpacked(_FRAME, raw)
    if not TAG_BYTES <= size_bytes <= STREAM_FRAME_BYTES_MAX:
        raise WireError(f"a frame of {size_bytes} bytes, at most {STREAM_FRAME_BYTES_MAX}")
    try:
        return Frame(kind), size_bytes
    except ValueError as e:
        raise WireError(f"frame type {kind}") from e


def unpacked(layout: struct.Struct, raw: bytes) -> tuple[Any, ...]:
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


def pack_read(
    asked: Sequence[tuple[Key, Location]], timeout_s: float, kind: Frame = Frame.READ
) -> Message:
    """Pack a READ or LOOK frame. `timeout_s` is how long the client will wait for all of it."""
    body = [_READ.pack(_milliseconds(timeout_s))]
    body += [_ASKED.pack(key, *location[1:]) for key, location in asked]
    return kind, b"".join(body)


def unpack_read(body: bytes, node_id: int) -> tuple[float, list[Asked]]:
    """Return (timeout in seconds, blocks) of a READ or LOOK frame's body."""
    timeout_s = _seconds(body)
    asked = [
        Asked(key, Location(node_id, *fields))
        for key, *fields in _items(_ASKED, body[_READ.size :])
    ]
    return timeout_s, asked


def _milliseconds(timeout_s: float) -> int:
    return min(max(int(timeout_s * 1000), 1), (1 << 32) - 1)


def _seconds(body: bytes) -> float:
    return int(unpacked(_READ, body[: _READ.size])[0]) / 1000


# --- saving ----------------------------------------------------------------------

_PUT = struct.Struct("<IIH")
_OFFER = struct.Struct("<32sIBBQ")


class SaveOffer(NamedTuple):
    """One block that a client has for the node."""

    key: Key
    size_bytes: int
    kind: int
    meta_length: int
    checksum: int
    """xxh3-64 of the payload, which the bytes that the node reads must have."""


def pack_put(
    offers: Sequence[SaveOffer], namespace_id: int, fields: bytes, timeout_s: float
) -> Message:
    """Pack a PUT frame; `fields` are the namespace's, as JSON, or empty."""
    head = _PUT.pack(_milliseconds(timeout_s), namespace_id, len(fields))
    return Frame.PUT, head + fields + b"".join(_OFFER.pack(*offer) for offer in offers)


def unpack_put(body: bytes) -> tuple[float, int, bytes, list[SaveOffer]]:
    """Return (timeout in seconds, namespace id, its fields, offers) of a PUT frame's body."""
    timeout_ms, namespace_id, fields_bytes = unpacked(_PUT, body[: _PUT.size])
    if fields_bytes > NAMESPACE_BYTES_MAX:
        raise WireError(f"a namespace of {fields_bytes} bytes, at most {NAMESPACE_BYTES_MAX}")
    start = _PUT.size + fields_bytes
    offers = [SaveOffer(*item) for item in _items(_OFFER, body[start:])]
    for offer in offers:
        if offer.kind not in KINDS or offer.meta_length > min(offer.size_bytes, META_BYTES_MAX):
            raise WireError(f"kind {offer.kind} with {offer.meta_length} bytes of meta")
    return timeout_ms / 1000, namespace_id, body[_PUT.size : start], offers


GRANTED = 255
"""An answer to PUT: the node will take this payload. Other answers are codes of control_replies.py
or a reason."""


def pack_answers(answers: Sequence[object]) -> Message:
    return Frame.ANSWERS, msgpack.packb(list(answers))


def pack_control(message: Sequence[object]) -> Message:
    """Pack a CONTROL frame around one message of protocol/control.py."""
    return Frame.CONTROL, msgpack.packb(list(message))


def unpack_answers(body: bytes) -> list[object]:
    """Return the list in an ANSWERS frame's body; the caller checks its items."""
    return _listed(body, unpacked_answers)


def unpack_control(body: bytes) -> list[object]:
    """Return the list in a CONTROL frame's body; its items are for the caller to check."""
    return _listed(body, unpacked_request)


def _listed(body: bytes, unpacked: Callable[[bytes], object]) -> list[object]:
    try:
        items = unpacked(body)
    except (msgpack.UnpackException, ValueError, TypeError, RecursionError) as e:
        raise WireError(f"answers that cannot be read: {e}") from e
    if not isinstance(items, list):
        raise WireError(f"answers that are a {type(items).__name__}")
    return items
