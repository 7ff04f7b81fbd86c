"""The node's control socket: frames in, frames out, one asyncio protocol per connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import cast

import msgpack

from kvstore.core.events import Reply
from kvstore.errors import KVStoreError, PeerError, UsageError
from kvstore.limits import MESSAGE_BYTES_MAX
from kvstore.node.control.liveness import ClientSession
from kvstore.node.control.turns import MESSAGE_ITEMS, Turns
from kvstore.protocol import control
from kvstore.protocol.control_events import Hello
from kvstore.protocol.control_replies import encoded
from kvstore.protocol.unpacking import READER_MESSAGE_BYTES_MAX, Messages, ShortMessages
from kvstore.system.unix_peer import peer_uid

Work = Iterator[int]
"""A request being carried out: each step does a part of it and returns how many items that was."""


class Connection(asyncio.Protocol):
    """One client's connection to the control socket; the daemon decides, this only moves bytes.

    Its requests are carried out in their order: small ones as they come, up to a limit, the rest
    in turns with other connections (turns.py), a large one in parts. What comes meanwhile waits
    in the socket.

    Whoever breaks the framing, or lets more than one full message of answers
    pile up, is hung up on: a slow client must not fill the node's memory. Nothing
    of what it has sent is carried out from then on.
    """

    def __init__(
        self,
        on_made: Callable[[Connection], None],
        on_hello: Callable[[Connection, Hello], Work | None],
        on_request: Callable[[Connection, object], Work | None],
        on_closed: Callable[[Connection], None],
        turns: Turns,
    ) -> None:
        self._on_made = on_made
        self._on_hello = on_hello
        self._on_request = on_request
        self._on_closed = on_closed
        self._turns = turns
        self._in_line = False
        """Whether it waits for a turn; nothing more is read meanwhile."""
        self._next: list[object] = []
        """The message to be carried out next, if it was read already."""
        self._rest: Work | None = None
        """The parts of a request that are still to be carried out."""
        self._begun = 0
        """The client's number for the last message that was begun."""
        self._owed = 0
        """Items that it used beyond its turns."""
        self._unpacker: Messages = control.unpacker()
        self._transport: asyncio.Transport | None = None
        self._last_request = 0
        self.session: ClientSession | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._on_made(self)

    def peer_uid(self) -> int:
        """Return the user whose process is at the other end."""
        assert self._transport is not None
        return peer_uid(self._transport.get_extra_info("socket"))

    def may_only_read(self) -> None:
        """Take no more of this connection at once than who only reads has to say."""
        self._unpacker = ShortMessages(READER_MESSAGE_BYTES_MAX)

    def data_received(self, data: bytes) -> None:
        try:
            self._unpacker.feed(data)
        except (msgpack.UnpackException, ValueError):
            self.hang_up()
            return
        if not self._in_line and not self._small_ones_done():
            assert self._transport is not None
            self._in_line = True
            self._transport.pause_reading()
            self._turns.enter(self._turn)

    def _small_ones_done(self) -> bool:
        """Carry out what has come, as far as it is little. Return whether that was all."""
        left = self._turns.at_once_items
        while self._transport is not None:
            if not self._read():
                return True
            items = MESSAGE_ITEMS + control.items_of(self._next[0])
            if items > left:
                return False
            left -= items
            self._begin(items)
            if self._rest is not None:  # it names little and has much done
                return False
        return True

    def _turn(self) -> bool:
        """Carry out a turn's worth of what has come. Return whether there is more."""
        left = self._turns.turn_items - self._owed
        while left > 0 and self._transport is not None:
            if self._rest is not None:
                left -= self._step()
            elif self._read():
                left -= self._begin(MESSAGE_ITEMS + control.items_of(self._next[0]))
            else:
                self._in_line = False
                if self._transport is not None:
                    self._transport.resume_reading()
                self._owed = 0
                return False
        self._owed = max(-left, 0)
        return self._transport is not None

    def _read(self) -> bool:
        """Return whether there is a whole message, which is the next."""
        if not self._next:
            try:
                self._next = [next(self._unpacker)]
            except StopIteration:
                return False
            except (msgpack.UnpackException, ValueError):
                self.hang_up()
                return False
        return True

    def _begin(self, items: int) -> int:
        """Carry out the next message, whose cost is `items`, unless it needs several turns; return
        what it has cost."""
        message = self._next.pop()
        self._begun = _number(message)
        if self._carried_out(message):
            return MESSAGE_ITEMS
        try:
            if self.session is None:
                self._rest = self._on_hello(self, Hello(message))
            else:
                self._rest = self._on_request(self, message)
        except UsageError as e:
            self._refuse(self._begun, e)
        return MESSAGE_ITEMS if self._rest is not None else items

    def _step(self) -> int:
        """Carry the next part of the request out; tells its cost."""
        assert self._rest is not None
        try:
            for items in self._rest:
                return items
        except UsageError as e:
            self._refuse(self._begun, e)
        self._rest = None
        return 0

    def _carried_out(self, message: object) -> bool:
        """Return whether this request, or a later one of the client, was carried out already.

        To reserve or pin twice would leak, because the client reads one answer.
        """
        request = _number(message)
        if request < 1:
            return False
        if request <= self._last_request:
            return True
        self._last_request = request
        return False

    def _refuse(self, request: int, error: KVStoreError) -> None:
        if request:
            self._send([request, False, str(error)])
        if self.session is None:
            self.hang_up()

    def welcome(self, request: int, node_id: int, epoch: int) -> None:
        """Answer the client's HELLO, which was `request`, with who this node is."""
        self._send([request, True, [node_id, epoch]])

    def send(self, reply: Reply) -> None:
        if isinstance(reply.body, PeerError):
            self._send([reply.request, None, str(reply.body)])
            return
        self._send([reply.request, True, encoded(reply.body)])

    def _send(self, answer: list[object]) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():  # asyncio logs each answer that is lost
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
        self._on_closed(self)


def _number(message: object) -> int:
    """Return the client's number for its request; 0 where there is none."""
    number = message[1] if isinstance(message, list) and len(message) > 1 else 0
    return number if type(number) is int else 0
