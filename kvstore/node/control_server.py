"""The node's control socket: frames in, frames out, one asyncio protocol per connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice
from typing import cast

import msgpack

from kvstore.core.events import Reply
from kvstore.errors import KVStoreError, UsageError
from kvstore.limits import MESSAGE_BYTES_MAX
from kvstore.node.sessions import ClientSession
from kvstore.protocol import control
from kvstore.protocol.control import Hello
from kvstore.protocol.control_replies import encoded
from kvstore.unix_peer import peer_uid

TURN_MESSAGES = 4
"""Messages of one connection that are carried out before the others have their turn: what comes
in one piece may be thousands, a millisecond each."""


class Connection(asyncio.Protocol):
    """One client's connection to the control socket; the daemon decides, this only moves bytes.

    Whoever breaks the framing, or lets more than one full message of answers
    pile up, is hung up on: a slow client must not fill the node's memory. Nothing
    of what it has sent is carried out from then on.
    """

    def __init__(
        self,
        on_made: Callable[[Connection], None],
        on_hello: Callable[[Connection, Hello], None],
        on_request: Callable[[Connection, object], None],
        on_gone: Callable[[Connection], None],
    ) -> None:
        self._on_made = on_made
        self._on_hello = on_hello
        self._on_request = on_request
        self._on_gone = on_gone
        self._unpacker = control.unpacker()
        self._transport: asyncio.Transport | None = None
        self._last_request = 0
        self.session: ClientSession | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._on_made(self)

    def peer_uid(self) -> int:
        """The user whose process is at the other end."""
        assert self._transport is not None
        return peer_uid(self._transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        try:
            self._unpacker.feed(data)
        except (msgpack.UnpackException, ValueError):
            self.hang_up()
        if self._has_more_than_a_turn():
            self._wait_for_turn()

    def _has_more_than_a_turn(self) -> bool:
        """Carry out what has come, as far as one turn goes; whether there may be more."""
        done = 0
        try:
            for message in islice(self._unpacker, TURN_MESSAGES):
                if self._transport is None:
                    return False
                self._handle(message)
                done += 1
        except (msgpack.UnpackException, ValueError):
            self.hang_up()
        return done == TURN_MESSAGES and self._transport is not None

    def _wait_for_turn(self) -> None:
        assert self._transport is not None
        self._transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._has_more_than_a_turn():
            asyncio.get_running_loop().call_soon(self._go_on)
        elif self._transport is not None:
            self._transport.resume_reading()

    def _handle(self, message: object) -> None:
        if self._carried_out(message):
            return
        try:
            if self.session is None:
                self._on_hello(self, Hello(message))
            else:
                self._on_request(self, message)
        except UsageError as e:
            self._refuse(message, e)
            if self.session is None:
                self.hang_up()

    def _carried_out(self, message: object) -> bool:
        """Whether this request, or one that the client made after it, has come before.

        To reserve or pin twice would leak: the client hears one answer.
        """
        request = _number(message)
        if request < 1:
            return False
        if request <= self._last_request:
            return True
        self._last_request = request
        return False

    def _refuse(self, message: object, error: KVStoreError) -> None:
        request = _number(message)
        if request:
            self._send([request, False, str(error)])

    def welcome(self, request: int, node_id: int, epoch: int) -> None:
        """Answer the client's HELLO, which was `request`, with who this node is."""
        self._send([request, True, [node_id, epoch]])

    def send(self, reply: Reply) -> None:
        self._send([reply.request, True, encoded(reply.body)])

    def _send(self, answer: list[object]) -> None:
        transport = self._transport
        if transport is None:
            return
        transport.write(control.packed(answer))
        if transport.get_write_buffer_size() > MESSAGE_BYTES_MAX:
            self.hang_up()

    def hang_up(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_gone(self)


def _number(message: object) -> int:
    """The client's number for its request; 0 where there is none."""
    number = message[1] if isinstance(message, list) and len(message) > 1 else 0
    return number if type(number) is int else 0
