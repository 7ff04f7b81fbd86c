"""Lets clients in on the control socket, and ends them when they are dead.

    unheard   a connection that has not said HELLO; of other users there are few (unheard.py)
    known     its HELLO made it speak for a session (sessions.py). A client that connects again
              goes on with the session that it had: what it said on the older connection counts
              no more
    ended     by BYE, or when its lease is free: only then is what it held given to others. A lost
              connection says nothing (rule 5)

The thread of the node's event loop alone calls this.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvstore.core.events import Event, SessionDead, SessionResumed
from kvstore.errors import UsageError
from kvstore.node.control_server import Connection
from kvstore.node.permissions import owns_node
from kvstore.node.sessions import ClientSession, Sessions
from kvstore.node.unheard import UnheardReaders
from kvstore.protocol import control
from kvstore.protocol.control import Hello, Op

log = logging.getLogger("kvstore.node")


class Clients:
    """The clients of one start of a node."""

    def __init__(
        self,
        sessions: Sessions,
        start: tuple[int, int],
        act: Callable[[Event], None],
        holds: Callable[[int], bool],
        *,
        takes_saves: bool,
        has_group: bool,
    ) -> None:
        """`start` is the node's (id, epoch). `act` carries out what a client asks for; `holds`
        says whether a session of that number has slots or pins. With `has_group`, other users may
        read: permissions of the socket decide which."""
        self._sessions = sessions
        self._start = start
        self._act = act
        self._holds = holds
        self._takes_saves = takes_saves
        self._has_group = has_group
        self._unheard = UnheardReaders()

    def connection(self, kind: type[Connection] = Connection) -> Connection:
        """A connection for one client that comes."""
        return kind(self._made, self._said_hello, self._asked, self._gone)

    def _made(self, connection: Connection) -> None:
        if not owns_node(connection.peer_uid()):
            self._unheard.enter(connection)

    def _said_hello(self, connection: Connection, hello: Hello) -> None:
        self._unheard.leave(connection)
        uid = connection.peer_uid()
        ours = owns_node(uid)
        if ours and self._takes_saves:
            session, known = self._sessions.enter(hello.client_id, hello.request, connection)
        elif ours or self._has_group:
            session, known = self._sessions.enter_reader(uid, hello.client_id, connection), False
        else:
            must = "this node is its own user's alone; --group lets the members of a group read"
            raise UsageError("user", uid, must)
        connection.session = session
        if known:
            self._act(SessionResumed(session.number, hello.reserved, hello.pinned))
        connection.welcome(hello.request, *self._start)

    def _asked(self, connection: Connection, message: object) -> None:
        session = connection.session
        assert session is not None
        if session.transport is not connection:
            # The client has moved to a newer connection; what it said there
            # (which reservations it holds) must not be undone by older words.
            connection.hang_up()
            return
        op: Any = message[0] if isinstance(message, list) and message else None
        if op == Op.BYE:
            self._end(session)
            connection.session = None
            connection.hang_up()
            return
        event = control.decode(session.number, message)
        if session.reads_only and op not in control.READER_OPS:
            raise UsageError("op", Op(op).name, "this user may only read")
        self._act(event)

    def _gone(self, connection: Connection) -> None:
        self._unheard.leave(connection)
        session = connection.session
        if session is not None and session.transport is connection:
            session.transport = None

    def _end(self, session: ClientSession) -> None:
        self._act(SessionDead(session.number))
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
