"""Lets clients in on the control socket, and ends them when they are dead.

    unheard   a connection that has not said HELLO: there are few, of other users very few, so that
              nobody takes the file descriptors that clients need
    known     its HELLO made it speak for a session (liveness.py). A client that connects again
              goes on with the session that it had: what it said on the older connection counts
              no more
    ended     by BYE, or when its lease is free: only then is what it held given to others. A lost
              connection says nothing (rule 5)

The thread of the node's event loop alone calls this.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from kvstore.core.events import Event, Reply, SessionDead, SessionResumed
from kvstore.core.parts import joined
from kvstore.errors import UsageError
from kvstore.node.control.control_server import Connection, Work
from kvstore.node.control.liveness import ClientSession, Sessions
from kvstore.node.control.permissions import owns_node
from kvstore.node.control.turns import Turns
from kvstore.protocol import control
from kvstore.protocol.control import Op
from kvstore.protocol.control_events import Hello, decode
from kvstore.system.descriptors import share
from kvstore.system.waiting import Waiting

log = logging.getLogger("kvstore.node")

UNHEARD_MAX, UNHEARD_READERS_MAX = 512, 32
"""Connections that have not said HELLO: of the node's own user, and of all others together."""


class Acts(Protocol):
    """Carries events out: implemented by the daemon."""

    def act(self, event: Event) -> None:
        """Carry out all of it, and answer."""
        ...

    def parts(self, event: Event, at_most: int) -> Sequence[Event]:
        """Return what is to be carried out for it, in parts of at most so many blocks."""
        ...

    def check(self, event: Event) -> None:
        """Raises `UsageError` for what this node does not do for anybody."""
        ...

    def carry_out(self, event: Event) -> Sequence[Reply]:
        """Carry out all of it but the answers."""
        ...

    def answer(self, reply: Reply) -> None: ...


class Clients:
    """The clients of one start of a node."""

    def __init__(
        self,
        sessions: Sessions,
        start: tuple[int, int],
        node: Acts,
        holds: Callable[[int], bool],
        turns: Turns,
        *,
        takes_saves: bool,
        has_group: bool,
    ) -> None:
        """Start without clients. `start` is the node's (id, epoch). `node` carries out what a
        client asks for; `holds` says whether a session of that number has slots or pins. Root may
        ask for the node's state, and with `has_group` so may everybody whom the permissions of the
        socket let in."""
        self._sessions = sessions
        self._start = start
        self._node = node
        self.turns = turns
        self._holds = holds
        self._takes_saves = takes_saves
        self._has_group = has_group
        self._unheard = Waiting[Connection]()
        self._unheard_readers = Waiting[Connection]()

    def connection(self, kind: type[Connection] = Connection) -> Connection:
        """Return the protocol of one new client connection."""
        return kind(self._made, self._on_hello, self._asked, self._on_closed, self.turns)

    def _made(self, connection: Connection) -> None:
        uid = connection.peer_uid()
        if owns_node(uid):
            goes = self._unheard.enter(connection, uid, share(UNHEARD_MAX, 8))
        else:
            connection.may_only_read()
            goes = self._unheard_readers.enter(connection, uid, share(UNHEARD_READERS_MAX, 16))
        if goes is not None:
            goes.hang_up()

    def _heard(self, connection: Connection) -> None:
        """Forget a connection that has said HELLO, or was closed."""
        self._unheard.leave(connection)
        self._unheard_readers.leave(connection)

    def _on_hello(self, connection: Connection, hello: Hello) -> Work | None:
        """Let its client in. Return what is left to do when it holds, or says it holds, many
        slots."""
        work = self._let_in(connection, hello)
        return None if next(work, None) is None else work

    def _let_in(self, connection: Connection, hello: Hello) -> Work:
        at_most = self.turns.turn_items
        yield from hello.claims(at_most)
        self._heard(connection)
        uid = connection.peer_uid()
        ours = owns_node(uid)
        if ours and self._takes_saves:
            session, known = self._sessions.enter(hello.client_id, hello.request, connection)
        elif ours or uid == 0 or self._has_group:
            session, known = self._sessions.enter_reader(uid, hello.client_id, connection), False
        else:
            must = "this node is its own user's alone; --group lets the members of a group ask it"
            raise UsageError("user", uid, must)
        connection.session = session
        if known:
            back = SessionResumed(session.number, hello.reserved, hello.pinned)
            for i, part in enumerate(self._node.parts(back, at_most)):
                if i:
                    yield at_most
                if session.transport is not connection:  # it has said a later HELLO meanwhile
                    connection.hang_up()
                    return
                self._node.carry_out(part)
        connection.welcome(hello.request, *self._start)

    def _reader_ops(self, connection: Connection) -> frozenset[Op]:
        ours = owns_node(connection.peer_uid())
        return control.OWN_READER_OPS if ours else control.READER_OPS

    def _asked(self, connection: Connection, message: object) -> Work | None:
        """Carry a request out; the parts of one that is too large for one turn are left to do."""
        session = connection.session
        assert session is not None
        if session.transport is not connection:
            # The client has moved to a newer connection; what it said there
            # (which reservations it holds) must not be undone by older words.
            connection.hang_up()
            return None
        op: object = message[0] if isinstance(message, list) and message else None
        if op == Op.BYE:
            self._end(session)
            connection.session = None
            connection.hang_up()
            return None
        event = decode(session.number, message)
        assert isinstance(op, int)
        if session.reads_only and op not in self._reader_ops(connection):
            must = "this user may only read what the node counts, lists and explains"
            raise UsageError("op", Op(op).name, must)
        self._node.check(event)
        parts = self._node.parts(event, self.turns.turn_items)
        if len(parts) > 1:
            return self._in_parts(connection, session, event, parts)
        self._node.act(event)
        return None

    def _in_parts(
        self, connection: Connection, session: ClientSession, event: Event, parts: Sequence[Event]
    ) -> Work:
        """Carry a request out as far as its client is on this connection: what it says on a newer
        one must not be undone, and what was granted here is taken back by that."""
        replies: list[Reply] = []
        for part in parts:
            if session.transport is not connection:
                connection.hang_up()
                return
            replies += self._node.carry_out(part)
            yield self.turns.turn_items
        reply = joined(event, replies)
        if reply is not None:
            self._node.answer(reply)

    def _on_closed(self, connection: Connection) -> None:
        self._heard(connection)
        session = connection.session
        if session is not None and session.transport is connection:
            session.transport = None

    def _end(self, session: ClientSession) -> None:
        self._node.act(SessionDead(session.number))
        self._sessions.forget(session)

    def end_dead(self) -> None:
        """End the sessions of clients whose processes have ended."""
        for session in self._sessions.disconnected():
            if self._sessions.dead(session):
                if self._holds(session.number):
                    log.info("client %s died; its slots are free", session.client_id)
                self._end(session)

    def hang_up(self) -> None:
        """Hang up on all: they find no node here any more."""
        for session in self._sessions.all():
            if session.transport is not None:
                session.transport.hang_up()
