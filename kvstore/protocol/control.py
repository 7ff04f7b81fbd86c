"""Decodes and checks what clients ask a node of their host: msgpack arrays.

A request is `[op, request, ...]`, an answer `[request, ok, body]`. `request`
is the client's number for it; 0 asks for no answer. Per-key lists travel as one
binary (keys) or as one integer where all entries are equal, so that a batch
costs little more than a single key.

States of a connection, at the node (node/control/control_server.py, node/control/clients.py):

    new        takes HELLO and nothing else; anything else, or a HELLO that is refused, ends it
    known      takes every other request; of root and of the group, `READER_OPS`.
               A request that is refused changes nothing, and the connection goes on
    replaced   its client has said HELLO on a newer connection: the next request ends it
    ended      by BYE, which ends the session too; by anything else the session goes on, until
               the client says HELLO again or its lease is free (rule 5)

Numbers of a connection's requests, 0 apart, grow. One that is not larger than the last is
passed over: to reserve or pin twice would leak, as the client hears one answer.

Answers may come in another order than requests: those that tell of a block stored or dropped
wait until the index was told, or has had its time.

A request of many blocks is carried out in parts, others' requests between them (core/parts.py);
its connection's later ones wait. If the connection ends meanwhile, the rest is not carried out.

Must never happen: a request that is carried out in part because its later part is malformed;
one that is carried out twice; one that reaches the core with a number, a length or a list
beyond its limit. So `decode` (control_events.py) looks at all of a message and returns an event,
or raises `UsageError` and nothing has changed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import msgpack

from kvstore.limits import (
    LIST_ROWS_MAX,
    MESSAGE_BYTES_MAX,
)
from kvstore.protocol.unpacking import Messages
from kvstore.types import KEY_BYTES, Key

PROTOCOL_VERSION = 2


class Op(enum.IntEnum):
    """The operation that a request asks for: the first item of its message."""

    HELLO = 0
    RESERVE = 1
    COMMIT = 2
    ABORT = 3
    PIN = 4
    UNPIN = 5
    TOUCH = 6
    DROP = 7
    CLEAR = 8
    STAT = 9
    LIST = 10
    BYE = 11
    EXPLAIN = 12
    NAMESPACE = 13
    SUSPECT = 14
    RESET = 15
    NAMES = 16
    RETAIN = 17
    REPORT = 18
    SAVED = 19
    LEFT = 20


READER_OPS = frozenset({Op.STAT, Op.LIST, Op.BYE, Op.EXPLAIN})
"""Operations for root and the group: what commands ask, and nothing that changes a block."""
OWN_READER_OPS = READER_OPS | {Op.TOUCH, Op.SAVED, Op.LEFT, Op.SUSPECT}
"""Operations for this user's processes at a node in VRAM that takes no saves of others."""


packed: Callable[[Sequence[object]], bytes] = msgpack.packb
join_keys: Callable[[Sequence[Key]], bytes] = b"".join


def unpacker() -> Messages:
    """Return what splits a byte stream into messages, and refuses what is over the limits."""
    messages: Messages = msgpack.Unpacker(
        use_list=True,
        max_buffer_size=MESSAGE_BYTES_MAX,
        max_ext_len=0,
        strict_map_key=True,
    )
    return messages


def items_of(message: object) -> int:
    """Return how many blocks a message names, before anything of it is checked: about what it
    costs."""
    if not isinstance(message, list) or len(message) < 3:
        return 0
    op, _, *args = message
    if op == Op.LIST:
        at_most = args[-1]
        return min(at_most, LIST_ROWS_MAX) if type(at_most) is int else 0
    return max(map(_items_in, args))


def _items_in(argument: object) -> int:
    if isinstance(argument, bytes):
        return len(argument) // KEY_BYTES
    return len(argument) if isinstance(argument, list) else 0
