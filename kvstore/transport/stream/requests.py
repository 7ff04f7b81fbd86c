"""Sends requests other than reads to a node on another host: saves, and questions about it.

A save is an offer: the node says what it wants of it, and writes that itself (rule 6).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.nodedir import Announcement
from kvstore.protocol.chunks import Digests, chunked
from kvstore.protocol.control_replies import InvalidReplyError, outcome
from kvstore.protocol.nixl import Endpoint, unpack_endpoint
from kvstore.protocol.stream import (
    GRANTED,
    Frame,
    Message,
    SaveOffer,
    WireError,
    pack_control,
    pack_put,
    pack_read,
    unpack_answers,
)
from kvstore.protocol.stream_reply import ReadReply, heads_bytes
from kvstore.transport.stream.channel import Channel
from kvstore.transport.stream.transport import StreamTransport, receive_frame
from kvstore.types import Key, Location, PutResult


class SavePayload(NamedTuple):
    """A value in the caller's memory, which must stay as it is while it is saved."""

    key: Key
    pieces: Sequence[memoryview]
    kind: int
    meta_length: int

    @property
    def size_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


def put(
    transport: StreamTransport,
    node: Announcement,
    payloads: Sequence[SavePayload],
    namespace: tuple[int, bytes],
    deadline: float,
    *,
    answer_by: float | None = None,
) -> list[PutResult]:
    """Save `payloads`, at most one batch of them; returns what became of each, in order.

    `namespace` is the (id, fields) of the one that their keys are bound to. The node has to say by
    `answer_by` what it takes, and to be done by `deadline` (both seconds of `time.monotonic`).
    Raises `PeerError` when nobody knows what became of them: the node cannot be reached, breaks
    the protocol or is late.
    """
    offers = [_offer(payload) for payload in payloads]
    pool = transport.pool(node)
    answer_by = deadline if answer_by is None else min(answer_by, deadline)
    channel = pool.take(answer_by)
    in_step = False
    try:
        request = pack_put(offers, *namespace, deadline - time.monotonic())
        channel.send_frame(request, answer_by)
        answers = _answers(channel, len(offers), answer_by)
        granted = [i for i, answer in enumerate(answers) if answer == GRANTED]
        results = {i: _result(one) for i, one in enumerate(answers) if one != GRANTED}
        for i in granted:
            _send(channel, payloads[i].pieces, deadline)
        if granted:
            channel.send([channel.seals.sent.payload_tag()], deadline)
        taken = _answers(channel, len(granted), deadline)
        results.update(zip(granted, map(_result, taken), strict=True))
        in_step = True
    finally:
        pool.give(channel, in_step)
    return [results[i] for i in range(len(payloads))]


def look(
    transport: StreamTransport,
    node: Announcement,
    asked: Sequence[tuple[Key, Location]],
    deadline: float,
) -> list[bool]:
    """Return whether each of `asked`, at most `STREAM_BLOCKS_MAX` blocks, is where its location
    says.

    Raises `PeerError` when the node cannot be reached, breaks the protocol or is late.
    """
    pool = transport.pool(node)
    channel = pool.take(deadline)
    in_step = False
    try:
        channel.send_frame(pack_read(asked, deadline - time.monotonic(), Frame.LOOK), deadline)
        raw = channel.receive_bytes(heads_bytes(len(asked)), deadline)
        reply = ReadReply([location.length for _, location in asked])
        reply.heads(raw, channel.seals.received)
        in_step = True
    finally:
        pool.give(channel, in_step)
    return [head is not None for head in reply.there()]


def ask(
    transport: StreamTransport, node: Announcement, message: list[object], deadline: float
) -> object:
    """Return the answer to one message of protocol/control.py, of those that clients elsewhere may
    send.

    Raises `PeerError` as `look`.
    """
    (answer,) = _asked(transport, node, pack_control(message), 1, deadline)
    return answer


def tell(
    transport: StreamTransport, node: Announcement, message: list[object], deadline: float
) -> None:
    """Send one message of protocol/control.py that has no answer. Raises `PeerError`."""
    pool = transport.pool(node)
    channel = pool.take(deadline)
    in_step = False
    try:
        channel.send_frame(pack_control(message), deadline)
        in_step = True
    finally:
        pool.give(channel, in_step)


def nixl_endpoint(
    transport: StreamTransport, node: Announcement, deadline: float
) -> Endpoint | None:
    """Return how to read the node's memory through NIXL; None when it has no endpoint now.

    Raises `PeerError` as `look`.
    """
    return unpack_endpoint(_asked(transport, node, (Frame.NIXL, b""), None, deadline))


def _asked(
    transport: StreamTransport,
    node: Announcement,
    request: Message,
    count: int | None,
    deadline: float,
) -> list[object]:
    """Return the answers to one frame, `count` of them if that is known."""
    pool = transport.pool(node)
    channel = pool.take(deadline)
    in_step = False
    try:
        channel.send_frame(request, deadline)
        answers = _answers(channel, count, deadline)
        in_step = True
        return answers
    finally:
        pool.give(channel, in_step)


def _send(channel: Channel, pieces: Sequence[memoryview], deadline: float) -> None:
    """Send `pieces`, each part right after it has gone by the seal, while it is in the processor's
    cache."""
    for chunk in chunked([pieces]):
        for piece in chunk.pieces:
            channel.seals.sent.update(piece)
        channel.send(chunk.pieces, deadline)


def _offer(payload: SavePayload) -> SaveOffer:
    digests = Digests([payload.size_bytes])
    for chunk in chunked([payload.pieces]):
        digests.update(chunk)
    checksum = digests.value()
    return SaveOffer(payload.key, payload.size_bytes, payload.kind, payload.meta_length, checksum)


def _answers(channel: Channel, count: int | None, deadline: float) -> list[object]:
    answers = unpack_answers(receive_frame(channel, Frame.ANSWERS, deadline))
    if count is not None and len(answers) != count:
        raise WireError(f"{len(answers)} answers where {count} were due")
    return answers


def _result(answer: object) -> PutResult:
    try:
        return outcome(answer)
    except InvalidReplyError as e:
        raise WireError(str(e)) from e
