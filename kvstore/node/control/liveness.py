"""Knows the clients of a node over reconnects, and finds out which of them are dead.

A client is its lease file, whose lock its process holds. A lost connection
says nothing (rule 5): only a free lock proves that nobody can write any more.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Protocol

from kvstore.core.events import Reply
from kvstore.errors import UsageError
from kvstore.system.descriptors import share
from kvstore.system.filelock import fd_is_locked


class Speaker(Protocol):
    """Takes a session's answers to its client."""

    def send(self, reply: Reply) -> None: ...

    def hang_up(self) -> None: ...


class ClientSession:
    __slots__ = ("client_id", "hello", "lease_fd", "lease_path", "number", "transport")

    def __init__(self, number: int, client_id: str, lease_path: Path, lease_fd: int | None) -> None:
        self.number = number
        self.client_id = client_id
        self.lease_path = lease_path
        self.lease_fd = lease_fd
        """None for root or a member of the group: it holds nothing, so it ends with its
        connection."""
        self.hello = 0
        """The number of its latest HELLO; a client counts them over all its connections."""
        self.transport: Speaker | None = None
        """The connection that speaks for it now, None while it has none."""

    @property
    def reads_only(self) -> bool:
        return self.lease_fd is None


class Sessions:
    """All clients of one node."""

    def __init__(self, leases: Path, clients_max: int) -> None:
        self._leases = leases
        self._clients_max = clients_max
        self._by_client: dict[str, ClientSession] = {}
        self._by_number: dict[int, ClientSession] = {}
        self.admitted = 0
        """Clients admitted since the start."""

    def __len__(self) -> int:
        return len(self._by_client)

    def get(self, number: int) -> ClientSession | None:
        return self._by_number.get(number)

    def enter(self, client_id: str, request: int, transport: Speaker) -> tuple[ClientSession, bool]:
        """Return the session of a client that said HELLO, and whether it was known before.

        Raises `UsageError` when its lease is not locked, when there are too many clients, and when
        it has said a later HELLO: what this one says it holds is out of date, and slots that were
        granted since would be freed under its hands (rule 5).
        """
        session = self._by_client.get(client_id)
        known = session is not None
        if session is None:
            session = self._admit(client_id)
        if request <= session.hello:
            raise UsageError("request", request, f"this client said HELLO {session.hello} before")
        session.hello = request
        session.transport = transport
        return session, known

    @property
    def _readers(self) -> int:
        return sum(session.reads_only for session in self._by_client.values())

    def enter_reader(self, uid: int, client_id: str, transport: Speaker) -> ClientSession:
        """Return a session for a user who may only read. Raises `UsageError` when there are too
        many.

        It has a name of its own: nobody becomes another client by knowing its id.
        """
        most = share(self._clients_max // 2, 8)
        if self._readers >= most:
            raise UsageError("readers", self._readers, f"at most {most} a node")
        name = f"{uid}/{client_id}"
        if name in self._by_client:
            raise UsageError("client_id", client_id, "is connected already")
        own, own_most = sum(one.startswith(f"{uid}/") for one in self._by_client), (most + 1) // 2
        if own >= own_most:
            raise UsageError("readers", own, f"at most {own_most} of one user")
        session = self._add(name, Path(), None)
        session.transport = transport
        return session

    def _admit(self, client_id: str) -> ClientSession:
        if len(self._by_client) >= self._clients_max:
            raise UsageError("clients", len(self._by_client), f"at most {self._clients_max} a node")
        path = self._leases / client_id
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = os.open(path, flags)
        except OSError as e:
            raise UsageError("client_id", client_id, f"has no lease file ({e.strerror})") from e
        if not fd_is_locked(fd):
            os.close(fd)
            raise UsageError("client_id", client_id, "its lease is not locked by its process")
        return self._add(client_id, path, fd)

    def _add(self, client_id: str, path: Path, fd: int | None) -> ClientSession:
        self.admitted += 1
        session = ClientSession(self.admitted, client_id, path, fd)
        self._by_client[client_id] = self._by_number[session.number] = session
        return session

    def enter_inside(self, transport: Speaker) -> ClientSession:
        """Return a session of a thread of this process, without a lease: `leave_inside` ends it."""
        self.admitted += 1
        session = ClientSession(self.admitted, "", self._leases, -1)
        session.transport = transport
        self._by_number[session.number] = session
        return session

    def leave_inside(self, session: ClientSession) -> None:
        self._by_number.pop(session.number, None)

    def forget(self, session: ClientSession) -> None:
        """Forget a client whose process is dead, and remove its lease."""
        del self._by_client[session.client_id]
        del self._by_number[session.number]
        if session.lease_fd is None:
            return
        os.close(session.lease_fd)
        with contextlib.suppress(OSError):
            session.lease_path.unlink()

    def all(self) -> list[ClientSession]:
        return list(self._by_client.values())

    def leases(self) -> list[tuple[Path, int]]:
        """Return the leases that clients hold: their files, and this process's descriptors of
        them."""
        all_of_them = self._by_client.values()
        return [(s.lease_path, s.lease_fd) for s in all_of_them if s.lease_fd is not None]

    def disconnected(self) -> list[ClientSession]:
        return [s for s in self._by_client.values() if s.transport is None]

    @staticmethod
    def dead(session: ClientSession) -> bool:
        """Return whether the client's process has ended: its lease is free."""
        return session.lease_fd is None or not fd_is_locked(session.lease_fd)

    def close(self, *, keep: bool = False) -> None:
        """Forget all clients. With `keep`, the leases stay: they tell the node's next start who
        lives."""
        for session in self.all():
            if keep and session.lease_fd is not None:
                os.close(session.lease_fd)
            else:
                self.forget(session)
