"""Saving to a node on another host: the client offers, the node takes what it wants (rule 6)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.core.stream_wire import GRANTED, Frame, Offer, WireError, pack_put, unpack_answers
from kvstore.nodedir import Announcement
from kvstore.transport.channel import Channel
from kvstore.transport.chunks import Digest, chunked
from kvstore.transport.stream import StreamTransport, receive_frame
from kvstore.types import Key


class Payload(NamedTuple):
    """A value in the caller's memory, which must stay as it is while it is saved."""

    key: Key
    pieces: Sequence[memoryview]
    kind: int
    meta_length: int

    @property
    def size_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


Answer = int | str
"""A code of core/node.py, or a reason."""


def put(
    transport: StreamTransport,
    node: Announcement,
    payloads: Sequence[Payload],
    namespace: tuple[int, bytes],
    deadline: float,
) -> list[Answer]:
    """What became of each of `payloads`, at most one batch of them. `namespace`: id and fields.

    Raises `PeerError` when nobody knows: the node cannot be reached, breaks the rules
    or is not done by the deadline.
    """
    offers = [_offer(payload) for payload in payloads]
    pool = transport.pool(node)
    channel = pool.take(deadline)
    in_step = False
    try:
        request = pack_put(offers, *namespace, deadline - time.monotonic())
        channel.send([request], deadline)
        codes = _answers(channel, len(offers), deadline)
        granted = [i for i, code in enumerate(codes) if code == GRANTED]
        for i in granted:
            channel.send(list(payloads[i].pieces), deadline)
        outcomes = _answers(channel, len(granted), deadline)
        in_step = True
    finally:
        pool.give(channel, in_step)
    for i, outcome in zip(granted, outcomes, strict=True):
        codes[i] = outcome
    return codes


def _offer(payload: Payload) -> Offer:
    chunks = chunked(payload.pieces)
    digest = Digest(chunks)
    for chunk in chunks:
        digest.update(chunk)
    return Offer(payload.key, payload.size_bytes, payload.kind, payload.meta_length, digest.value())


def _answers(channel: Channel, count: int, deadline: float) -> list[Answer]:
    answers = unpack_answers(receive_frame(channel, Frame.ANSWERS, deadline))
    if len(answers) != count or not all(type(answer) in (int, str) for answer in answers):
        raise WireError(f"{len(answers)} answers to {count} blocks, or none")
    return answers
